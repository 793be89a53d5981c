"""The script for real questions: it follows the supporting pages, and gives up where they do not lead on."""

from dataclasses import replace

import pytest

from memsearcher_jax.agent import prompts, reward
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.sft.question_demonstrator import ANSWER, QuestionDemonstrator, clause
from memsearcher_jax.types import Passage, Problem, Search, SearchResult, StopReason

PAGES = {
    "Ave Caesar! (film)": "Ave Caesar! is a 1919 Hungarian film. It was directed by Alexander Korda, who was famous.",
    "Alexander Korda": "Sir Alexander Korda (born in Túrkeve, Hungary) was a director. He died in London in 1956.",
    "Ed Roland": "Ed Roland is the lead vocalist of Collective Soul.",
    "Adam Duritz": "Adam Duritz is the vocalist of Counting Crows.",
}
AGENT = AgentConfig(prompts="brief", default_top_n=1)


class WordCounter:
    def count(self, text):
        return len(text.split())

    def clip(self, text, limit):
        return text if self.count(text) <= limit else " ".join(text.split(" ")[:limit])


def play(question, answer, titles, pages=PAGES, agent=AGENT, start=memsearcher):
    problem = Problem("1", question, (answer,), {"supporting_titles": titles})
    policy = QuestionDemonstrator(problem)
    workflow = start(question, config=agent, prompts=prompts.load(agent), token_counter=WordCounter())

    def search(request: Search) -> tuple[SearchResult, ...]:
        found = [
            Passage(title, f'"{title}"\n{text}') for title, text in pages.items() if request.queries[0].text in title
        ]
        return policy.observe(request, (SearchResult(tuple(found[:1])),))

    outcome = run_workflow(workflow, policy, search)
    assert outcome.stop is StopReason.ANSWERED
    return outcome, reward.exact_match(outcome.answer, (answer,))


def test_it_follows_a_link_and_writes_what_is_next_into_the_memory():
    titles = ["Alexander Korda", "Place of birth", "Ave Caesar! (film)"]
    outcome, score = play("Where was the director of film Ave Caesar! born?", "Turkeve", titles)
    assert score == 0 and outcome.answer == "Túrkeve", "the answer is copied as the page writes it"
    assert [turn.queries[0].text for turn in outcome.turns[:-1]] == ["Ave Caesar", "Alexander Korda"]
    assert [turn.memory for turn in outcome.turns] == [
        "",
        "Who is the director of film Ave Caesar!? Alexander Korda. Next: Where was Alexander Korda born?",
        "Where was Alexander Korda born? Túrkeve. Next: answer Túrkeve.",
    ]
    assert [turn.reply.partition("</think>")[0] for turn in outcome.turns] == [
        "Who is the director of film Ave Caesar!? Then: Where was that person born?",
        "Where was Alexander Korda born? Then: answer.",
        ANSWER,
    ]


def test_a_history_gets_as_a_thought_what_a_memory_would_hold():
    agent = replace(AGENT, workflow="react", prompts="brief_react")
    outcome, score = play(
        "Where was the director of film Ave Caesar! born?",
        "Túrkeve",
        ["Alexander Korda", "Ave Caesar! (film)"],
        agent=agent,
        start=react,
    )
    assert score == 1
    assert [turn.reply.partition("</think>")[0] for turn in outcome.turns] == [
        "Who is the director of film Ave Caesar!? Then: Where was that person born?",
        "Who is the director of film Ave Caesar!? Alexander Korda. Next: Where was Alexander Korda born?",
        "Where was Alexander Korda born? Túrkeve. Next: answer Túrkeve.",
    ]


def test_a_question_that_names_no_relation_is_followed_by_its_pages():
    titles = ["Ave Caesar! (film)", "Alexander Korda"]
    outcome, _ = play("Where was the man behind Ave Caesar! born?", "Túrkeve", titles)
    assert outcome.answer == "Túrkeve"
    assert [turn.reply.partition("</think>")[0] for turn in outcome.turns[:-1]] == [
        "Ave Caesar. Then: another page.",
        "Where was the man behind Ave Caesar! born? Then: answer.",
    ]
    assert outcome.turns[1].memory == "It was directed by Alexander Korda. Next: Alexander Korda."


def test_only_what_is_shown_of_a_passage_is_quoted():
    pages = {"Ed Roland": "Ed Roland is a singer. " + "word " * 60 + "He was born in Rome."}
    small = replace(AGENT, observation_tokens=40)
    outcome, _ = play("Where was Ed Roland born?", "Rome", ["Ed Roland"], pages, small)
    assert outcome.answer == ""
    assert play("Where was Ed Roland born?", "Rome", ["Ed Roland"], pages)[1] == 1


def test_it_gives_up_where_search_finds_nothing():
    pages = {"Ave Caesar! (film)": PAGES["Ave Caesar! (film)"]}
    titles = ["Ave Caesar! (film)", "Alexander Korda"]
    outcome, _ = play("Where was the director of Ave Caesar! born?", "Túrkeve", titles, pages)
    assert outcome.answer == ""
    assert [turn.memory for turn in outcome.turns[1:]] == [
        "Who is the director of Ave Caesar!? Alexander Korda. Next: Where was Alexander Korda born?",
        "Nothing.",
    ]


@pytest.mark.parametrize(
    ("question", "titles"), [("Who is it?", ["Ed Roland"]), ("Who is Ed Roland's father?", ["Ed Roland"]), ("?", [])]
)
def test_it_gives_up_where_the_pages_do_not_lead_to_the_answer(question, titles):
    outcome, _ = play(question, "Túrkeve", titles)
    assert outcome.answer == ""


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("One. Two is by Ann. Three is by Ann.", "Ann", "Two is by Ann"),
        ("He was (c. 1617 – 1684) the third son of J. R. Hay.", "Hay", "the third son of J. R. Hay"),
        ("It is a film of 1942 (by Ann) and Bob.", "Ann", "is a film of 1942 (by Ann"),
        ("Ann", "Ann", "Ann"),
    ],
)
def test_a_clause_is_the_words_of_the_sentence_before_the_name(text, name, expected):
    assert clause(text, name) == expected


def test_a_long_question_is_not_repeated_in_the_memory():
    question = f"{'Of all people who sang in a band of any kind, ' * 3}what is Ed Roland's role?"
    outcome, score = play(question, "lead vocalist", ["Ed Roland"])
    assert score == 1 and outcome.turns[-1].memory == "Ed Roland is the lead vocalist. Next: answer lead vocalist."
