"""Splits questions into train, tune and test files that share no question and no supporting page.

python -m examples.warmstart.split_questions FILE ... --out DIR --config smollm2 --retrieval.corpus FILE

With a corpus it also makes two-hop questions about its pages, generated_sft.jsonl for the warm start and
generated_rl.jsonl for reinforcement learning. They share no page with the questions to tune and test on; those of the
second file share none with the first and train.jsonl either. The script of the warm start answers all of them. A page
names somebody by a relation, and that person's page states a fact. They are worded as in 2WikiMultihopQA, whose
questions were made from templates, too. A few hundred benchmark questions teach a model their names; with many other
pages it has to learn to read.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from examples.warmstart.questions import KINSHIP, QuestionDemonstrator, is_right, keys
from examples.warmstart.record import demonstrate
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.questions import of_kind
from memsearcher_jax.data.readers import read_problems, with_source
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.ranges import Count, CountOrZero
from memsearcher_jax.retrieval.corpus import read_passages
from memsearcher_jax.rl.setup import prepare
from memsearcher_jax.types import Passage, Problem

RL_SHARE = 3  # one of this many generated questions is for reinforcement learning
FIELDS = ("id", "question", "golden_answers", "metadata")  # of a written row
HEAD = 600  # characters of a page that are read: an agent is shown little more
LONGEST_TITLE = 80
_DATE = r"(\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4})"
_WORD = r"[A-Z](?:\.|[\w'-]*)"
_NAME = rf"([A-Z][\w'-]+(?:,? (?:of |de |von |the )?{_WORD})*)"
_PLACE = rf"([A-Z][\w'-]+(?: (?:of |de |von |the )?{_WORD})*)\b(?! \d)"
"""As the reference answers name it: "Barcelona" of "Barcelona, Spain"; not "January 1802"."""
FACTS = (
    (rf"born:? (?:on )?{_DATE}|\({_DATE} ?[–-]", ("When was {} born?", "What is the date of birth of {}?")),
    (rf"[–-] ?{_DATE}\)", ("When did {} die?", "What is the date of death of {}?")),
    (rf"born (?:[^.()]{{0,40}} )?in {_PLACE}", ("Where was {} born?", "What is the place of birth of {}?")),
    (rf"died (?:[^.()]{{0,40}} )?(?:in|at) {_PLACE}", ("Where did {} die?", "Where was the place of death of {}?")),
    (r"(?:is|was) an? ([A-Z][a-z]+(?:an|ish|ese|ch))\b", ("What nationality is {}?", "Which country {} is from?")),
    (rf"\b(?:son|daughter) of (?:[a-z]+ )*{_NAME}", ("Who is the father of {}?",)),
    (
        rf"\b(?:son|daughter) of [^.;]{{2,60}}? and (?:his (?:[a-z]+ )*wife,? )?(?!{_WORD}[.,;)]){_NAME}",
        ("Who is the mother of {}?",),
    ),
    (rf"\b(?:married(?: to)?|wife of|husband of) (?:[a-z]+ )*{_NAME}", ("Who is the spouse of {}?",)),
)
"""(a pattern whose group is the answer, questions about somebody)."""
_WORK = re.compile(r"\b(?:film|song|album|series|novel|play)\b")
RELATIONS = (
    (r"\bfilm\b[^.]*? directed by ", "director", "film", ("he", "she", "")),
    (r"\bsong\b[^.]*? by ", "performer", "song", ("he", "she", "")),
    (r"\b(?:son|daughter|child) of ", "father", "", ("he", "")),
    (r"\b(?:son|daughter|child) of [^.;]{2,60}? and (?:his (?:[a-z]+ )*wife,? )?", "mother", "", ("she", "")),
    (r"\b(?:married(?: to)?|wife of) ", "husband", "", ("he",)),
    (r"\b(?:married(?: to)?|husband of) ", "wife", "", ("she",)),
)
"""(what precedes a name, whose name it is, of which kind of work, the pronoun of that person's page, "" for none)."""


@dataclass(frozen=True)
class SplitQuestions(cli.Command):
    """Split questions into files that share no question and no supporting page.

    --config and --retrieval.corpus are for questions about the pages of a corpus, which the script answers as that
    agent, with that search.
    """

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = ()
    """Questions in FlashRAG's layout: DATASET/SPLIT.jsonl, with supporting pages in the metadata. --data.questions
    selects their kind."""
    out: cli.Directory = None
    """Directory to write; it must be new."""
    tune: CountOrZero = 30
    """Minimum questions to tune on."""
    test: CountOrZero = 200
    """Minimum questions to test on."""
    generated: Count = 600
    """Maximum questions to make, as many as possible about the rarer kinds of facts: otherwise every third one asks for
    a nationality, which is easily guessed."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(SplitQuestions, argv)
        config = flags.run
        files = [file.absolute() for file in flags.files]
        problems = [with_source(problem, file.parent.name) for file in files for problem in read_problems(file)]
        test, tune, train = split(of_kind(problems, config.data.questions), (flags.test, flags.tune), config.seed)
        splits = {"train": train, "tune": tune, "test": test}
        with outputs.new_output_dir(flags.out, "questions") as out:
            if config.retrieval.corpus:
                splits |= generate(config, flags.generated, train, [*tune, *test])
            for name, chosen in splits.items():
                rows = ({field: getattr(problem, field) for field in FIELDS} for problem in chosen)
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out}: {', '.join(f'{len(chosen)} questions in {name}.jsonl' for name, chosen in splits.items())}")


def split(problems: Sequence[Problem], sizes: Sequence[int], seed: int) -> list[list[Problem]]:
    """Splits of at least these sizes, and the rest. Questions that share an entity or a text are in the same split.

    Raises ValueError if there are too few questions.
    """
    first: dict[str, int] = {}
    links = [(row, first.setdefault(key, row)) for row, problem in enumerate(problems) for key in keys(problem)]
    rows, others = np.array(links, int).reshape(-1, 2).T
    shape = (len(problems) + 1,) * 2  # scipy needs a node
    count, group_of = connected_components(coo_matrix((np.ones(len(rows)), (rows, others)), shape))
    groups: list[list[Problem]] = [[] for _ in range(count - 1)]
    for problem, group in zip(problems, group_of, strict=False):
        groups[group].append(problem)
    random.Random(seed).shuffle(groups)
    splits: list[list[Problem]] = []
    for size in sizes:
        splits.append([])
        while len(splits[-1]) < size:
            if not groups:
                raise ValueError(f"{len(problems)} questions are too few for splits of {', '.join(map(str, sizes))}")
            splits[-1] += groups.pop()
    return [*splits, [problem for group in groups for problem in group]]


def without_shared(problems: Iterable[Problem], others: Iterable[Problem]) -> list[Problem]:
    """The problems that share neither their text nor an entity with `others`."""
    known = {key for problem in others for key in keys(problem)}
    return [problem for problem in problems if not known & keys(problem)]


def generate(
    config: RunConfig, count: int, train: Sequence[Problem], held_out: Sequence[Problem]
) -> dict[str, list[Problem]]:
    """Questions about pages of the corpus that the script answers right, by the name of their file."""
    passages = (passage for _, passage in read_passages(Path(config.retrieval.corpus)))
    problems = without_shared(page_questions(passages, config.seed), held_out)
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(config, Path(folder), training=False, questions=problems)
        demonstrated = demonstrate(run, problems, QuestionDemonstrator)
    answered = [demonstration.trajectory.problem for demonstration in demonstrated if is_right(demonstration)]
    problems = answered[:count]  # all kinds of facts in turn
    fresh = without_shared(problems, train)
    while True:
        others = [problem for problem in problems if problem not in fresh]
        closed = without_shared(fresh, others)
        if len(closed) == len(fresh):
            break
        fresh = closed
    for_rl, _ = split(fresh, (min(len(problems) // RL_SHARE, len(fresh)),), config.seed)
    chosen = {problem.id for problem in for_rl}
    return {"generated_sft": [problem for problem in problems if problem.id not in chosen], "generated_rl": for_rl}


def page_questions(passages: Iterable[Passage], seed: int) -> list[Problem]:
    """A question for each fact of a page that another page names, in random order, all kinds of facts in turn.

    A passage is `"TITLE"`, a line break, and the text; of several passages with one title the first is used.
    """
    pages: dict[str, str] = {}
    for passage in passages:
        pages.setdefault(passage.title, passage.contents.partition("\n")[2][:HEAD])
    rng = random.Random(seed)
    problems: list[list[Problem]] = [[] for _ in FACTS]
    for title, text in pages.items():
        for relation, work, other in _named_persons(title, text, pages):
            for number, (fact, questions) in enumerate(FACTS):
                if match := re.search(fact, pages[other]):
                    question = _worded(title, relation, work, rng.choice(questions), rng)
                    answer = next(group for group in match.groups() if group)
                    metadata = {"supporting_titles": [title, other]}
                    problems[number].append(Problem(f"page/{title}/{relation}/{number}", question, (answer,), metadata))
    for of_fact in problems:
        rng.shuffle(of_fact)
    return [problem for row in zip_longest(*problems) for problem in row if problem]


def _named_persons(title: str, text: str, pages: dict[str, str]) -> list[tuple[str, str, str]]:
    """(relation to the page's subject, kind of work or "" for a person, title of the page)."""
    persons = []
    is_work = _WORK.search(text[:100]) is not None
    for pattern, relation, work, pronouns in RELATIONS:
        match = re.search(pattern, text) if is_work == bool(work) else None
        other = _title_at(text, match.end(), pages) if match else ""
        if other and other != title and _pronoun(pages[other]) in pronouns:
            persons.append((relation, work, other))
    return persons


def _title_at(text: str, start: int, pages: dict[str, str]) -> str:
    """The longest title, of at least two words, that the text has at `start` or a few common words later; or ""."""
    name = re.compile(r"(?:[a-z][\w'-]*,? ){0,4}(?=[A-Z])").match(text, start)
    rest = text[name.end() :][:LONGEST_TITLE] if name else ""
    ends = [border.start() for border in re.finditer(r"[ .,;()\n]|$", rest)]
    return next((rest[:end] for end in reversed(ends) if " " in rest[:end] and rest[:end] in pages), "")


def _pronoun(text: str) -> str:
    male = len(re.findall(r"\b[Hh](?:e|is|im)\b", text))
    female = len(re.findall(r"\b(?:[Ss]he|[Hh]er)\b", text))
    if male == female:
        return ""
    return "he" if male > female else "she"


def _worded(title: str, relation: str, work: str, question: str, rng: random.Random) -> str:
    """The question about who has the relation to the page: its second step is `question`."""
    name = title.title()  # as in 2WikiMultihopQA
    if work:
        return question.format(f"the {relation} of {work} {name}")
    first = "spouse" if relation in ("husband", "wife") else relation
    kinship = {f"Who is the {outer} of {{}}?": word for word, (inner, outer) in KINSHIP.items() if inner == first}
    if question in kinship and not kinship[question].startswith("step"):  # a father's spouse may be the mother
        relation = kinship[question]
        question = "Who is {}?"
    return question.format(rng.choice((f"{name}'s {relation}", f"the {relation} of {name}")))


if __name__ == "__main__":
    cli.run(main)
