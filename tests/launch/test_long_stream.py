"""benchmarks/stream.py: the stream that it makes, and a short stream read by the packaged weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import stream
from memsearcher_jax.launch import cli
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.sft import extend_vocab

BENCHMARK = Path(stream.__file__)


def test_a_long_stream_has_one_answer_to_each_question():
    config = cli.load_preset("tiny_memalpha")
    token_counter = ChatTokenizer.load(extend_vocab.FOLDER)
    long = stream.long_stream(config.data.streams, 20_000, token_counter)
    problem_stream = long.problem.stream
    lengths = [token_counter.count(chunk) for chunk in problem_stream.chunks]
    assert 20_000 <= sum(lengths) < 30_000 and len(problem_stream.chunks) % stream.STORY_CHUNKS == 0
    assert max(lengths) <= config.memalpha.chunk_tokens
    text = "\n".join(problem_stream.chunks)
    assert problem_stream.questions and len({question.text for question in problem_stream.questions}) == len(
        problem_stream.questions
    )
    for question in problem_stream.questions:
        sentence = long.sentences[question.text]
        assert question.answer in sentence and text.count(sentence) == 1


def test_shared_objects_are_counted_once():
    shared = "x" * 1_000
    seen = set()
    both = stream.held_bytes([shared, (shared,)], seen)
    assert sys.getsizeof(shared) < both < sys.getsizeof(shared) + 500
    assert stream.held_bytes(shared, seen) == 0


@pytest.mark.slow
def test_a_story_is_read_in_bounded_contexts(tmp_path):
    """Runs in a separate process with one device."""
    flags = ["--config", "tiny_memalpha", "--evaluation.temperature", "1", "--tokens", "100"]
    flags += ["--json", str(tmp_path / "numbers.json")]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, BENCHMARK, *flags], check=True, env=environment, capture_output=True, timeout=600)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["stream"].endswith("in 130 chunks")
    assert int(numbers["longest context"].removesuffix(" tokens")) <= 256
    first, last = (
        float(mean) for mean in numbers["tokens of a context, mean of the first and of the last third"].split(", ")
    )
    assert last < 1.3 * first


def test_a_preset_without_streams_is_an_error(capsys):
    with pytest.raises(SystemExit):
        stream.main(["--config", "tiny"])
    assert "--config tiny_memalpha" in capsys.readouterr().err
