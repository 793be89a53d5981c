"""Demonstrations for MemAgent on generated documents, by a script that is imperfect on purpose.

The script writes the fact that the question needs into the memory, and keeps it. Often it forgets the fact again: a
policy that imitates it knows the form, and can learn from rewards alone to remember.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from examples.warmstart.record import HELD_OUT_SEED, demonstrate, step_seed
from memsearcher_jax.data.synthetic.documents import make_documents
from memsearcher_jax.data.synthetic.relations import noun_phrase
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.runtime.rng import named_rng
from memsearcher_jax.types import Completion, Generate, Problem, Prompt, ScoredTrajectory

FORGETS, NOTHING = 0.25, "nothing yet."
PASSAGES, QUESTIONS, HELD_OUT_QUESTIONS = 10, 128, 32


def held_out(run: Run) -> list[ScoredTrajectory]:
    """Demonstrations without errors, of an encyclopedia that no step has."""
    return _demonstrate(run, HELD_OUT_SEED, HELD_OUT_QUESTIONS, 0.0)


def step(run: Run, number: int) -> list[ScoredTrajectory]:
    """The demonstrations of one training step, of an encyclopedia of its own."""
    return _demonstrate(run, step_seed(run.config.seed, number), QUESTIONS, FORGETS)


def _demonstrate(run: Run, seed: int, questions: int, forgets: float) -> list[ScoredTrajectory]:
    data, rng = run.config.data, named_rng(seed, "demonstrate documents", 0)
    encyclopedia = replace(data.encyclopedia, seed=seed, hops=(1,), train_questions=questions, test_questions=0)
    problems = make_documents(encyclopedia, replace(data.documents, train_passages=PASSAGES))["train"]
    return demonstrate(run, problems, partial(_policy, rng, forgets))


def _policy(rng: np.random.Generator, forgets: float, problem: Problem) -> Callable[[Generate], Completion]:
    (subject,), (answer,) = problem.supporting_titles, problem.golden_answers
    fact = f"{noun_phrase(problem.metadata['relations'][0], subject)} is {answer}."

    def reply(request: Generate) -> Completion:
        assert isinstance(request.text, Prompt), "every reply has a context of its own"
        texts = {span.name: span.text for span in request.text.segments}
        known = answer in texts["memory"]
        if "chunk" not in texts:
            return Completion(f"\\boxed{{{answer if known else 'unknown'}}}")
        found = subject in texts["chunk"] and answer in texts["chunk"]
        remembers = found or (known and rng.random() >= forgets)
        return Completion(f"<memory>{fact if remembers else NOTHING}</memory>")

    return reply
