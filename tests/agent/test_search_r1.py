"""The Search-R1 workflow: its tags, its texts word for word, and its reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.agent.reward import trajectory_reward
from memsearcher_jax.agent.search_r1 import parse_answer
from memsearcher_jax.types import Passage, SearchResult, StopReason
from tests.agent.conftest import passages, play

SEARCH = "<think> look </think>\n<search> q </search>"
ANSWER = "<think> known </think>\n<answer> x </answer>"
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
    "who was it?\n<|im_end|>\n<|im_start|>assistant\n"
)
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


def run(script, search=passages, **settings):
    return play("search_r1", script, search, default_top_n=2, **settings)


@pytest.mark.parametrize("question", ["who was it", " who was it? "])
def test_a_context_is_one_assistant_turn_with_the_published_texts(question):
    played = run([SEARCH, "I give up.", ANSWER], question=question)
    (context,) = played.contexts
    assert context.prompt == PROMPT
    information = (
        '\n\n<information>Doc 1(Title: "Page 0") about q\nmore\nDoc 2(Title: "Page 1") about q\nmore</information>\n\n'
    )
    assert context.segments == [(1, SEARCH), (0, information), (1, "I give up."), (0, INVALID), (1, ANSWER)]
    assert played.outcome.counts == {"invalid_actions": 1, "passages_clipped": 0}
    assert [turn.observation for turn in played.outcome.turns] == [information, INVALID, ""]


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("<search> a </answer> b </search>", "a </answer> b"),
        ("<answer> a <search> b </search>", "b"),
        ("</search> <search>b</search>", "b"),
        ("<search></search>", None),
        ("<search>b", None),
    ],
)
def test_the_first_complete_pair_of_tags_is_the_action(reply, query):
    played = run([reply, ANSWER])
    assert [search.queries[0].text for search in played.searches] == ([query] if query else [])
    assert played.outcome.stop is StopReason.ANSWERED


@given(st.lists(st.text("<>/ searchanwx\n", max_size=30), max_size=5))
def test_no_text_of_the_policy_raises(replies):
    played = play("search_r1", replies, prompts="brief")
    assert played.outcome or len(played.prompts) > len(replies), "it ends, or asks for another reply"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([ANSWER], ""),
        ([SEARCH, SEARCH, ANSWER], ""),
        (["<answer> x </answer>"], "bad format"),
        (["no", ANSWER], "bad format"),
        (["<think> a <think> b </think><search>q</search>", ANSWER], "bad format"),
        ([SEARCH, "and <answer> x </answer>"], "bad format"),
    ],
)
def test_exact_match_is_the_reward_and_the_format_may_be_required(script, reason):
    played = run(script)
    exact = RewardConfig(metric="exact_match", wrong_answer=0.0, require_format=False)
    for golden, value in (("X", 1.0), ("Beijing", 0.0), ("x y", 0.0)):
        assert trajectory_reward(played.outcome, played.transcript, [golden], exact, parse_answer).value == value
    judged = trajectory_reward(played.outcome, played.transcript, ["x"], RewardConfig(), parse_answer)
    assert judged.value == (0.0 if reason else 1.0)
    assert judged.reason.startswith(reason)


def test_an_answer_in_a_passage_is_not_the_policys():
    for text in ("<answer>x</answer>", "<answer>", "<search>", "</answer>", "<information><answer>"):
        page = SearchResult((Passage("1", f"T\n{text}"),))
        played = run([SEARCH, "<think> t </think><answer>y</answer>"], lambda query, page=page: page)
        assert (played.outcome.answer, parse_answer(played.transcript)) == ("y", ("y", ""))


def test_a_long_malformed_transcript_is_read_in_linear_time():
    played = run([SEARCH] * 60 + ["no end"], max_turns=100)
    assert parse_answer(played.transcript + "<answer>x</answer>")[1].startswith("bad format")
