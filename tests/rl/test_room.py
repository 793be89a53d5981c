"""Generate.room: a context is full where fewer tokens than that would be left after the text."""

import jax
import pytest

from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.types import FinishReason, Generate, Outcome, Problem, StopReason, TextSpan
from tests.support import byte_tokenizer, make_prompt

TOKENIZER = byte_tokenizer()
TEXT = (TextSpan(" more", True),)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_text_fits_where_its_room_is_left(engine, params, missing):
    """A text without its room is refused, changes nothing, and fits with less; so does a prompt."""
    capacity = engine.scheduler.settings.context_tokens
    prompt = make_prompt("<|im_start|>", "q", " ", "", "<|im_end|>")
    text_tokens = len(TOKENIZER.span_ids(TEXT))
    finishes = []

    def workflow(problem):
        prompt_tokens = len(TOKENIZER.span_ids(prompt.segments))
        reply = yield Generate(prompt, 4, room=capacity - prompt_tokens + missing)
        finishes.append(reply.finish)
        if missing:
            reply = yield Generate(prompt, 4)
            assert reply.finish is not FinishReason.CONTEXT_FULL
        used = prompt_tokens + 4
        reply = yield Generate(TEXT, 3, room=capacity - used - text_tokens + missing)
        finishes.append(reply.finish)
        if missing:
            reply = yield Generate(TEXT, 3, room=capacity - used - text_tokens)
        assert reply.finish is not FinishReason.CONTEXT_FULL
        return Outcome(StopReason.ANSWERED)

    driver = RolloutDriver(engine, TOKENIZER, workflow)
    seeds = make_jobs([Problem("q", "?", ())], 1)
    (trajectory,), _ = driver.trajectories(seeds, params, jax.random.key(1), lambda line: None)
    assert trajectory.outcome.stop is StopReason.ANSWERED, trajectory.outcome.error
    (context,) = trajectory.contexts
    assert sum(context.sampled) == 7, "no generation ended early, as the test assumes"
    assert [finish is FinishReason.CONTEXT_FULL for finish in finishes] == [bool(missing)] * 2
