"""Our workflow on the scripts that were played to the original, in its wording.

The contexts are the same, token for token of loss, and so are the searches and rewards; where ours differs on purpose,
the tests say what it does instead.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from memsearcher_jax import tokenizer
from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.reward import Reward, memsearcher_reward, trajectory_reward
from memsearcher_jax.types import Passage, Query, SearchResult, StopReason, TokenCounter

TRAINING_STOPS = {
    "one_turn": StopReason.ANSWERED,
    "one_turn_partial": StopReason.ANSWERED,
    "one_turn_wrong": StopReason.ANSWERED,
    "one_turn_no_box": StopReason.NO_ANSWER,
    "two_turns": StopReason.ANSWERED,
    "three_turns": StopReason.ANSWERED,
    "two_tool_calls": StopReason.ANSWERED,
    "bad_tool_json": StopReason.ANSWERED,
    "unpaired_tool_tags": StopReason.NO_ANSWER,
    "max_turns_reached": StopReason.MAX_TURNS,
    "empty_memory": StopReason.BAD_MEMORY,
    "length_first": StopReason.CUT_OFF,
    "length_first_with_call": StopReason.CUT_OFF,
    "length_memory": StopReason.CUT_OFF,
    "im_start_first": StopReason.FORGED_TURN,
    "im_start_memory": StopReason.FORGED_TURN,
    "endoftext_first": StopReason.ANSWERED,
    "endoftext_answer": StopReason.ANSWERED,
    # The same contexts, but the original pays for a box in a memory reply.
    "answer_in_memory_turn": StopReason.BAD_MEMORY,
    "box_in_memory_at_max_turns": StopReason.MAX_TURNS,
}
PAID_BY_THE_ORIGINAL_ONLY = {"answer_in_memory_turn", "box_in_memory_at_max_turns"}
ENDED_BY_THE_ORIGINAL_ONLY = {"memory_over_limit", "truncated_tool", "truncated_memory"}

EVALUATION_AGREES = {
    "one_turn",
    "two_turn",
    "multi_turn",
    "max_turns",
    "malformed_tool_call",
    "tool_parse_failure",
    "multiple_tool_calls",
    "memory_edge",
    "retriever_error",
    "retriever_timeout",
}
EVALUATION_DIFFERS = {"empty_memory", "memory_over_budget", "model_error_retry"}

SCRIPTED_ERRORS = {
    "ConnectionError": "connection refused (scripted)",
    "ReadTimeout": "error: execution timed out",
    "ConnectTimeout": "error: execution timed out",
}


@dataclass(frozen=True)
class QwenTokenCounter:
    tokenizer: Tokenizer

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def clip(self, text: str, limit: int) -> str:
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= limit else text[: offsets[limit - 1][1] if limit else 0]


@dataclass(frozen=True)
class ExactTokenCounter(QwenTokenCounter):
    """Clips as `ChatTokenizer` does, and keeps nothing."""

    def clip(self, text: str, limit: int) -> str:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= limit:
            return text
        prefixes = (text[: encoding.offsets[kept - 1][1]] for kept in range(limit, 0, -1))
        return next((prefix for prefix in prefixes if self.count(prefix) <= limit), "")


@dataclass(frozen=True)
class Rollout:
    """One trajectory of a recorded training batch."""

    batch: dict
    number: int

    @property
    def archetype(self) -> str:
        return self.batch["archetypes"][self.number]

    @property
    def golden(self) -> list[str]:
        return self.batch["ground_truth"][self.number]

    @property
    def contexts(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """(prompt, loss segments) of each turn."""
        own = [context for context in self.batch["conversations"] if context["sample_index"] == self.number]
        return [(context["prompt_text"], [tuple(segment) for segment in context["loss_segments"]]) for context in own]

    @property
    def reward(self) -> Reward:
        return Reward(self.batch["rewards"][self.number], self.batch["reward_reasons"][self.number])

    def search(self, query: Query) -> SearchResult:
        return found(self.batch["retriever_documents"][query.text])


def found(documents: list[str]) -> SearchResult:
    return SearchResult(tuple(Passage(str(number), contents) for number, contents in enumerate(documents)))


@pytest.fixture(scope="module")
def rollouts(recorded) -> list[Rollout]:
    batches = recorded("memsearcher/train_rollout.jsonl")
    return [Rollout(batch, number) for batch in batches for number in range(len(batch["archetypes"]))]


@pytest.fixture(scope="module")
def traces(recorded) -> list[dict]:
    return recorded("memsearcher/rollout_trace.jsonl")


@pytest.fixture(scope="module")
def qwen(shared) -> QwenTokenCounter:
    return QwenTokenCounter(Tokenizer.from_file(str(shared / "tokenizer/qwen2.5/tokenizer.json")))


@pytest.fixture(scope="module")
def train(qwen, scripted):
    """Plays a recorded training script, and more lines after it, under the recorded limits."""
    config = AgentConfig(
        prompts="original", max_turns=3, memory_tokens=400, observation_tokens=700, on_search_error="show"
    )
    chosen = prompts.load(config)

    def train(rollout: Rollout, *more: str, counter: TokenCounter = qwen):
        outputs = rollout.batch["model_outputs"][rollout.number]
        script = [(spoken(output, qwen.tokenizer), output["finish"]) for output in outputs]
        question = rollout.batch["questions"][rollout.number]
        return scripted(
            memsearcher(question, config=config, prompts=chosen, token_counter=counter),
            [*script, *more],
            rollout.search,
        )

    return train


def spoken(output: dict, tokenizer: Tokenizer) -> str:
    """A reply that reached its length limit is the first 512 tokens of its script."""
    if output["finish"] != "length":
        return output["text"]
    return tokenizer.decode(tokenizer.encode(output["text"], add_special_tokens=False).ids[:512])


def of_kind(cases: list, kinds: set[str]) -> list:
    """The recorded rollouts or traces of these kinds, of each of which there is one."""
    kind = {Rollout: lambda case: case.archetype, dict: lambda case: case["category"]}[type(cases[0])]
    chosen = [case for case in cases if kind(case) in kinds]
    assert set(map(kind, chosen)) == kinds
    return chosen


def test_every_recorded_rollout_is_accounted_for(rollouts, traces):
    assert {rollout.archetype for rollout in rollouts} <= set(TRAINING_STOPS) | ENDED_BY_THE_ORIGINAL_ONLY
    assert {trace["category"] for trace in traces} <= EVALUATION_AGREES | EVALUATION_DIFFERS


def test_training_contexts_and_rewards(rollouts, train):
    for rollout in of_kind(rollouts, set(TRAINING_STOPS)):
        played = train(rollout)
        assert played.outcome.stop is TRAINING_STOPS[rollout.archetype], rollout.archetype
        assert [(context.prompt, context.segments) for context in played.contexts] == rollout.contexts
        assert played.outcome.counts["passages_clipped"] == 0
        ours = trajectory_reward(played.outcome, played.transcript, rollout.golden)
        if rollout.archetype not in PAID_BY_THE_ORIGINAL_ONLY:
            assert ours.value == pytest.approx(rollout.reward.value, abs=1e-7), rollout.archetype


def test_every_text_is_encoded_once_and_nothing_else_changes(rollouts, train, qwen, shared, monkeypatch):
    """A text that is counted, clipped and shown; once more, with the offsets of its tokens, if it is cut."""
    encoded: list[str] = []
    cut: list[str] = []
    encode, prefix = tokenizer._Encoder.encode, tokenizer._Encoder.prefix
    encode_words = tokenizer._Words.encode

    def recorded(encoder, text: str):
        encoded.append(text)
        return encode(encoder, text)

    def recorded_words(words, text: str):
        ids = encode_words(words, text)
        encoded.extend([text] * (ids is not None))
        return ids

    def recorded_prefix(encoder, text: str, limit: int):
        kept = prefix(encoder, text, limit)
        cut.extend([text] * (kept != text))
        return kept

    monkeypatch.setattr(tokenizer._Encoder, "encode", recorded)
    monkeypatch.setattr(tokenizer._Words, "encode", recorded_words)
    monkeypatch.setattr(tokenizer._Encoder, "prefix", recorded_prefix)
    keeping = tokenizer.ChatTokenizer.load(shared / "tokenizer/qwen2.5")
    for rollout in rollouts:
        played = train(rollout, counter=keeping)
        expected = train(rollout, counter=ExactTokenCounter(qwen.tokenizer))
        assert played == expected, rollout.archetype
    again = Counter(encoded) - Counter(set(encoded))
    assert again <= Counter(cut) and len(encoded) > 100


def test_the_originals_rule_gives_the_originals_rewards(rollouts):
    for rollout in rollouts:
        prompt, segments = rollout.contexts[-1]
        judged = memsearcher_reward(prompt + "".join(text for _, text in segments), rollout.golden)
        assert judged.value == pytest.approx(rollout.reward.value, abs=1e-7)
        assert judged.reason == rollout.reward.reason


def test_a_box_in_a_memory_reply_earns_nothing(rollouts, train):
    for rollout in of_kind(rollouts, PAID_BY_THE_ORIGINAL_ONLY):
        played = train(rollout)
        stop = TRAINING_STOPS[rollout.archetype]
        assert rollout.reward.value > 0
        assert trajectory_reward(played.outcome, played.transcript, rollout.golden) == Reward(0.0, stop.value)


def test_a_memory_over_the_limit_is_cut_and_the_trajectory_goes_on(rollouts, train, qwen):
    for rollout in of_kind(rollouts, {"memory_over_limit"}):
        played = train(rollout, " I know. </think> \\boxed{it}")
        recorded_contexts = rollout.contexts
        ours = [(context.prompt, context.segments) for context in played.contexts]
        assert ours[:-1] == recorded_contexts
        assert played.outcome.stop is StopReason.ANSWERED
        assert played.outcome.counts["memory_cuts"] == 1
        before = recorded_contexts[-1][1][-1][1]
        memory = played.outcome.turns[-1].memory
        assert memory in before and qwen.count(memory) == 400
        assert f"<memory> {memory} </memory>" in played.contexts[-1].prompt


def test_a_long_page_is_clipped_and_the_trajectory_goes_on(rollouts, train, qwen):
    for rollout in of_kind(rollouts, {"truncated_tool"}):
        played = train(rollout, "<memory> m </memory>", " I know. </think> \\boxed{it}")
        ((prompt, (reply, (sampled, page))),) = rollout.contexts
        ours = played.contexts[0]
        assert ours.prompt == prompt
        assert ours.segments[0] == reply
        assert sampled == 0 and not page.endswith("</tool_response>")
        clipped = ours.segments[1][1].partition("\n</tool_response>")[0]
        assert page.startswith(clipped.removesuffix("\\n\\n"))
        assert qwen.count(clipped) < 720
        assert ours.segments[1][1].endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert played.outcome.stop is StopReason.ANSWERED
        assert played.outcome.counts["passages_clipped"] == 1


def test_no_limit_on_a_turns_sum_ends_a_trajectory(rollouts, train):
    for rollout in of_kind(rollouts, {"truncated_memory"}):
        played = train(rollout, " I know. </think> \\boxed{it}")
        ((prompt, (*whole, (sampled, cut))),) = rollout.contexts
        ours = played.contexts[0]
        assert ours.prompt == prompt
        assert ours.segments[:2] == whole
        assert sampled == 1 and ours.segments[2][1].startswith(cut) and ours.segments[2][1] != cut
        assert played.outcome.stop is StopReason.ANSWERED


@pytest.fixture(scope="module")
def evaluate(qwen, scripted):
    """Plays a recorded evaluation script; the search gives the recorded replies in order."""

    def evaluate(trace: dict):
        config = AgentConfig(prompts="original", max_turns=trace["max_turns"], on_search_error="show")
        replies = iter(trace["retriever_outputs"])
        workflow = memsearcher(trace["question"], config=config, prompts=prompts.load(config), token_counter=qwen)
        script = [output for output in trace["model_outputs"] if isinstance(output, str)]
        return scripted(workflow, script, lambda query: replied(next(replies)))

    return evaluate


def replied(reply: dict) -> SearchResult:
    if "docs" in reply:
        return found(reply["docs"])
    if "status" in reply:
        return SearchResult(error=f"error: {reply['status']}")
    if "raise" in reply:
        return SearchResult(error=SCRIPTED_ERRORS[reply["raise"]])
    return SearchResult(error="'contents'")


def asked_with_text(trace: dict) -> list[dict]:
    """The recorded requests that ours makes too: a query that is no text never reaches the search."""
    return [request["json"] for request in trace["retriever_requests"] if isinstance(request["json"]["query"], str)]


def test_evaluation_prompts_searches_and_answers(traces, evaluate):
    for trace in of_kind(traces, EVALUATION_AGREES):
        played = evaluate(trace)
        theirs = asked_with_text(trace)
        refused = len(trace["retriever_requests"]) - len(theirs)
        assert refused == 0 or trace["category"] == "tool_parse_failure"
        prompts_seen = [
            prompt.replace("\nerror: 422\n", "\ninvalid query\n") if refused else prompt
            for prompt in trace["model_prompts"]
        ]
        assert played.prompts == prompts_seen, trace["id"]
        assert played.outcome.answer == trace["pred"], trace["id"]
        queries = [query for search in played.searches for query in search.queries]
        # Ours applies the default that the prompt promises; the original leaves it to the server.
        assert queries == [Query(asked["query"], asked.get("top_n", 5)) for asked in theirs], trace["id"]


def test_evaluation_ends_without_a_memory(traces, evaluate):
    for trace in of_kind(traces, {"empty_memory"}):
        played = evaluate(trace)
        assert played.outcome.stop is StopReason.BAD_MEMORY
        assert played.prompts == trace["model_prompts"][:2]
        assert len(trace["model_prompts"]) == 3


def test_evaluation_holds_the_memory_budget(traces, evaluate, qwen):
    for trace in of_kind(traces, {"memory_over_budget"}):
        played = evaluate(trace)
        assert played.prompts[:2] == trace["model_prompts"][:2]
        memory = played.outcome.turns[1].memory
        assert qwen.count(memory) == 1024
        assert memory in trace["model_prompts"][2]
        assert played.outcome.counts["memory_cuts"] == 1
        assert played.outcome.answer == trace["pred"]


def test_a_fault_of_the_model_server_ends_the_workflow(traces, qwen):
    """The original starts the question again, up to 200 times; a workflow is never started twice."""
    config = AgentConfig(prompts="original")
    for trace in of_kind(traces, {"model_error_retry"}):
        workflow = memsearcher(trace["question"], config=config, prompts=prompts.load(config), token_counter=qwen)
        assert str(next(workflow).text) == trace["model_prompts"][0]
        with pytest.raises(ConnectionError):
            workflow.throw(ConnectionError("model server"))
        with pytest.raises(StopIteration):
            next(workflow)
