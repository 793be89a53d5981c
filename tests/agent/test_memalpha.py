"""The Mem-alpha workflow: recorded episodes, what each context shows, and that nothing a policy says breaks it."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent import memalpha_prompts
from memsearcher_jax.agent.memalpha import memalpha, say_once
from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.memalpha_judge import judged_content, read_verdict
from memsearcher_jax.agent.memalpha_memory import Memory, Store
from memsearcher_jax.agent.memalpha_reward import (
    MemalphaRewardConfig,
    calls_reward,
    content_reward,
    question_score,
    stream_reward,
)
from memsearcher_jax.agent.memalpha_tools import kept_reply, run_calls, tool_calls
from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.prompts import messages
from memsearcher_jax.agent.types import (
    AgentConfig,
    Finish,
    Problem,
    Prompt,
    Reply,
    Stop,
    Stream,
    StreamQuestion,
)

AGENT = AgentConfig(workflow="memalpha", prompts="memalpha", memory_tokens=3_000, reply_tokens=2_048)
CONFIG = MemalphaConfig()
PROMPTS = memalpha_prompts.load(AGENT)
MEMORY_ID = r'(?<="memory_id": ")[0-9a-f]{4}'
ORIGINAL = MemalphaRewardConfig(clip_compression=False, count_idle_deletes=True)


class RecordedRuler:
    """The counter that the records were made with."""

    def count(self, text):
        return len(re.findall(r"\w+|[^\w\s]", text))

    def clip(self, text, limit):
        ends = [match.end() for match in re.finditer(r"\w+|[^\w\s]", text)]
        return text if len(ends) <= limit else text[: ends[limit - 1] if limit else 0]


RULER = RecordedRuler()


def call(name, **arguments):
    return f"✿FUNCTION✿: {name}\n✿ARGS✿: {json.dumps(arguments, ensure_ascii=False)}\n"


def insert(content, store="semantic_memory"):
    return call("new_memory_insert", memory_type=store, content=content)


def run(chunks, replies, ruler=RULER, config=CONFIG, agent=AGENT):
    """The outcome, and every prompt."""
    heard, waiting = [], iter(replies)

    def speak(say):
        heard.append(say)
        reply = next(waiting)
        return reply if isinstance(reply, Reply) else Reply(reply)

    stream = Stream("squad", tuple(chunks), (StreamQuestion("q?", "a"),))
    workflow = memalpha(stream, agent=agent, config=config, prompts=PROMPTS, ruler=ruler)
    return play(workflow, speak, find=None), heard


def text_of(prompt: Prompt) -> str:
    return prompt.prefix + prompt.question + prompt.bridge + prompt.memory + prompt.suffix


def their_verdict(call_):
    """The recorded judge: valid unless the text says bad. A reply it cannot read, or none, is invalid to them."""
    content = judged_content(call_)
    return content is not None and not any(word in content[1].lower() for word in ("bad", "malformed", "boom"))


def recorded(shared):
    with open(shared / "reference/memalpha/episodes.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


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
            memories[number], results = run_calls(before, tool_calls(kept_reply(said[chunk])), RULER)
            count = memories[number].next_id
            for result in results:
                if result.item and result.item.id not in own[number]:
                    own[number][result.item.id] = f"{len(own[number]):04x}"
            # A call may name an id that the same reply has just made, so the reply is rewritten with what it made.
            ids = own[number]
            replies[number].append(re.sub(MEMORY_ID, lambda id, ids=ids: ids.get(id[0], "none"), said[chunk]))
    return replies


def test_recorded_episodes(shared):
    """Memories, r1 to r4 and the reward of every chunk. Their padding rows repeat rows that are compared already."""
    for case in recorded(shared):
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
            assert outcome.stop is Stop.REMEMBERED
            theirs, ours = expected["memories"][number], outcome.memory
            assert (ours.core or None) == (theirs["core"] or None), case["id"]
            for store in (Store.SEMANTIC, Store.EPISODIC):
                contents = [text for entry in theirs[store.value] for text in entry.values()]
                assert [item.content for item in ours.items(store)] == contents, case["id"]
            scores = [
                question_score(prompt["data_source"], predicted, question["answer"])
                for predicted, question in zip(rollout["preds"], prompt["qas"], strict=True)
            ]
            reward = stream_reward(
                scores,
                memory_tokens=outcome.counts["memory_tokens"],
                stream_tokens=outcome.counts["stream_tokens"],
                calls_C=[calls_reward(results, config) for results in outcome.results_C],
                content_C=None
                if asked.get("analyze") is False
                else [content_reward([their_verdict(one) for one in calls]) for calls in outcome.calls_C],
                config=config,
            )
            assert reward.answers == pytest.approx(expected["r1"][number]), case["id"]
            assert reward.compression == pytest.approx(expected["r3"][number]), case["id"]
            assert outcome.counts["memory_tokens"] == expected["memory_length"][number]
            assert outcome.counts["stream_tokens"] == expected["chunk_length"][number]
            for chunk, value in enumerate(reward.value_C):
                row = next(rows)
                assert row["trajectory"] == number
                assert reward.calls_C[chunk] == pytest.approx(row["r2"]), (case["id"], number, chunk)
                if reward.content_C is not None:
                    assert reward.content_C[chunk] == pytest.approx(row["r4"]), (case["id"], number, chunk)
                assert value == pytest.approx(row["row_reward"], abs=1e-6)


def test_a_context_shows_the_memory_and_one_chunk():
    outcome, heard = run(
        ["first piece", "second piece", "third piece"],
        [
            call("memory_update", memory_type="core_memory", new_content="Ann, a sailor")
            + insert("Paris is in France"),
            insert("1 May: Ann sailed", "episodic_memory") + insert("Paris is in France"),
            "Done",
        ],
    )
    texts = [text_of(say.text) for say in heard]
    assert len(texts) == 3 and all(isinstance(say.text, Prompt) for say in heard)
    system, user = messages(heard[2].text)
    assert "core_memory:\nAnn, a sailor\n\nsemantic_memory:\n[0000] Paris is in France\n\n" in system
    assert "episodic_memory:\n[0001] 1 May: Ann sailed" in system
    assert "<new_chunk>\nthird piece\n</new_chunk>" in user and "first piece" not in texts[2]
    assert texts[0].endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert [say.max_tokens for say in heard] == [2_048] * 3
    assert [heard[0].text.question, heard[0].text.memory] == [
        "core_memory:\nEmpty.\n\nsemantic_memory:\nEmpty.\n\nepisodic_memory:\nEmpty.",
        "first piece",
    ]
    assert heard[0].text.prefix == heard[2].text.prefix, "what stands before the memory is shared by all contexts"
    counts = outcome.counts
    assert (counts["calls"], counts["calls_ok"], counts["calls_skipped"], counts["calls_failed"]) == (4, 3, 1, 0)
    assert (counts["calls/memory_update"], counts["calls/new_memory_insert"]) == (1, 3)
    assert (counts["replies_without_calls"], counts["chunks"], counts["memory_items"]) == (1, 3, 2)
    assert outcome.turns[1].observation == "ok [0001]\nskipped"
    assert outcome.turns[2].memory == heard[2].text.question


def test_every_tool_that_can_be_called_is_explained():
    system, _ = messages(PROMPTS.chunk("", ""))
    for name in ("new_memory_insert", "memory_update", "memory_delete"):
        assert f"### {name}\n" in system
    assert "search_memory" not in system


def test_errors_are_counted_by_kind():
    said = call("fly") + call("memory_update", memory_type="semantic_memory", new_content="x", memory_id="beef")
    said += call("memory_delete", memory_type="episodic_memory", memory_id="0")
    outcome, _ = run(["piece"], [said])
    assert (outcome.counts["calls_failed"], outcome.counts["calls_idle"]) == (2, 1)
    assert outcome.counts["calls_failed/Missing required argument"] == 1
    assert outcome.counts["calls_failed/Invalid argument value"] == 1
    assert outcome.counts["calls/unknown"] == 1


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.MARKUP])
def test_a_reply_that_was_cut_off_counts_as_far_as_it_goes(finish):
    outcome, _ = run(["one", "two"], [Reply(insert("kept") + insert("cut off")[:-3], finish), "Done"])
    assert outcome.stop is Stop.REMEMBERED
    assert [item.content for item in outcome.memory.semantic] == ["kept", "cut off"]
    assert outcome.counts["replies_cut_off"] + outcome.counts["replies_forged"] == 1


def test_a_chunk_that_does_not_fit_ends_the_stream():
    outcome, heard = run(["one", "two", "three"], [insert("kept"), Reply("", Finish.NO_ROOM)])
    assert (outcome.stop, len(heard), len(outcome.turns)) == (Stop.CONTEXT_FULL, 2, 1)
    assert outcome.memory.tokens == 1


@pytest.mark.parametrize("reader", ["long_context", "rag"])
def test_readers_of_the_stream_write_no_memory(reader):
    outcome, heard = run(["one", "two"], [], config=replace(CONFIG, reader=reader))
    assert (outcome.stop, heard, outcome.counts["memory_tokens"]) == (Stop.REMEMBERED, [], 0)


@given(
    st.lists(st.text(alphabet=st.sampled_from(list("✿FUNCTIOARGS{}:\"'\n ab0")), max_size=60), min_size=1, max_size=4)
)
def test_nothing_that_a_policy_says_breaks_it(replies):
    outcome, heard = run(["chunk"] * len(replies), replies)
    assert outcome.stop is Stop.REMEMBERED
    assert len(outcome.calls_C) == len(outcome.results_C) == len(heard) == len(replies)


def test_the_same_in_words_of_another_chat_template():
    prompt = PROMPTS.judge(Store.EPISODIC, "<|im_end|> Ann sailed")
    system, user = messages(prompt)
    assert "<|" not in system and user == "Part: episodic memory\nText:\n<|im_end|> Ann sailed"
    assert prompt.memory == "<|im_end|> Ann sailed", "outside text stays in a slot of its own"
    system, user = messages(PROMPTS.grade("q?", "gold", "given"))
    assert user == "Question: q?\nCorrect answer: gold\nGiven answer: given" and system.startswith("You are shown")


@pytest.mark.parametrize("source", ["icl_nlu_8296shot_balance", "pubmed-rct", "booksum", "infbench_qa_eng", "squad"])
def test_some_sources_say_something_first(source):
    asked = PROMPTS.asked(source, "Which class?")
    assert asked.endswith("Which class?") and (asked == "Which class?") == (source == "squad")


def test_the_terse_set_is_for_it_too():
    terse = memalpha_prompts.load(replace(AGENT, prompts="terse_memalpha"))
    assert terse.asked("icl", "q") == "q"
    assert text_of(terse.chunk("m", "c")) == (
        "<|im_start|>system\nm<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_single_reply_is_the_answer():
    prompt = PROMPTS.answer("m", "q")
    assert play(say_once(prompt, 9), lambda say: Reply(f"{say.max_tokens} tokens"), None).answer == "9 tokens"
    outcome = play(say_once(prompt, 9), lambda say: Reply("", Finish.NO_ROOM), None)
    assert (outcome.stop, outcome.error) == (Stop.CONTEXT_FULL, "the prompt does not fit the context")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call("new_memory_insert", memory_type="semantic_memory", content="x"), (Store.SEMANTIC, "x")),
        (call("new_memory_insert", memory_type="core_memory", content="x"), (Store.CORE, "x")),
        (call("memory_update", memory_type="episodic", new_content=["a", "b"]), (Store.EPISODIC, "a b")),
        (call("memory_update", memory_type="semantic_memory", content="x"), None),
        (call("new_memory_insert", memory_type="semantic_memory", content=" "), None),
        (call("new_memory_insert", memory_type=3, content="x"), None),
        (call("memory_delete", memory_type="semantic_memory", content="x"), None),
        ("✿FUNCTION✿: new_memory_insert\n✿ARGS✿: []", None),
    ],
)
def test_what_a_judge_looks_at(made, expected):
    (one,) = tool_calls(made)
    assert judged_content(one) == expected


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('```json\n{"VALID": true, "ISSUES": []}\n```', True),
        ('So: ```json\n{"VALID": false}\n``` indeed', False),
        ('{"VALID": false}', False),
        ('```json\n{"VALID": "yes"}\n```', None),
        ('{"valid": true}', None),
        ("[" * 100_000, None),
        ("valid", None),
    ],
)
def test_verdicts(reply, verdict):
    assert read_verdict(reply) is verdict


def test_a_stream_comes_back_from_its_problem():
    stream = Stream("icl", ("a", "b"), (StreamQuestion("q?", ["3"], "rule"), StreamQuestion("r?", "x")))
    problem = stream.problem("7")
    assert Stream.of(replace(problem, metadata=json.loads(json.dumps(problem.metadata)))) == stream
    with pytest.raises(ValueError, match="problem 'q' is no stream of chunks"):
        Stream.of(Problem("q", "who?", ("a",)))
