"""Demonstrations for MemAgent on generated documents, by a script that is imperfect on purpose.

The script writes the fact that the question needs into the memory, and forgets it after two of five chunks: a policy
that imitates it knows the form, and can learn from rewards alone to remember. Most contexts of a workflow hold nothing
to read, so others show the passage with the fact alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from examples.warmstart.record import HELD_OUT_SEED, demonstrate, step_seed, task
from memsearcher_jax.data.synthetic.documents import make_documents
from memsearcher_jax.data.synthetic.relations import noun_phrase
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.runtime.rng import named_rng
from memsearcher_jax.sft.scripted import encode_reply
from memsearcher_jax.types import Completion, Generate, Problem, Prompt, ScoredTrajectory

FORGETS, NOTHING = 0.4, "nothing yet."
HELD_OUT_DOCUMENTS = 32
COUNTS = {4: (48, 110), 10: (32, 40)}
"""Documents and readings of a step, by `data.documents.train_passages`. Short documents teach to read, and to write too
often; longer ones teach what to leave out."""


def held_out(run: Run) -> list[ScoredTrajectory]:
    """Demonstrations without errors, of an encyclopedia that no step has."""
    rng = named_rng(HELD_OUT_SEED, "demonstrate documents", 0)
    problems = _problems(run, HELD_OUT_SEED, HELD_OUT_DOCUMENTS, run.config.data.documents.train_passages)
    return demonstrate(run, problems, partial(_policy, rng, 0.0))


def step(run: Run, number: int) -> list[ScoredTrajectory]:
    """The demonstrations and readings of one training step, of an encyclopedia of its own."""
    seed = step_seed(run.config.seed, number)
    rng, passages = named_rng(seed, "demonstrate documents", 0), run.config.data.documents.train_passages
    if passages not in COUNTS:
        raise ValueError(
            f"data.documents.train_passages {passages}: demonstrations have {' or '.join(map(str, COUNTS))}"
        )
    documents, readings = COUNTS[passages]
    demonstrations = demonstrate(run, _problems(run, seed, documents, passages), partial(_policy, rng, FORGETS))
    return demonstrations + [_reading(run, rng, problem) for problem in _problems(run, seed, readings, 1)]


def _problems(run: Run, seed: int, questions: int, passages: int) -> tuple[Problem, ...]:
    data = run.config.data
    encyclopedia = replace(data.encyclopedia, seed=seed, hops=(1,), train_questions=questions, test_questions=0)
    return make_documents(encyclopedia, replace(data.documents, train_passages=passages))["train"]


def _reading(run: Run, rng: np.random.Generator, problem: Problem) -> ScoredTrajectory:
    """The context that shows the passage with the fact, with the memory of a chunk before or with none."""
    memory = NOTHING if rng.random() < 0.5 else ""
    prompt = run.tokenizer.prompt(run.agent.prompts.read(problem.question, memory, problem.stream.chunks[0]))
    reply = encode_reply(run.tokenizer, f"<memory>{_fact(problem)}</memory>")
    return task("reading", run.tokenizer, [*((ids, False) for ids in prompt), (reply, True)])


def _fact(problem: Problem) -> str:
    (subject,), (answer,) = problem.supporting_titles, problem.golden_answers
    return f"{noun_phrase(problem.metadata['relations'][0], subject)} is {answer}."


def _policy(rng: np.random.Generator, forgets: float, problem: Problem) -> Callable[[Generate], Completion]:
    (subject,), (answer,), fact = problem.supporting_titles, problem.golden_answers, _fact(problem)

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
