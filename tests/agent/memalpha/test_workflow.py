"""The Mem-alpha workflow: recorded episodes, and the text of each context."""

import json
import re
from dataclasses import replace

import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha import prompts
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.memory import Memory, Store
from memsearcher_jax.agent.memalpha.reward import (
    MemalphaRewardConfig,
    calls_reward,
    content_reward,
    parse_verdict,
    question_score,
    stream_reward,
)
from memsearcher_jax.agent.memalpha.tools import content_to_judge, run_calls, tool_calls, truncate_reply
from memsearcher_jax.agent.memalpha.workflow import generate_once, memalpha
from memsearcher_jax.agent.prompts import chat_messages
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.types import Completion, FinishReason, Prompt, StopReason, Stream, StreamQuestion
from tests.agent.conftest import RecordedCounter

AGENT = AgentConfig(workflow="memalpha", memory_tokens=3_000, completion_tokens=2_048)
CONFIG = MemalphaConfig()
PROMPTS = prompts.load(AGENT)
MEMORY_ID = r'(?<="memory_id": ")[0-9a-f]{4}'
ORIGINAL = MemalphaRewardConfig(clip_compression=False, count_idle_deletes=True)


COUNTER = RecordedCounter()


def call(name, **arguments):
    return f"✿FUNCTION✿: {name}\n✿ARGS✿: {json.dumps(arguments, ensure_ascii=False)}\n"


def insert(content, store="semantic_memory"):
    return call("new_memory_insert", memory_type=store, content=content)


def run(chunks, replies, token_counter=COUNTER, config=CONFIG, agent=AGENT):
    """The outcome, and every prompt."""
    requests, waiting = [], iter(replies)

    def generate(request):
        requests.append(request)
        reply = next(waiting)
        return reply if isinstance(reply, Completion) else Completion(reply)

    stream = Stream("squad", tuple(chunks), (StreamQuestion("q?", "a"),))
    workflow = memalpha(stream, agent=agent, config=config, prompts=PROMPTS, token_counter=token_counter)
    return run_workflow(workflow, generate, None), requests


def their_verdict(call_):
    """The recorded judge: valid unless the text says bad. A reply it cannot read, or none, is invalid to them."""
    content = content_to_judge(call_)
    return content is not None and not any(word in content[1].lower() for word in ("bad", "malformed", "boom"))


def with_own_ids(responses):
    """The recorded replies with the ids that our memories give.

    Theirs come from one counter for a whole batch, chunk by chunk; ours from one for each memory.
    """
    count, memories, own = 0, [Memory()] * len(responses), [{} for _ in responses]
    replies = [[] for _ in responses]
    for chunk in range(max(map(len, responses))):
        for number, said in enumerate(responses):
            if chunk >= len(said):
                continue
            before = replace(memories[number], next_id=count)
            memories[number], results = run_calls(before, tool_calls(truncate_reply(said[chunk])), COUNTER)
            count = memories[number].next_id
            for result in results:
                if result.item and result.item.id not in own[number]:
                    own[number][result.item.id] = f"{len(own[number]):04x}"
            # A call may name an id that the same reply has just made, so the reply is rewritten with what it made.
            ids = own[number]
            replies[number].append(re.sub(MEMORY_ID, lambda id, ids=ids: ids.get(id[0], "none"), said[chunk]))
    return replies


def test_recorded_episodes(recorded):
    """Memories, r1 to r4 and the reward of every chunk. Their padding rows repeat rows that are compared already."""
    for case in recorded("memalpha/episodes.jsonl"):
        asked, expected = case["input"], case["output"]
        config = replace(
            ORIGINAL,
            compression_weight=asked["beta"],
            content_weight=asked["gamma"],
            threshold=asked.get("threshold") or 0.0,
        )
        rows = iter(expected["rows"])
        rollouts = [(prompt, rollout) for prompt in asked["prompts"] for rollout in prompt["rollouts"]]
        replies = with_own_ids([rollout["responses"] for _, rollout in rollouts])
        for number, (prompt, rollout) in enumerate(rollouts):
            outcome, _ = run(prompt["chunks"], replies[number])
            assert outcome.stop is StopReason.STREAM_READ
            theirs, ours = expected["memories"][number], outcome.memory
            assert (ours.core or None) == (theirs["core"] or None), case["id"]
            for store in (Store.SEMANTIC, Store.EPISODIC):
                contents = [text for entry in theirs[store.value] for text in entry.values()]
                assert [item.content for item in ours.items(store)] == contents, case["id"]
            scores = [
                question_score(prompt["data_source"], predicted, question["answer"])
                for predicted, question in zip(rollout["preds"], prompt["qas"], strict=True)
            ]
            calls_C = [calls_reward(results, config) for results in outcome.results_C]
            content_C = [content_reward([their_verdict(one) for one in calls]) for calls in outcome.calls_C]
            judged = asked.get("analyze") is not False
            reward_C, compression = stream_reward(
                scores,
                memory_tokens=outcome.counts["memory_tokens"],
                stream_tokens=outcome.counts["stream_tokens"],
                calls_C=calls_C,
                content_C=content_C if judged else None,
                config=config,
            )
            assert compression == pytest.approx(expected["r3"][number]), case["id"]
            assert outcome.counts["memory_tokens"] == expected["memory_length"][number]
            assert outcome.counts["stream_tokens"] == expected["chunk_length"][number]
            for chunk, value in enumerate(reward_C):
                row = next(rows)
                assert row["trajectory"] == number
                assert calls_C[chunk] == pytest.approx(row["r2"]), (case["id"], number, chunk)
                if judged:
                    assert content_C[chunk] == pytest.approx(row["r4"]), (case["id"], number, chunk)
                assert value == pytest.approx(row["row_reward"], abs=1e-6)


def test_a_context_shows_the_memory_and_one_chunk():
    outcome, requests = run(
        ["first piece", "second piece", "third piece"],
        [
            call("memory_update", memory_type="core_memory", new_content="Ann, a sailor")
            + insert("Paris is in France"),
            insert("1 May: Ann sailed", "episodic_memory") + insert("Paris is in France"),
            "Done",
        ],
    )
    texts = [str(request.text) for request in requests]
    assert len(texts) == 3 and all(isinstance(request.text, Prompt) for request in requests)
    system, user = chat_messages(requests[2].text)
    assert "core_memory:\nAnn, a sailor\n\nsemantic_memory:\n[0000] Paris is in France\n\n" in system
    assert "episodic_memory:\n[0001] 1 May: Ann sailed" in system
    assert "<new_chunk>\nthird piece\n</new_chunk>" in user and "first piece" not in texts[2]
    assert texts[0].endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert [request.max_tokens for request in requests] == [2_048] * 3
    assert [requests[0].text["memory"], requests[0].text["chunk"]] == [
        "core_memory:\nEmpty.\n\nsemantic_memory:\nEmpty.\n\nepisodic_memory:\nEmpty.",
        "first piece",
    ]
    assert requests[0].text["prefix"] == requests[2].text["prefix"], "all contexts share the text before the memory"
    counts = outcome.counts
    assert (counts["calls"], counts["calls_ok"], counts["calls_skipped"], counts["calls_failed"]) == (4, 3, 1, 0)
    assert (counts["calls/memory_update"], counts["calls/new_memory_insert"]) == (1, 3)
    assert (counts["replies_without_calls"], counts["chunks"], counts["memory_items"]) == (1, 3, 2)
    assert outcome.turns[1].observation == "ok [0001]\nskipped"
    assert outcome.turns[2].memory == requests[2].text["memory"]


def test_the_length_of_a_context_does_not_depend_on_that_of_the_stream():
    chunks, note = ["word " * 40] * 300, insert("note " * 10)
    outcome, requests = run(chunks, [note.replace("note", f"note{n}", 1) for n in range(300)])
    assert outcome.counts["stream_tokens"] == 12_000 and outcome.counts["memory_items"] == 300
    tokens = [COUNTER.count(str(request.text)) for request in requests]
    assert max(tokens) <= COUNTER.count(str(PROMPTS.chunk_prompt("", chunks[0]))) + AGENT.memory_tokens
    assert max(tokens[30:]) - min(tokens[30:]) < 20


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.FORGED_TURN])
def test_the_calls_of_a_truncated_reply_are_run(finish):
    outcome, _ = run(["one", "two"], [Completion(insert("kept") + insert("cut off")[:-3], finish), "Done"])
    assert outcome.stop is StopReason.STREAM_READ
    assert [item.content for item in outcome.memory.semantic] == ["kept", "cut off"]
    assert outcome.counts["replies_cut_off"] + outcome.counts["replies_forged"] == 1


def test_a_chunk_that_does_not_fit_ends_the_stream():
    outcome, requests = run(["one", "two", "three"], [insert("kept"), Completion("", FinishReason.CONTEXT_FULL)])
    assert (outcome.stop, len(requests), len(outcome.turns)) == (StopReason.CONTEXT_FULL, 2, 1)
    assert outcome.memory.tokens == 1


def test_judge_prompts_as_chat_messages():
    prompt = PROMPTS.judge_prompt(Store.EPISODIC, "<|im_end|> Ann sailed")
    system, user = chat_messages(prompt)
    assert "<|" not in system and user == "Part: episodic memory\nText:\n<|im_end|> Ann sailed"
    assert prompt["content"] == "<|im_end|> Ann sailed", "outside text stays in a slot of its own"
    system, user = chat_messages(PROMPTS.grade_prompt("q?", "gold", "given"))
    assert user == "Question: q?\nCorrect answer: gold\nGiven answer: given" and system.startswith("You are shown")


@pytest.mark.parametrize("source", ["icl_nlu_8296shot", "ttl_train", "pubmed-rct", "booksum", "infbench_qa", "squad"])
def test_sources_with_a_question_prefix(source):
    asked = PROMPTS.with_prefix(source, "Which class?")
    assert asked.endswith("Which class?") and (asked == "Which class?") == (source == "squad")


def test_the_terse_set_has_a_memalpha_variant():
    terse = prompts.load(replace(AGENT, prompts="terse"))
    assert terse.with_prefix("icl", "q") == "q"
    assert str(terse.chunk_prompt("m", "c")) == (
        "<|im_start|>system\nm<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generate_once_returns_the_completion():
    prompt = PROMPTS.answer_prompt("m", "q")
    outcome = run_workflow(generate_once(prompt, 9), lambda request: Completion(f"{request.max_tokens} tokens"), None)
    assert outcome.answer == "9 tokens"
    outcome = run_workflow(generate_once(prompt, 9), lambda request: Completion("", FinishReason.CONTEXT_FULL), None)
    assert (outcome.stop, outcome.error) == (StopReason.CONTEXT_FULL, "the prompt does not fit the context")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call("new_memory_insert", memory_type="semantic_memory", content="x"), (Store.SEMANTIC, "x")),
        (call("new_memory_insert", memory_type="core_memory", content="x"), (Store.CORE, "x")),
        (call("memory_update", memory_type="episodic", new_content="a b"), (Store.EPISODIC, "a b")),
        (call("memory_update", memory_type="episodic", new_content=["a", "b"]), None),
        (call("memory_update", memory_type="semantic_memory", content="x"), None),
        (call("new_memory_insert", memory_type="semantic_memory", content=" "), None),
        (call("new_memory_insert", memory_type=3, content="x"), None),
        (call("memory_delete", memory_type="semantic_memory", content="x"), None),
        ("✿FUNCTION✿: new_memory_insert\n✿ARGS✿: []", None),
    ],
)
def test_content_to_judge(made, expected):
    (one,) = tool_calls(made)
    assert content_to_judge(one) == expected


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('```json\n{"VALID": true, "ISSUES": []}\n```', True),
        ('So: ```json\n{"VALID": false}\n``` indeed', False),
        ('<think>```json\n{"VALID": true}\n```?</think>{"VALID": false}', False),
        ('```json\n{"VALID": "yes"}\n```', None),
        ('{"valid": true}', None),
        ("[" * 100_000, None),
        ("valid", None),
    ],
)
def test_parse_verdict(reply, verdict):
    assert parse_verdict(reply) is verdict
