"""Files, folders, devices and lengths that cannot serve: one line that names the thing, and nothing written."""

import gzip
import json
import shutil
from pathlib import Path

import ask
import evaluate
import export_hf
import pytest
import tpu_train

GOOD_ROW = json.dumps({"id": "a", "question": "Who?", "golden_answers": ["Ada"]})
PASSAGE = json.dumps({"id": "a", "contents": '"Ada"\nAda was a countess.'})


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder to stand in, with everything in it that the cases below name."""
    monkeypatch.chdir(tmp_path)
    files = {
        "empty.jsonl": "",
        "words.jsonl": "not JSON\n",
        "words.parquet": "no parquet\n",
        "list.jsonl": "[1]\n",
        "unanswered.jsonl": '{"id": "a", "question": "Who?"}\n',
        "good.jsonl": GOOD_ROW + "\n",
        "twice.jsonl": f"{GOOD_ROW}\n{GOOD_ROW}\n",
        "long.jsonl": json.dumps({"id": "a", "question": "Who? " * 90, "golden_answers": ["Ada"]}) + "\n",
        "corpus.jsonl": PASSAGE + "\n",
        "untitled.jsonl": '{"id": "a"}\n',
        "damaged.jsonl.gz": "",
        "tokenizer/tokenizer.json": "{}",
        "config_only/config.json": "{}",
        "words/config.json": "no JSON",
        "gpt/config.json": '{"model_type": "gpt2"}',
        "system_only/system.txt": "words\n",
        "taken/notes.txt": "keep\n",
        "file": "keep\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "damaged.jsonl.gz").write_bytes(gzip.compress(PASSAGE.encode())[:-9])
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        # questions
        ("--data.train none.jsonl --retrieval.corpus corpus.jsonl", "none.jsonl: no such file"),
        ("--data.train folder --retrieval.corpus corpus.jsonl", "folder: is a folder, a .jsonl or .jsonl.gz file"),
        ("--data.train empty.jsonl --retrieval.corpus corpus.jsonl", "empty.jsonl: holds no questions"),
        ("--data.train words.jsonl --retrieval.corpus corpus.jsonl", "words.jsonl:1: not JSON"),
        ("--data.train list.jsonl --retrieval.corpus corpus.jsonl", "list.jsonl:1: a JSON object is needed"),
        ("--data.train unanswered.jsonl --retrieval.corpus corpus.jsonl", 'unanswered.jsonl:1: field "golden_answers"'),
        ("--data.train twice.jsonl --retrieval.corpus corpus.jsonl", 'twice.jsonl:2: id "a" occurs twice'),
        ("--data.train long.jsonl --retrieval.corpus corpus.jsonl", 'question "a" has 270 tokens and the budget is 64'),
        ("--data.train good.jsonl", "the questions come from a file, the passages do not: set retrieval.corpus"),
        ("--data.train good.jsonl --retrieval.url host:8000", "retrieval.url 'host:8000' is no address"),
        ("--data.train good.jsonl --retrieval.url http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
        (
            "--data.train good.jsonl --retrieval.corpus corpus.jsonl --retrieval.url http://127.0.0.1:9",
            "leave out retrieval.corpus and index",
        ),
        (
            "--data.train nq --retrieval.corpus corpus.jsonl",
            "data.train nq: set data.root to the folder that holds nq/",
        ),
        ("--data.train popqa --retrieval.corpus corpus.jsonl", "popqa has no questions for train, only for test"),
        ("--data.train words.parquet --retrieval.corpus corpus.jsonl", "words.parquet: is no parquet file"),
        ("--retrieval.corpus corpus.jsonl", "the passages come from a file, the questions do not: set data.train"),
        (
            "--data.test good.jsonl --retrieval.corpus corpus.jsonl",
            "there are no questions to train on: set data.train",
        ),
        (
            "--data.train good.jsonl --retrieval.corpus corpus.jsonl --rl.evaluate_every 2",
            "rl.evaluate_every needs test questions: set data.test",
        ),
        ("--data.world.train_people 3", "data.world.train_people is 3: a society needs at least 16"),
        # passages
        ("--data.train good.jsonl --retrieval.corpus none.jsonl", "none.jsonl: no such file"),
        ("--data.train good.jsonl --retrieval.corpus folder", "folder: is a folder"),
        ("--data.train good.jsonl --retrieval.corpus empty.jsonl", "empty.jsonl: holds no passages"),
        ("--data.train good.jsonl --retrieval.corpus untitled.jsonl", 'untitled.jsonl:1: no field "contents"'),
        ("--data.train good.jsonl --retrieval.corpus damaged.jsonl.gz", "damaged.jsonl.gz: compressed data is damaged"),
        ("--data.train good.jsonl --retrieval.index none", "none: is not an index folder"),
        ("--data.train good.jsonl --retrieval.index file", "file: is not an index folder"),
        ("--data.train good.jsonl --retrieval.index folder", "folder: is not an index folder (no manifest.json)"),
        # model and tokenizer
        ("--model.path none", "none is neither a run's folder (no run.json) nor a Hugging Face model (no config.json)"),
        ("--checkpoint none", "--checkpoint none: no such folder"),
        ("--checkpoint file", "--checkpoint file: no such folder"),
        ("--checkpoint folder", "folder is neither a run's folder (no run.json) nor a Hugging Face model"),
        ("--checkpoint config_only", "config.json: model_type is None, expected 'qwen2' or 'qwen3'"),
        ("--checkpoint words", "words/config.json is not valid JSON"),
        ("--checkpoint gpt", "gpt/config.json: model_type is 'gpt2', expected 'qwen2' or 'qwen3'"),
        ("--model.tokenizer none", "no tokenizer.json in none: set --model.tokenizer"),
        ("--model.tokenizer tokenizer", "tokenizer/tokenizer.json is not a tokenizer"),
        ("--model.vocab_size 512", "has 1536 tokens and model.vocab_size is 512: set model.tokenizer"),
        # prompts and lengths
        ("--agent.prompts none", "agent.prompts: 'none' is no folder and no packaged set (brief, "),
        ("--agent.prompts folder", "the prompt set folder lacks system.txt"),
        ("--agent.prompts system_only", "the prompt set system_only lacks turn.txt"),
        (
            "--agent.workflow react",
            "agent.prompts brief is for another workflow, and agent.workflow is react: choose brief_react",
        ),
        ("--agent.prompts brief_react", "agent.workflow is memsearcher: choose brief"),
        ("--agent.reply_tokens 170", "two replies of 170), but sampling.context_tokens is 768: raise it or lower one"),
        # devices: eight of them
        ("--mesh.data 0", "mesh data=0 fsdp=-1 tensor=1: every size must be 1 or more"),
        ("--mesh.data -1", "with -1 (what the others leave) at most once"),
        ("--mesh.tensor 3", "does not fit 8 devices: the sizes must multiply to 8"),
        ("--mesh.fsdp 4", "mesh data=1 fsdp=4 tensor=1 does not fit 8 devices"),
        ("--mesh.tensor 8", "mesh tensor=8 cannot split the 2 kv of"),
        ("--model.embed_size 36", "mesh fsdp=8 cannot split the 36 embed of"),
        ("--sampling.tensor 3", "sampling.tensor 3 does not divide the 8 devices of a host"),
        ("--sampling.tensor 4", "mesh tensor=4 cannot split the 2 kv"),
        (
            "--sampling.slots 12",
            "sampling.slots 12 does not divide over the 8 samplers of a host: choose a multiple of 8",
        ),
        ("--sampling.slots 8000000", "lower sampling.slots or sampling.context_tokens"),
        ("--training.rows_per_update 12", "training.rows_per_update 12 does not divide over 8 devices"),
        # where to write
        ("--out taken", "--out taken is not empty: choose another --out"),
        ("--out file", "--out file is a file: name a folder"),
        ("--out file/run", "--out file/run cannot be made (Not a directory): choose another folder"),
        ("--json folder", "--json folder is a folder: name a file"),
        ("--json file/x.json", "--json file/x.json cannot be written"),
    ],
)
def test_training_is_refused_and_leaves_no_trace(flags, line, place, refused, untouched):
    before = untouched(place)
    argv = [*([] if "--out" in flags else ["--out", "run"]), *flags.split()]
    assert line in refused(tpu_train.main, argv)
    assert untouched(place) == before


def test_several_hosts_are_refused(place, refused, monkeypatch):
    """Nothing coordinates them yet, and each would write over the others."""
    monkeypatch.setattr("jax.process_count", lambda: 4)
    assert "the devices belong to 4 hosts" in refused(tpu_train.main, ["--out", "run"])


def test_a_failed_start_does_not_block_the_next(place, corpus, questions, refused, untouched):
    """The data is in place when the index turns out to be impossible; an empty folder of the user's stays."""
    (place / "run").mkdir()
    file = questions("questions.jsonl", "Which town has nine mills?")
    flags = ["--out", "run", "--data.train", file, "--retrieval.corpus"]
    before = untouched(place)
    for _ in range(2):
        assert "list.jsonl:1" in refused(tpu_train.main, [*flags, "list.jsonl"])
        assert untouched(place) == before


def test_an_index_of_other_passages(place, finished, refused):
    flags = ["--data.train", "good.jsonl", "--retrieval.index", finished / "index", "--out", "run"]
    assert "was built from another corpus" in refused(tpu_train.main, [*flags, "--retrieval.corpus", "corpus.jsonl"])
    assert "was built with encoder" in refused(tpu_train.main, [*flags, "--retrieval.encoder_size", "512"])


def test_a_damaged_index(place, finished, refused, tmp_path):
    shutil.copytree(finished / "index", tmp_path / "index")
    (tmp_path / "index" / "embeddings" / "000000.npy").write_bytes(b"spoilt")
    flags = ["--data.train", "good.jsonl", "--retrieval.index", "index", "--out", "run"]
    assert "index: is damaged" in refused(tpu_train.main, flags)


@pytest.mark.parametrize("kind", ["finished", "exported"])
@pytest.mark.parametrize("program", [tpu_train, evaluate, export_hf, ask], ids=lambda module: module.__name__)
def test_a_checkpoint_of_another_model(kind, program, place, request, refused, untouched):
    folder, before = request.getfixturevalue(kind), untouched(place)
    argv = ["--config", "nano", "--checkpoint", folder, "--out", "out"]
    said = refused(program.main, [*argv, *(["Who?"] if program is ask else [])])
    assert f"{folder} holds a checkpoint of another model: embed_size is 32 there, but 64 in this run" in said
    assert "choose its preset with --config" in said
    assert untouched(place) == before


@pytest.mark.parametrize("cut", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_hugging_face_folder_with_a_part_missing(cut, small, exported, place, refused, untouched):
    shutil.copytree(exported, place / "hf")
    (place / "hf" / cut).unlink()
    before = untouched(place)
    said = refused(evaluate.main, [*small, "--checkpoint", "hf", "--out", "out"])
    assert "hf" in said
    assert cut in said
    assert untouched(place) == before


def test_weights_that_are_cut_off(small, exported, place, refused, untouched):
    shutil.copytree(exported, place / "hf")
    whole = (place / "hf" / "model.safetensors").read_bytes()
    (place / "hf" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    before = untouched(place)
    said = refused(evaluate.main, [*small, "--checkpoint", "hf", "--out", "out"])
    assert "hf/model.safetensors is cut off or no safetensors file" in said
    assert untouched(place) == before


def test_a_run_without_a_checkpoint(finished, place, refused):
    shutil.copytree(finished, place / "young")
    shutil.rmtree(place / "young" / "checkpoints")
    for program in (evaluate, export_hf, tpu_train):
        said = refused(program.main, ["--checkpoint", "young", "--out", "out"])
        assert "young holds no checkpoint yet: go on with that run, or name other weights" in said


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
def test_a_damaged_run_file(text, line, place, refused, untouched):
    (place / "folder" / "run.json").write_text(text)
    before = untouched(place)
    for argv in (["--resume", "--out", "folder"], ["--checkpoint", "folder"]):
        assert line in refused(tpu_train.main, argv)
    assert untouched(place) == before


def test_questions_that_cannot_be_asked(place, refused, untouched):
    before = untouched(place)
    assert 'question "asked" has 270 tokens' in refused(
        ask.main, ["--config", "nano", "--human", "Who? " * 90, "--out", "out"]
    )
    assert "there is no question" in refused(ask.main, ["--human", "  "])
    assert untouched(place) == before


def test_evaluating_questions_that_are_not_there(finished, place, refused, untouched):
    before = untouched(place)
    flags = ["--checkpoint", finished, "--out", "out"]
    assert "none.jsonl: no such file" in refused(
        evaluate.main, [*flags, "--data", "none.jsonl", "--retrieval.corpus", "corpus.jsonl"]
    )
    assert "set retrieval.corpus" in refused(evaluate.main, [*flags, "--data", "good.jsonl"])
    flags += ["--data.train", "good.jsonl", "--retrieval.corpus", "corpus.jsonl"]
    assert "there are no test questions: set data.test" in refused(evaluate.main, flags)
    assert untouched(place) == before
