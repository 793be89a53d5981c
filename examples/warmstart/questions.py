"""Demonstrations on real questions, by a script that knows the answers and the titles of the pages that hold them.

Each turn states in its thought what the next page must answer, searches for the page that the question names, and
copies the answer into the memory as "QUESTION ANSWER. Next: STEP.", where STEP is the rest of the question or "answer
ANSWER". So the wording of the question decides whether to search again, and each page is read for one relation. The
thought says whether another step follows: a model that has to decide by the memory's question alone takes every first
answer for the last one. An agent that keeps its history writes the same text into its next thought.

A demonstration is used if its answer is right. Where search or a passage does not lead on, the script gives up, and the
contexts before that search are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from examples.warmstart.record import decisions, demonstrate
from examples.warmstart.search import format_answer, format_memory, format_search
from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.data.questions import find_name, fold
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.types import (
    Completion,
    Generate,
    Passage,
    Problem,
    Prompt,
    ScoredTrajectory,
    plain_title,
)

PLAN, ANSWER = "{} Then: {}", "The memory has the answer."
"""Thoughts before a search, and before the answer. What follows is said after what is asked first: a model that begins
with "First" or "Last" chooses by the question's first word."""
READ = "The passages have the answer."
"""The thought of an agent that gets passages with the question."""
UNKNOWN = "that person"
"""In a thought, the person that the page will name: relations lead to persons."""
NOTHING = "Nothing."
"""The memory of a script that gives up. It is not imitated."""
LEADING_WORDS = 6
PER_STEP = 12  # questions
LONGEST_REPEATED = 120
"""Characters of a question that is repeated in the memory, before its answer."""
DECIDED = {
    "plan": re.compile(r"^(.* Then: (?!answer\.).*?)</think>"),
    "query": re.compile(r'"query": "(.*?)"'),
    "next": re.compile(r"(Next: (?!answer ).*?)[.?]</memory>"),
    "answer": re.compile(r"[>?] ?([^<>?]*\. Next: answer .*?)\.</memory>"),
}
"""What a reply decides, as group 1 of a pattern."""
KINSHIP = {
    "paternal grandfather": ("father", "father"),
    "paternal grandmother": ("father", "mother"),
    "maternal grandfather": ("mother", "father"),
    "maternal grandmother": ("mother", "mother"),
    "father-in-law": ("spouse", "father"),
    "mother-in-law": ("spouse", "mother"),
    "stepmother": ("father", "spouse"),
    "stepfather": ("mother", "spouse"),
}
"""A relation of two steps -> the two relations."""
_RELATIONS = ("director", "composer", "performer", "father", "mother", "husband", "wife", "spouse")
_SENTENCE_START = re.compile(r"(?<=[\w)][\w)][.!?])\s+")


def keys(problem: Problem) -> set[str]:
    """What identifies a question and its entities: the words of its text and of its supporting titles."""
    return {" ".join(re.findall(r"\w+", fold(text))) for text in (problem.question, *problem.supporting_titles)}


def check_disjoint(train: Iterable[Problem], test: Iterable[Problem]) -> None:
    """Raises ValueError, in one line, if a test question shares its text or an entity with a training question."""
    known = {key: problem.id for problem in train for key in keys(problem)}
    for problem in test:
        if shared := sorted(keys(problem) & known.keys()):
            raise ValueError(
                f'test question "{problem.id}" and training question "{known[shared[0]]}" share "{shared[0]}": make '
                "disjoint files with examples/warmstart/split_questions.py"
            )


def decompose(question: str, name: str, bridge: str) -> tuple[str, str] | None:
    """The two steps of a question that describes somebody by their relation to `name`; None for another question.

    "When did A's father die?" has the steps "Who is A's father?" and, with `bridge` as the answer, "When did B die?".
    """
    relation = "|".join((*_RELATIONS, *KINSHIP))
    name = re.escape(name) + "[!.]*"  # `find_title` leaves out the last punctuation of a title
    possessive = re.search(rf"{name}'s ({relation})(?![\w-])", question)
    match = possessive or re.search(rf"the ({relation}) of (?:film |song )?{name}(?!\w)", question)
    if match is None:
        return None
    inner, outer = KINSHIP.get(match[1], (match[1], ""))
    first = f"Who is {match[0].replace(match[1], inner)}?"
    rest = bridge
    if outer:
        rest = f"{bridge}'s {outer}" if possessive else f"the {outer} of {bridge}"
    return None if first == question else (first, question.replace(match[0], rest))


def steps(problem: Problem) -> tuple[Problem, ...]:
    """The one-hop questions of a two-hop question whose supporting titles say which pages answer them; else ()."""
    titles = problem.supporting_titles
    named = [(title, name) for title in titles if (name := find_title(title, problem.question))]
    if len(titles) != 2 or len(named) != 1:
        return ()
    title, name = named[0]
    other = next(other for other in titles if other != title)
    bridge = plain_title(other)
    if (parts := decompose(problem.question, name, bridge)) is None:
        return ()
    of_first, of_second = ({"supporting_titles": [page]} for page in (title, other))
    first = Problem(f"{problem.id}/1", parts[0], (bridge,), of_first)
    return first, replace(problem, id=f"{problem.id}/2", question=parts[1], metadata=of_second)


@dataclass
class QuestionDemonstrator:
    """The policy for one problem, in workflows with a memory and with a history.

    It gives up, with an empty answer, where search or a passage does not lead on.
    """

    problem: Problem
    workflow: str = "memsearcher"
    asked: str = ""  # what is left of the question
    wanted: tuple[str, str] | None = None  # title and query of the next search
    answer: str | None = None
    visited: set[str] = field(default_factory=set)  # titles

    def __post_init__(self) -> None:
        self.asked = self.problem.question
        titles = self.problem.supporting_titles
        # The longest name is the least ambiguous.
        self.wanted = max(self._named_in(self.asked), key=lambda page: len(page[1]), default=None)
        if self._pages_have_passages and (self.wanted is None or len(titles) == 1):
            self.wanted = (titles[0], self.asked.rstrip("?"))

    def __call__(self, request: Generate) -> Completion:
        if self.workflow == "rag":
            assert isinstance(request.text, Prompt), "rag generates once"
            _, *passages = [span.text for span in request.text.segments if not span.trusted]
            return Completion(f"{READ}</think>\n{format_answer(self._find_answer(' '.join(passages)))}")
        read = ""
        if not isinstance(request.text, Prompt):
            read = self._read([span.text for span in request.text if not span.trusted][-1])
            if not request.text[-1].text.endswith("<think>"):
                return Completion(format_memory(read))
        if self.answer is not None or self.wanted is None:
            return Completion(f"{read or ANSWER}</think>\n{format_answer(self.answer or '')}")
        return Completion(f"{read or self._thought(*self.wanted)}</think>\n{format_search(self.wanted[1])}")

    def _find_answer(self, text: str) -> str:
        """A golden answer as a text writes it; "" if it does not."""
        names = (find_name(answer, text) for answer in self.problem.golden_answers)
        return next(filter(None, names), "")

    @property
    def _pages_have_passages(self) -> bool:
        """Whether a page is several passages, so that its name alone does not find the right one.

        So it is in documents of one's own: launch/make_questions.py states the ids of passages.
        """
        return "supporting_ids" in self.problem.metadata

    def _query(self, name: str) -> str:
        """The query for a page that another one named. The question begins with what the last page must tell."""
        unread = set(self.problem.supporting_titles) - self.visited
        if self._pages_have_passages and len(unread) == 1:
            return f"{' '.join(self.problem.question.split()[:LEADING_WORDS])} {name}"
        return name

    def _thought(self, title: str, name: str) -> str:
        """What the page has to answer, so that the memory follows from the thought and the passage."""
        if parts := decompose(self.asked, name, UNKNOWN):
            return PLAN.format(*parts)
        others = set(self.problem.supporting_titles) - self.visited - {title}
        follows = others and self.asked == self.problem.question
        return PLAN.format(f"{name}.", "another page.") if follows else PLAN.format(self.asked, "answer.")

    def _read(self, shown: str) -> str:
        """The memory after a search, which decides the next step. `shown`: the passages, clipped to their budget."""
        assert self.wanted is not None, "a memory follows a search"
        title, query = self.wanted
        self.wanted = None
        titles = [Passage("", line).title for line in shown.split("\n")]
        if title not in titles:
            return NOTHING
        self.visited.add(title)
        text = "\n".join(shown.split("\n")[titles.index(title) + 1 :])
        if following := next(iter(self._named_in(text)), None):
            title, name = following
            self.wanted = (title, self._query(name))
            parts = decompose(self.asked, query, name)
            self.asked = parts[1] if parts else self.problem.question
            return f"{parts[0]} {name}. Next: {parts[1]}" if parts else f"{clause(text, name)}. Next: {name}."
        if name := self._find_answer(text):
            self.answer = name
            read = f"{self.asked} {name}" if len(self.asked) < LONGEST_REPEATED else clause(text, name)
            return f"{read}. Next: answer {name}."
        return NOTHING

    def _named_in(self, text: str) -> list[tuple[str, str]]:
        """(title, name in the text) of the supporting pages that the text names and that were not read."""
        unread = [title for title in self.problem.supporting_titles if title not in self.visited]
        return [(title, name) for title in unread if (name := find_title(title, text))]


def find_title(title: str, text: str) -> str:
    """The first occurrence of a page's title, or else of a part of it; "" if there is none.

    The parts are the title without its parenthesis, and without what follows a comma.
    """
    bare = plain_title(title)
    return find_name(title, text) or find_name(bare, text) or find_name(bare.partition(",")[0], text)


def clause(text: str, name: str) -> str:
    """The first occurrence of the name and the few words of its sentence before it, which state the relation.

    Longer quotes begin with the first words of a passage whatever the question asks, and a model learns only that.
    """
    start = text.index(name)
    words = re.findall(r"\S+\s*", _SENTENCE_START.split(text[:start])[-1])
    return "".join(words[-LEADING_WORDS:]) + name


def step(run: Run, number: int) -> list[ScoredTrajectory]:
    """The demonstrations of a few questions of data.train, and of one step of every second one."""
    loader = ProblemLoader(run.problems.train, run.config.seed)
    problems = loader.batch(number * PER_STEP, PER_STEP)
    # With whole questions alone a model learns to follow the link in any case; with all their steps, hardly ever.
    rng = named_rng(run.config.seed, "steps", number)
    others = [parts[rng.integers(len(parts))] for problem in problems[::2] if (parts := steps(problem))]
    return usable(run, [*problems, *others])


def held_out(run: Run) -> list[ScoredTrajectory]:
    """Contexts of the test questions, by the kind of decision that they train; some kinds may have none."""
    demonstrated = usable(run, run.problems.test)
    tasks: list[ScoredTrajectory] = []
    for kind, span in DECIDED.items():
        tasks += decisions(kind, demonstrated, span, run.tokenizer)
    return tasks


def usable(run: Run, problems: Iterable[Problem]) -> list[ScoredTrajectory]:
    """Demonstrations, with the contexts that demonstrate something right.

    These are all, or all but the search that did not lead on and the turn that gives up.
    """
    demonstrations = []
    make_policy = partial(QuestionDemonstrator, workflow=run.config.agent.workflow)
    for demonstration in demonstrate(run, problems, make_policy):
        trajectory = demonstration.trajectory
        if not is_right(demonstration):
            contexts = trajectory.contexts[:-2]
            transcript = run.tokenizer.transcript(contexts[-1].ids) if contexts else ""
            trajectory = replace(trajectory, contexts=contexts, transcript=transcript)
        demonstrations.append(replace(demonstration, trajectory=trajectory))
    return demonstrations


def is_right(demonstration: ScoredTrajectory) -> bool:
    return demonstration.scores["exact_match"] == 1
