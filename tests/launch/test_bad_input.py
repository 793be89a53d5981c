"""Invalid files, folders, devices and lengths: each is a one-line error that names the cause; nothing is written."""

import json
import shutil
from pathlib import Path

import pytest

from memsearcher_jax.launch import ask, evaluate, export_hf, tpu_train

GOOD_ROW = json.dumps({"id": "a", "question": "Who?", "golden_answers": ["Ada"]})
PASSAGE = json.dumps({"id": "a", "contents": '"Ada"\nAda was a countess.'})


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """The working directory, with all files that the cases below name."""
    monkeypatch.chdir(tmp_path)
    files = {
        "words.jsonl": "not JSON\n",
        "list.jsonl": "[1]\n",
        "unanswered.jsonl": '{"id": "a", "question": "Who?"}\n',
        "good.jsonl": GOOD_ROW + "\n",
        "twice.jsonl": f"{GOOD_ROW}\n{GOOD_ROW}\n",
        "long.jsonl": json.dumps({"id": "a", "question": "Who? " * 90, "golden_answers": ["Ada"]}) + "\n",
        "corpus.jsonl": PASSAGE + "\n",
        "tokenizer/tokenizer.json": "{}",
        "config_only/config.json": "{}",
        "words/config.json": "no JSON",
        "system_only/system.txt": "words\n",
        "taken/notes.txt": "keep\n",
        "file": "keep\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        # questions
        ("--data.train none.jsonl --retrieval.corpus corpus.jsonl", "none.jsonl: no such file"),
        ("--data.train folder --retrieval.corpus corpus.jsonl", "folder: is a folder, a .jsonl or .jsonl.gz file"),
        ("--data.train words.jsonl --retrieval.corpus corpus.jsonl", "words.jsonl:1: not JSON"),
        ("--data.train list.jsonl --retrieval.corpus corpus.jsonl", "list.jsonl:1: a JSON object is needed"),
        ("--data.train unanswered.jsonl --retrieval.corpus corpus.jsonl", 'unanswered.jsonl:1: field "golden_answers"'),
        ("--data.train twice.jsonl --retrieval.corpus corpus.jsonl", 'twice.jsonl:2: id "a" occurs twice'),
        ("--data.train long.jsonl --retrieval.corpus corpus.jsonl", 'question "a" has 270 tokens and the budget is 64'),
        ("--data.train good.jsonl --retrieval.url host:8000", "retrieval.url 'host:8000' is not a valid address"),
        (
            "--data.train good.jsonl --retrieval.corpus corpus.jsonl --retrieval.url http://127.0.0.1:9",
            "leave out retrieval.corpus and index",
        ),
        ("--retrieval.corpus corpus.jsonl", "the passages come from a file, the questions do not: set data.train"),
        (
            "--data.test good.jsonl --retrieval.corpus corpus.jsonl",
            "there are no questions to train on: set data.train",
        ),
        (
            "--data.train good.jsonl --data.test good.jsonl good.jsonl --retrieval.corpus corpus.jsonl "
            "--rl.evaluate_every 2",
            'two test questions have the id "a": evaluate the files of data.test apart',
        ),
        # passages
        ("--data.train good.jsonl --retrieval.corpus none.jsonl", "none.jsonl: no such file"),
        ("--data.train good.jsonl --retrieval.index none", "none: is not an index folder"),
        ("--data.train good.jsonl --retrieval.index folder", "folder: is not an index folder (no manifest.json)"),
        # model and tokenizer
        ("--model.path none", "none is neither a run (no run.json) nor a Hugging Face model (no config.json)"),
        ("--checkpoint none", "--checkpoint none: no such directory"),
        ("--checkpoint folder", "folder is neither a run (no run.json) nor a Hugging Face model"),
        ("--checkpoint config_only", "config_only/config.json: Unrecognized model"),
        ("--checkpoint words", "words/config.json: It looks like the config file"),
        ("--model.tokenizer none", "no tokenizer.json in none: set --model.tokenizer"),
        ("--model.tokenizer tokenizer", "tokenizer cannot be read"),
        ("--model.vocab_size 512", "has 1536 tokens and model.vocab_size is 512: set model.tokenizer"),
        # prompts and lengths
        ("--agent.prompts none", "agent.prompts: 'none' is neither a folder nor a packaged set (brief, "),
        ("--agent.prompts folder", "folder lacks system.txt"),
        ("--agent.prompts system_only", "system_only lacks turn.txt"),
        (
            "--agent.workflow react",
            "agent.prompts brief is for another workflow, and agent.workflow is react: choose brief_react",
        ),
        ("--agent.prompts brief_react", "agent.workflow is memsearcher: choose brief"),
        (
            "--agent.completion_tokens 170",
            "agent.rewrite_tokens 170), but sampling.context_tokens is 768: raise it or lower one",
        ),
        # eight devices
        ("--mesh.data 0", "mesh data=0 fsdp=-1 tensor=1: every size must be 1 or more"),
        ("--mesh.data -1", "with -1 (all remaining devices) at most once"),
        ("--mesh.tensor 3", "does not fit 8 devices: the sizes must multiply to 8"),
        ("--mesh.fsdp 4", "mesh data=1 fsdp=4 tensor=1 does not fit 8 devices"),
        ("--mesh.tensor 8", "mesh tensor=8 cannot split the 2 kv of"),
        ("--sampling.tensor 3", "sampling.tensor 3 does not divide the 8 devices of a host"),
        (
            "--sampling.slots 12",
            "sampling.slots 12 does not divide over the 8 samplers of a host: choose a multiple of 8",
        ),
        ("--sampling.slots 8000000", "lower sampling.slots or sampling.context_tokens"),
        ("--model.param_dtype bfloat16", "model.param_dtype bfloat16 loses nearly all updates to rounding: set it to"),
        # output
        ("--out taken", "--out taken is not empty: choose another --out"),
        ("--out file", "--out file is a file: choose a directory"),
        ("--out file/run", "--out file/run cannot be created (Not a directory): choose another directory"),
        ("--json folder", "--json folder is a directory: choose a file"),
        ("--json file/x.json", "--json file/x.json cannot be written"),
    ],
)
def test_invalid_training_input_is_an_error_and_writes_nothing(flags, line, workdir, refused, snapshot):
    before = snapshot(workdir)
    argv = [*([] if "--out" in flags else ["--out", "run"]), *flags.split()]
    assert line in refused(tpu_train.main, argv)
    assert snapshot(workdir) == before


def test_uncoordinated_hosts_are_an_error(workdir, refused, monkeypatch):
    """Without coordination each host would overwrite the files of the others."""
    monkeypatch.setattr("jax.process_count", lambda: 4)
    assert "the devices belong to 4 hosts" in refused(tpu_train.main, ["--out", "run"])


def test_a_failed_start_leaves_the_output_folder_unchanged(workdir, corpus, questions, refused, snapshot):
    """The data is written before the corpus turns out to be invalid; an empty folder of the user remains."""
    (workdir / "run").mkdir()
    file = questions("questions.jsonl", "Which town has nine mills?")
    flags = ["--out", "run", "--data.train", file, "--retrieval.corpus"]
    before = snapshot(workdir)
    for _ in range(2):
        assert "list.jsonl:1" in refused(tpu_train.main, [*flags, "list.jsonl"])
        assert snapshot(workdir) == before


def test_an_index_of_other_passages_is_an_error(workdir, finished, refused):
    flags = ["--data.train", "good.jsonl", "--retrieval.index", finished / "index", "--out", "run"]
    assert "was built from another corpus" in refused(tpu_train.main, [*flags, "--retrieval.corpus", "corpus.jsonl"])
    assert "was built with encoder" in refused(tpu_train.main, [*flags, "--retrieval.encoder_size", "512"])


def test_a_damaged_index_is_an_error(workdir, finished, refused, tmp_path):
    shutil.copytree(finished / "index", tmp_path / "index")
    (tmp_path / "index" / "embeddings" / "000000.npy").write_bytes(b"damaged")
    flags = ["--data.train", "good.jsonl", "--retrieval.index", "index", "--out", "run"]
    assert "index: is damaged" in refused(tpu_train.main, flags)


@pytest.mark.parametrize("kind", ["finished", "exported"])
@pytest.mark.parametrize("program", [tpu_train, evaluate, export_hf, ask], ids=lambda module: module.__name__)
def test_a_checkpoint_of_another_model_is_an_error(kind, program, workdir, request, refused, snapshot):
    folder, before = request.getfixturevalue(kind), snapshot(workdir)
    argv = ["--config", "nano", "--checkpoint", folder, "--out", "out"]
    error = refused(program.main, [*argv, *(["Who?"] if program is ask else [])])
    assert f"{folder} holds a checkpoint of another model: embed_size is 32 there, but 64 in this run" in error
    assert "choose its preset with --config" in error
    assert snapshot(workdir) == before


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_an_incomplete_hugging_face_folder_is_an_error(missing, small, exported, workdir, refused, snapshot):
    shutil.copytree(exported, workdir / "hf")
    (workdir / "hf" / missing).unlink()
    before = snapshot(workdir)
    error = refused(evaluate.main, [*small, "--checkpoint", "hf", "--out", "out"])
    assert "hf" in error
    assert missing in error
    assert snapshot(workdir) == before


def test_truncated_weights_are_an_error(small, exported, workdir, refused, snapshot):
    shutil.copytree(exported, workdir / "hf")
    content = (workdir / "hf" / "model.safetensors").read_bytes()
    (workdir / "hf" / "model.safetensors").write_bytes(content[: len(content) // 2])
    before = snapshot(workdir)
    error = refused(evaluate.main, [*small, "--checkpoint", "hf", "--out", "out"])
    assert "hf/model.safetensors is cut off or no safetensors file" in error
    assert snapshot(workdir) == before


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
        ("[]", "run.json is damaged (the config is []: it must be a section)"),
        ('{"rl": {"steps": "4"}}', "run.json is damaged (rl.steps is '4': it must be of type int)"),
        ('{"rl": {"stepz": 4}}', "run.json is damaged (there is no setting rl.stepz"),
        ('{"data": {"train": "x"}}', "run.json is damaged (data.train is 'x': it must be a list)"),
        ('{"agent": {"workflow": "chat"}}', "agent.workflow is 'chat': it must be one of memsearcher, react"),
    ],
)
def test_a_damaged_run_file_is_an_error(text, line, workdir, refused, snapshot):
    (workdir / "folder" / "run.json").write_text(text)
    before = snapshot(workdir)
    for argv in (["--resume", "--out", "folder"], ["--checkpoint", "folder"]):
        assert line in refused(tpu_train.main, argv)
    assert snapshot(workdir) == before


def test_too_long_and_empty_questions_are_errors(workdir, refused, snapshot):
    before = snapshot(workdir)
    assert 'question "asked" has 270 tokens' in refused(
        ask.main, ["--config", "nano", "--human", "Who? " * 90, "--out", "out"]
    )
    assert "the question is missing" in refused(ask.main, ["--human", "  "])
    assert snapshot(workdir) == before


def test_missing_test_questions_are_an_error(finished, workdir, refused, snapshot):
    before = snapshot(workdir)
    flags = ["--checkpoint", finished, "--out", "out"]
    assert "none.jsonl: no such file" in refused(
        evaluate.main, [*flags, "--data", "none.jsonl", "--retrieval.corpus", "corpus.jsonl"]
    )
    assert "set retrieval.corpus" in refused(evaluate.main, [*flags, "--data", "good.jsonl"])
    flags += ["--data.train", "good.jsonl", "--retrieval.corpus", "corpus.jsonl"]
    assert "there are no test questions: set data.test" in refused(evaluate.main, flags)
    assert snapshot(workdir) == before
