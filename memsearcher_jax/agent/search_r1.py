"""The Search-R1 workflow: one assistant turn that searches and answers in tags of its own (Jin et al., 2025).

The policy thinks, then writes `<search>` or `<answer>`; its generation ends with the closing tag. Search results follow
in `<information>` tags, inside the same assistant turn, and the policy goes on. A reply without an action is followed
by a text that says so. There is no chat markup between replies, and only the policy's own tokens are trained.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import ASSISTANT, Prompts
from memsearcher_jax.agent.tools import ToolUse, fit_results
from memsearcher_jax.types import (
    Completion,
    FinishReason,
    Generate,
    Outcome,
    Passage,
    Query,
    Search,
    SearchResult,
    StopReason,
    TextSpan,
    TokenCounter,
    Turn,
    Workflow,
)

END_OF_ACTION = r"<answer>.*?</answer>|</search>"
_THOUGHT = r"\s*<think>((?!</?think>).)*</think>\s*"
_INFORMATION = r"<information>(?>.*?</information>)"
_WELL_FORMED = re.compile(
    rf"({_THOUGHT}<search>((?!</?search>).)*</search>\s*{_INFORMATION})*"
    rf"{_THOUGHT}<answer>((?!</?answer>).)*</answer>\s*",
    re.DOTALL,
)
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class SearchR1Prompts(Prompts):
    """A template set of this protocol."""

    invalid: tuple[str, ...] = ("",)
    opening: ClassVar[str] = ""  # the policy writes `<think>` itself

    def show_passage(self, number: int, passage: Passage) -> tuple[str, str, str]:
        before, number_end, title_end, after = self.passage
        title, _, text = passage.contents.partition("\n")
        return f"{before}{number}{number_end}{title}{title_end}", text, after

    def information(self, passages: str) -> tuple[TextSpan, ...]:
        """The text that follows a search."""
        before, after = self.observation
        return TextSpan(before, True), TextSpan(passages, False), TextSpan(after, True)

    def template_tokens(self, calls: int, token_counter: TokenCounter) -> int:
        """Maximum tokens of template text in a context of one search or one invalid reply."""
        prompt = sum(token_counter.count(span.text) for span in self.initial_prompt("").segments)
        return prompt + max(token_counter.count("".join(text)) for text in (self.observation, self.invalid))


def parse_answer(transcript: str) -> tuple[str | None, str]:
    """(answer, format error) of a transcript: the last answer.

    The format is a sequence of thoughts, each followed by a search and its results, the last one by the answer.
    """
    reply = transcript.partition(ASSISTANT)[2]
    written = re.sub(_INFORMATION, "", reply, flags=re.DOTALL)  # a page may contain tags
    answers = [content for action, content in ACTION.findall(written) if action == "answer"]
    if not answers:
        return None, "bad format: no answer"
    error = "" if _WELL_FORMED.fullmatch(reply) else "bad format: not thought, search or answer"
    return answers[-1].strip(), error


@dataclass(frozen=True)
class Action:
    """What a reply does: it ends the trajectory, perhaps with an answer, or it searches, or neither."""

    stop: StopReason | None = None
    answer: str = ""
    query: str | None = None


def read_action(completion: Completion, is_last: bool, counts: Counter[str]) -> Action:
    """The action of a reply; `is_last`: of the last turn, whose search is not run."""
    if completion.finish in (FinishReason.CONTEXT_FULL, FinishReason.FORGED_TURN):
        return Action(protocol.STOP_REASONS[completion.finish])
    match = ACTION.search(completion.text)
    counts["invalid_actions"] += match is None
    if match and match[1] == "answer":
        return Action(StopReason.ANSWERED, answer=match[2].strip())
    if is_last:
        return Action(StopReason.MAX_TURNS)
    return Action(query=match[2].strip() if match else None)


def run_query(
    query: str | None, turn: Turn, *, config: AgentConfig, prompts: SearchR1Prompts, token_counter: TokenCounter
) -> Generator[Search, tuple[SearchResult, ...], ToolUse]:
    """Runs the search of a reply; the message is the text that follows the reply, also one without an action."""
    result = SearchResult()
    message = (TextSpan(prompts.invalid[0], True),)
    counts: dict[str, int] = {}
    if query:  # search services refuse an empty one
        queries = (Query(query, config.default_top_n),)
        (result,) = yield Search(queries)
        turn = replace(turn, calls=(query,), queries=queries, results=(result,))
    if query is not None:
        fitted = fit_results([""], [result], config.observation_tokens, prompts, token_counter)
        ((_, passages),) = fitted.pairs
        message = prompts.information(passages)
        counts = {"passages_clipped": fitted.passages_clipped}
    observation = "".join(span.text for span in message)
    return ToolUse(replace(turn, observation=observation), message, counts, result.error)


def search_r1(question: str, *, config: AgentConfig, prompts: SearchR1Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields `Generate` and `Search`, returns an `Outcome`. A search in the last turn is not run.

    Search-R1 generates once more after its `max_turns`, so `config.max_turns` is one more than there.
    """
    turns: list[Turn] = []
    counts = Counter(invalid_actions=0, passages_clipped=0)
    # The published data has no spaces around a question, and a question mark at its end.
    question = f"{question.strip().removesuffix('?')}?"
    question = token_counter.clip(question, config.question_tokens)
    request = Generate(prompts.initial_prompt(question), config.completion_tokens, END_OF_ACTION)
    while True:
        completion = yield request
        action = read_action(completion, len(turns) + 1 == config.max_turns, counts)
        turn = Turn(memory="", reply=completion.text)
        if action.stop:
            return protocol.ended(action.stop, action.answer, turns, turn, counts)
        used = yield from run_query(action.query, turn, config=config, prompts=prompts, token_counter=token_counter)
        counts.update(used.counts)
        if used.error and config.on_search_error == "stop":
            return Outcome(StopReason.SEARCH_FAILED, "", (*turns, used.turn), dict(counts), used.error)
        turns.append(used.turn)
        request = Generate(used.message, config.completion_tokens, END_OF_ACTION, same_turn=True)


class SearchR1(QuestionAgent):
    """The baseline in Search-R1's protocol."""

    workflow = staticmethod(search_r1)
    templates = "search_r1"
    searches = True
    has_one_context = True
    parse_answer = staticmethod(parse_answer)
    prompt_set = SearchR1Prompts
