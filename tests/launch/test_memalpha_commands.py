"""Commands with Mem-alpha: a short training run, evaluations with each reader, and early errors."""

import json

import pytest

from memsearcher_jax.launch import ask, evaluate, tpu_train
from memsearcher_jax.rl.setup import PACKAGED_TOKENIZER
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.tokenizer import ChatTokenizer

SETTINGS = """
    --config tiny_memalpha --agent.completion_tokens 16 --memalpha.answer_tokens 6
    --data.streams.train_streams 4 --data.streams.train_chunks 2 --data.streams.test_streams 4
    --data.streams.test_chunks 2 5 --data.streams.questions 3 --sampling.slots 8 --training.minibatch_rows 8
    --rl.steps 2 --rl.prompts_per_step 2 --rl.group_size 2 --rl.checkpoint_every 1 --rl.evaluate_every 2
    --evaluation.max_questions 2
"""
SMALL = SETTINGS.split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memalpha") / "run"
    tpu_train.main([*SMALL, "--out", str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["memory", "long_context", "rag"])
def test_an_evaluation_reports_each_source_and_stream_length(trained, tmp_path, capsys, reader):
    folder = tmp_path / "evaluation"
    evaluate.main(["--checkpoint", str(trained), "--out", str(folder), "--memalpha.answer_from", reader])
    result = json.loads((folder / "results.json").read_text())
    assert list(result["evaluation"]["by_length"]) == ["generated, 2 chunks", "generated, 5 chunks"]
    summary = result["evaluation"]["benchmarks"]["generated"]
    assert summary["questions"] == 2
    kinds = {name.rpartition("/")[2] for name in summary if name.startswith("accuracy/generated/")}
    assert kinds <= {"person", "event", "fact", "rule"} and 0 <= summary["accuracy"] <= 1
    limits = {"long_context": min(summary["stream_tokens"], 128), "rag": summary["stream_tokens"]}
    assert reader == "memory" or 0 < summary["memory_tokens"] <= limits[reader]
    assert "generated, 5 chunks" in capsys.readouterr().out


def test_a_document_that_cannot_be_read_is_refused_with_the_way_out_or_left_out(tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes("Zoë".encode("latin-1"))
    (tmp_path / "notes.txt").write_text("Ada works for Mill.")
    (tmp_path / "table.csv").write_text("a,b")
    tokenizer = ChatTokenizer.load(PACKAGED_TOKENIZER)
    with pytest.raises(ValueError, match=r"latin.txt.*UTF-8.*leave it out with --data.malformed skip"):
        ask.document_chunks(tmp_path, 40, tokenizer, "error")
    (chunk,) = ask.document_chunks(tmp_path, 40, tokenizer, "skip")
    assert chunk.endswith("Ada works for Mill.")
    assert "skipped" in (printed := capsys.readouterr().err) and "latin.txt" in printed
    assert "left out, .csv: 1 (table.csv)" in printed


def test_an_answerer_without_its_key_is_refused_before_documents_are_read(tmp_path, refused):
    (tmp_path / "notes.txt").write_text("Ada works for Mill.")
    flags = ["--config", "tiny_memalpha", "--checkpoint", str(located("package:tiny_memalpha"))]
    flags += ["--answerer.backend", "openai", "--answerer.url", "http://127.0.0.1:9/v1", "--answerer.model", "m"]
    line = refused(ask.main, [*flags, "--answerer.api_key_env", "NO_KEY", "--files", str(tmp_path), "Who?"])
    assert "answerer.api_key_env: the environment holds no variable of that name" in line
