"""benchmarks/stream.py: the stream that it makes, and a short stream read by the packaged weights."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import stream
from memsearcher_jax.launch import cli
from memsearcher_jax.rl import setup


def test_a_long_stream_has_one_answer_to_each_question():
    config = cli.load_preset("tiny_memalpha")
    token_counter = setup.open_tokenizer(config.model)
    long = stream.long_stream(config.data.streams, 20_000, token_counter).stream
    lengths = [token_counter.count(chunk) for chunk in long.chunks]
    assert 20_000 <= sum(lengths) < 30_000 and len(long.chunks) % stream.STORY_CHUNKS == 0
    assert max(lengths) <= config.memalpha.chunk_tokens
    asked = [question.text for question in long.questions]
    assert asked and len(set(asked)) == len(asked)
    assert all(question.answer in "\n".join(long.chunks) for question in long.questions)


@pytest.mark.slow
def test_a_story_is_read_in_bounded_contexts(tmp_path):
    """Runs in a separate process with one device."""
    flags = ["--config", "tiny_memalpha", "--evaluation.temperature", "1", "--tokens", "100"]
    flags += ["--json", str(tmp_path / "numbers.json")]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, stream.__file__, *flags]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["stream"].endswith("in 130 chunks")
    assert int(numbers["longest context"].removesuffix(" tokens")) <= 256
    first, _, last = map(float, numbers["tokens of a context, mean by thirds"].split(", "))
    assert last < 1.3 * first


def test_a_preset_without_streams_is_an_error(refused):
    assert "--config tiny_memalpha" in refused(stream.main, ["--config", "tiny"])
