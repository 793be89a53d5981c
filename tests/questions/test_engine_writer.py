"""A checkpoint that writes questions on the engine."""

import json

import pytest

from memsearcher_jax.launch import make_questions
from memsearcher_jax.questions.config import WriterConfig
from memsearcher_jax.questions.engine_writer import open_engine_writers
from memsearcher_jax.questions.evidence import Evidence
from memsearcher_jax.questions.writer import write_prompt
from memsearcher_jax.types import Passage

CONFIG = WriterConfig(checkpoint="package:tiny", max_concurrency=2, context_tokens=1_024)


def prompt(name, text="It was built by Ada."):
    return write_prompt(Evidence((Passage(name, f'"{name}"\n{text}'),), "train"))


@pytest.mark.variant
def test_a_checkpoint_writes_greedily_and_answers_by_draws():
    writer, examinee = open_engine_writers(CONFIG, max_tokens=6, seed=0)
    prompts = [prompt("Kestrel"), prompt("Falcon"), prompt("Merlin")]
    written = writer.ask(prompts)
    assert all(completion.text and not completion.error for completion in written)
    assert writer.ask(prompts[1:2], draw=1) == written[1:2]
    first = examinee.ask(prompts, draw=0)
    assert 3 <= examinee.tokens["completion_tokens"] <= 3 * 7 and examinee.tokens["prompt_tokens"] > 3 * 100
    assert examinee.ask(prompts, draw=0) == first != examinee.ask(prompts, draw=1)
    (too_long,) = writer.ask([prompt("Kestrel", "oak and fir " * 500)])
    assert too_long.error == "the prompt does not fit the context: raise --writer.context_tokens"


@pytest.mark.slow
def test_the_command_writes_with_a_checkpoint(tmp_path, monkeypatch):
    """`package:tiny` writes no JSON: its replies are counted and kept."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    passages = tmp_path / "passages.jsonl"
    rows = [{"id": str(number), "contents": f'"Ship{number}"\n{"It was built of oak. " * 4}'} for number in range(4)]
    passages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--passages", str(passages), "--out", str(tmp_path / "made"), "--max_candidates", "3", "--hops", "1"]
    argv += ["--writer.checkpoint", "package:tiny", "--writer.context_tokens", "1024", "--max_tokens", "6"]
    make_questions.main([*argv, "--json", str(tmp_path / "j.json")])
    result = json.loads((tmp_path / "j.json").read_text())
    assert result["struck"] == {"unreadable": 3} and result["tokens"]["completion_tokens"] > 0
    log = [json.loads(line) for line in (tmp_path / "made" / "candidates.jsonl").read_text().splitlines()]
    assert all(line["detail"] for line in log)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [("nowhere", "nowhere: neither a run nor a Hugging Face directory"), ("package:tiny", "1024 positions")],
)
def test_a_checkpoint_that_cannot_write_is_an_error(checkpoint, message):
    with pytest.raises((ValueError, OSError), match=message):
        open_engine_writers(WriterConfig(checkpoint=checkpoint), max_tokens=6, seed=0)
