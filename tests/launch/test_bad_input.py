"""Invalid flags, files, folders, devices and lengths: each is one line that names the cause, and nothing is written."""

import json
import shutil
from pathlib import Path

import pytest

from memsearcher_jax.launch import (
    ask,
    build_corpus,
    build_index,
    compare,
    evaluate,
    export_hf,
    plan_tpu,
    report,
    serve_agent,
    serve_search,
    sweep,
    tpu_train,
)
from memsearcher_jax.launch.pod import queued_resource
from memsearcher_jax.runs.run_dir import located

TINY, TINY_MEMALPHA = (f"--checkpoint {located(f'package:{name}')}" for name in ("tiny", "tiny_memalpha"))
EVALUATED = f"--config tiny_warmstart {TINY}"
CORPUS = "--retrieval.corpus corpus.jsonl --data.test good.jsonl"
SERVED = f"--config tiny {TINY} --retrieval.index_type exact"


GOOD_ROW = json.dumps({"id": "a", "question": "Who?", "golden_answers": ["Ada"]})
PASSAGE = json.dumps({"id": "a", "contents": '"Ada"\nAda was a countess.'})


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """The working directory, with all files that the cases below name."""
    monkeypatch.chdir(tmp_path)
    files = {
        "good.jsonl": GOOD_ROW + "\n",
        "long.jsonl": json.dumps({"id": "a", "question": "Who? " * 90, "golden_answers": ["Ada"]}) + "\n",
        "corpus.jsonl": PASSAGE + "\n",
        "words/config.json": "no JSON",
        "taken/notes.txt": "keep\n",
        "file": "keep\n",
        "nq/test.jsonl": GOOD_ROW + "\n",
        "ev/results.json": "{}",
        "ev/trajectories/notes.txt": "keep\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    return tmp_path


INVALID = {
    tpu_train: [
        ("--data.train none.jsonl --retrieval.corpus corpus.jsonl", "none.jsonl: no such file"),
        ("--data.train long.jsonl --retrieval.corpus corpus.jsonl", 'question "a" has 270 tokens and the budget is 64'),
        ("--retrieval.corpus corpus.jsonl", "the passages come from a file, the questions do not: set data.train"),
        ("--data.test good.jsonl --retrieval.corpus corpus.jsonl", "there are no questions to train on: set data"),
        ("--model.path none", "none is neither a run (no run.json) nor a Hugging Face model (no config.json)"),
        ("--checkpoint none", "--checkpoint none: no such directory"),
        ("--checkpoint words", "words/config.json: It looks like the config file"),
        ("--model.tokenizer none", "no tokenizer.json in none: set --model.tokenizer"),
        ("--model.vocab_size 512", "has 1536 tokens and model.vocab_size is 512: set model.tokenizer"),
        ("--agent.prompts none", "agent.prompts: 'none' is neither a folder nor a style of memsearcher (brief, "),
        ("--agent.completion_tokens 170", "agent.rewrite_tokens 170), but sampling.context_tokens is 768: raise it or"),
        ("--sampling.slots 12", "sampling.slots 12 does not divide over the 8 samplers of a host: choose"),
        ("--model.param_dtype bfloat16", "model.param_dtype bfloat16 loses nearly all updates to rounding: set it to"),
        ("--out taken", "--out taken is not empty: choose another --out"),
        ("--out file", "--out file is a file: choose a directory"),
        ("--out file/run", "--out file/run cannot be created (Not a directory): choose another directory"),
        ("--json folder", "--json folder is a directory or a device: choose a file"),
        ("--resume", "--resume needs --out"),
        ("--config=", "--config is empty: give a value, or omit it"),
        ("--resume --out none", "none holds no run: there is no run.json in it"),
    ],
    export_hf: [("--config nano --out x", "--checkpoint is missing"), ("--checkpoint folder", "--out is missing")],
    evaluate: [
        ("--config nano", "--checkpoint is missing: give a run directory or a Hugging Face directory"),
        (
            f"{EVALUATED} --benchmarks nq,quiz --data.root .",
            "--benchmarks: no benchmark or file 'quiz': choose from all, nq",
        ),
        (f"{EVALUATED} --benchmarks nq", "set data.root to the folder that holds nq/test.jsonl"),
        (f"{EVALUATED} --benchmarks nq --data x --data.root .", "--data and --benchmarks exclude each other"),
        (f"{EVALUATED} --evaluation.in_distribution quiz", "evaluation.in_distribution: 'quiz' is no benchmark"),
        (
            f"--config tiny_memalpha --agent.memory_tokens 1 {TINY}",
            "memalpha.core_tokens 32 is not below agent.memory_tokens 1",
        ),
    ],
    ask: [
        ("--config nano --human", "the question is missing"),
        (f"--config nano --human {'Who?' * 90}", 'question "asked" has'),
        ("--config nano Who?", "give a run directory or a Hugging Face directory, or write the replies yourself"),
        ("--config tiny_memalpha Who?", "memalpha reads texts: give a directory of documents with --files"),
        ("--config tiny_memalpha --human --files . Who?", "--human writes replies of search agents"),
        ("--config tiny_memalpha --files folder --memalpha.answer_from rag Who?", "omit memalpha.answer_from"),
        ("--config nano --human --files . Who?", "--files fills a memory of documents: it needs an agent that reads"),
        (
            f"--config tiny_memalpha {TINY_MEMALPHA} --files folder Who?",
            "--files folder: contains no document with text",
        ),
    ],
    serve_search: [
        ("--port 70000", "--port is 70000: it must be at least 0 and at most 65,535"),
        ("--port 0 --host no.such.host.invalid", "cannot listen on no.such.host.invalid:0"),
        ("--retrieval.url http://other:8000", "retrieval.url is for clients"),
    ],
    serve_agent: [
        (f"{SERVED} --cors_origins https://page.example/", "write https://host, without a path"),
        (f"{SERVED} --api_key_env NO_SUCH_KEY", "--api_key_env: the environment holds no variable of that name"),
        ("--config qwen7b --checkpoint folder", "needs --retrieval.index DIR or --retrieval.corpus FILE"),
        ("--config tiny_memalpha --checkpoint folder --memalpha.answer_from rag", "omit memalpha.answer_from"),
    ],
    build_index: [
        ("--out i", "--retrieval.corpus is missing"),
        ("--retrieval.corpus corpus.jsonl --out .", ": already exists; choose another folder"),
        ("--retrieval.corpus c --out i --retrieval.method bm25 --embeddings e.npy", "--embeddings are vectors, which"),
        ("--retrieval.corpus corpus.jsonl --out i --shard 2/2", "--shard 2/2: write K/N with K from 0 to N - 1"),
    ],
    build_corpus: [
        ("none", "none: no such directory"),
        ("file", "file: is a file: give the directory that contains it"),
        (". --out file", "--out file exists"),
        ("folder", "contains no documents (.md"),
    ],
    queued_resource: [
        ("create a --zone z --topology tpu7x:2x2x2", "tpu7x:2x2x2: only GKE has it, see launch/pod/jobset.py"),
        ("create a --zone z --topology v6e:3x3", "--topology v6e:3x3 is none of v6e:1x1, "),
        ("create a --zone z", "--topology is none of v4:2x2x1"),
        ("create a --zone z --topology v6e:2x4 --provisioning flex_start", "flex_start needs --max_run"),
        ("ssh a --zone z", "ssh needs a command after --"),
    ],
    sweep: [
        ("--setting rl.credit --out out -- --data.test good.jsonl", "write NAME=A,B,... with different values"),
        (f"--setting reward.wrong_answer=0,2 --out out -- {CORPUS}", "reward.wrong_answer is 2.0: it must be"),
        ("--setting data.train=q.jsonl --out out -- --retrieval.corpus corpus.jsonl", "every value is evaluated: set"),
    ],
    compare: [("a b", "a holds no evaluation: name a folder that launch/evaluate.py wrote")],
    report: [
        ("none --follow", "none: no such folder"),
        ("folder", "folder has neither metrics.jsonl nor trajectories"),
        ("ev --out ev/results.json", "choose a name that ends in .html"),
    ],
    plan_tpu: [("--config nano --topology v3:2x2", "--topology v3:2x2: plans are for v4, v5e, v5p, v6e, tpu7x")],
}


@pytest.mark.parametrize(
    ("program", "flags", "line"), [(program, *row) for program, rows in INVALID.items() for row in rows]
)
def test_invalid_input_is_an_error_and_writes_nothing(program, flags, line, workdir, refused, snapshot):
    before, words = snapshot(workdir), flags.split()
    new = program is tpu_train and not {"--out", "--resume"} & {*words}
    assert line in refused(program.main, [*words, *(["--out", "run"] if new else [])])
    assert snapshot(workdir) == before


def test_uncoordinated_hosts_are_an_error(workdir, refused, monkeypatch):
    """Without coordination each host would overwrite the files of the others."""
    monkeypatch.setattr("jax.process_count", lambda: 4)
    assert "the devices belong to 4 hosts" in refused(tpu_train.main, ["--out", "run"])


def test_a_run_without_a_checkpoint_is_an_error(finished, workdir, refused):
    shutil.copytree(finished, workdir / "young")
    shutil.rmtree(workdir / "young" / "checkpoints")
    for program in (evaluate, export_hf, tpu_train):
        error = refused(program.main, ["--checkpoint", "young", "--out", "out"])
        assert "young holds no checkpoint yet: resume that run, or choose other weights" in error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "run.json is damaged (Expecting property name"),
        ('{"rl": {"stepz": 4}}', "run.json is damaged (there is no setting rl.stepz"),
        ('{"agent": {"workflow": "chat"}}', "agent.workflow is 'chat': it must be one of memsearcher, react"),
    ],
)
def test_a_damaged_run_file_is_an_error(text, line, workdir, refused, snapshot):
    (workdir / "folder" / "run.json").write_text(text)
    before = snapshot(workdir)
    for argv in (["--resume", "--out", "folder"], ["--checkpoint", "folder"]):
        assert line in refused(tpu_train.main, argv)
    assert snapshot(workdir) == before


def test_jax_in_64_bits_is_refused(workdir, refused, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "True")
    line = refused(tpu_train.main, ["--config", "nano", "--out", "run"])
    assert line == "error: JAX_ENABLE_X64 is set, and everything here computes in at most 32 bits: unset it"
    assert not (workdir / "run").exists()
