"""A preset of a published model does not start on toy data: the first message names everything that is missing."""

import pytest

from memsearcher_jax.launch import ask, build_index, cli, evaluate, preconditions, serve_search, tpu_train
from memsearcher_jax.launch.pod import jobset

PUBLISHED = [name for name in cli.presets() if "qwen" in name or name in ("memalpha_4b", "search_r1_3b")]
WEIGHTS, QUESTIONS, PASSAGES, ENCODER, ACCELERATOR = (
    *("--model.path DIR (its weights)", "--data.train FILE (questions)"),
    "--retrieval.index DIR or --retrieval.corpus FILE (passages)",
    *("--retrieval.encoder DIR (of E5, or hashing)", "an accelerator (a TPU or a GPU)"),
)
GIVEN = ["--model.path", "w", "--data.train", "q.jsonl", "--retrieval.index", "i", "--retrieval.encoder", "e5"]


@pytest.fixture(autouse=True)
def in_a_new_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_start_without_inputs_names_all_of_them(name, refused):
    assert cli.load_preset(name).retrieval.encoder == ""
    line = refused(tpu_train.main, ["--config", name])
    searched = [] if name.startswith("memalpha") else [PASSAGES, ENCODER]
    needed = ", ".join([WEIGHTS, QUESTIONS, *searched, ACCELERATOR])
    assert f"needs {needed}; --smoke_test starts with random weights" in line


def test_only_missing_inputs_are_named(refused, monkeypatch):
    assert f"model needs {ACCELERATOR}; " in refused(tpu_train.main, ["--config", "qwen7b", *GIVEN])
    assert f"model needs {ENCODER}, {ACCELERATOR}; " in refused(tpu_train.main, ["--config", "qwen7b", *GIVEN[:-2]])
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert f"model needs {QUESTIONS}; " in refused(tpu_train.main, ["--config", "qwen7b", *GIVEN[:2], *GIVEN[4:]])


def test_a_smoke_test_needs_nothing():
    run = cli.parse(tpu_train.Train, ["--config", "qwen7b", "--smoke_test"]).run
    preconditions.require_inputs(run, questions="data.train", accelerator=True)
    assert run.retrieval.encoder == "hashing"
    assert cli.parse(tpu_train.Train, ["--config", "qwen7b", "--smoke_test", *GIVEN]).run.retrieval.encoder == "e5"


def test_the_launcher_refuses_a_job_that_a_pod_would_refuse(refused):
    flags = "--topology v6e:4x8 --name a --image i --config qwen7b --out gs://b/a --dry_run"
    argv = [*flags.split(), "--"]
    assert f"needs {WEIGHTS}, {QUESTIONS}, {PASSAGES}, {ENCODER}; " in refused(jobset.main, argv)
    assert f"needs {ENCODER}; " in refused(jobset.main, [*argv, *GIVEN[:-2]])


def test_other_commands_name_what_they_need(refused, tmp_path_factory):
    weights = str(tmp_path_factory.mktemp("weights"))
    for program, flags, line in (
        (evaluate, ["--checkpoint", weights], f"needs --data.test FILE (questions), {PASSAGES}, {ENCODER}; "),
        (ask, ["--checkpoint", weights, "Who?"], f"needs {PASSAGES}, {ENCODER}; "),
        (serve_search, [], "--retrieval.index or --retrieval.corpus is missing"),
        (build_index, ["--retrieval.corpus", "c.jsonl", "--out", "i"], "retrieval.encoder is missing: give"),
    ):
        assert line in refused(program.main, ["--config", "qwen7b", *flags])
