"""Records scripted policies, and tasks in the same form, as trajectory files for launch/sft.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise

import numpy as np

from examples.warmstart.scripted import scripted_trajectory
from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.data.problems import ProblemSplits
from memsearcher_jax.rl.setup import Run, open_tokenizer
from memsearcher_jax.rl.tool_executor import respond, search_backend
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, Search, StopReason, Trajectory

HELD_OUT_SEED = 999
COPY_LENGTHS = (2, 12)  # minimum and exclusive maximum


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's data. Seeds below 1,000 are for the data of RL runs and of the small tokenizer."""
    return 1_000 + seed * 1_000_000 + step


def open_run(config: RunConfig) -> Run:
    """What scripts need of a preset: the agent, its templates and the tokenizer."""
    return Run(config, agent_of(config), None, open_tokenizer(config.model), None, ProblemSplits((), ()))


def demonstrate(run: Run, problems: Iterable[Problem], make_policy: Callable) -> list[ScoredTrajectory]:
    """One trajectory of `make_policy(problem)` per problem, in order. A policy finds the results of its last search in
    its attribute `results`. Raises ConnectionError where a search fails.
    """
    trajectories = []
    for problem in problems:
        policy = make_policy(problem)

        def search(request: Search, policy: Callable = policy):
            policy.results = respond({"": search_backend(run.searcher)}, request)
            return policy.results

        workflow = run.agent.start(problem, run.tokenizer)
        trajectory = scripted_trajectory(problem, workflow, policy, search, run.tokenizer)
        if trajectory.outcome.error:
            raise ConnectionError(f"no demonstration of problem {problem.id}: {trajectory.outcome.error}")
        trajectories.append(trajectory)
    return run.agent.rewards(trajectories, Scoring(run.tokenizer, notify=print))


def task(kind: str, tokenizer: ChatTokenizer, spans: Iterable[tuple[Sequence[int], bool]]) -> ScoredTrajectory:
    """A context that belongs to no workflow: spans (ids, trained), of which what is trained is right."""
    ids, trained = zip(*((int(id), trained) for span, trained in spans for id in span), strict=True)
    problem, outcome = Problem(kind, "", (), {"source": kind}), Outcome(StopReason.ANSWERED)
    contexts = (Context(ids, (0.0,) * len(ids), trained),)
    return ScoredTrajectory(Trajectory(problem, 0, outcome, contexts, tokenizer.transcript(ids)), 1.0)


def copies(
    tokenizer: ChatTokenizer, rng: np.random.Generator, ids: Sequence[int] | np.ndarray, count: int
) -> list[ScoredTrajectory]:
    """Random runs of these ids, repeated. The repetition is trained except for its first token, which is unknown."""
    runs = [rng.choice(ids, int(rng.integers(*COPY_LENGTHS))) for _ in range(count)]
    return [task("copy", tokenizer, [(run, False), (run[:1], False), (run[1:], True)]) for run in runs]


def decisions(
    kind: str, demonstrations: Iterable[ScoredTrajectory], span: re.Pattern[str], tokenizer: ChatTokenizer
) -> list[ScoredTrajectory]:
    """Contexts up to a reply that matches `span`, trained on the tokens of its group 1 alone."""
    tasks = []
    for context in (context for one in demonstrations for context in one.trajectory.contexts):
        for sampled, positions in groupby(range(len(context.ids)), context.sampled.__getitem__):
            reply = list(positions) if sampled else []
            ids = [context.ids[position] for position in reply]
            # A token that ends inside a character ends after its replacement character.
            texts = [tokenizer.completion(ids[:count], found_stop=True).text for count in range(len(ids) + 1)]
            offsets = [(len(before), len(after)) for before, after in pairwise(texts)]
            if match := span.search(texts[-1]):
                inside = [match.start(1) <= start and end <= match.end(1) for start, end in offsets]
                spans = [((context.ids[position],), trained) for position, trained in zip(reply, inside, strict=True)]
                tasks.append(task(kind, tokenizer, [(context.ids[: reply[0]], False), *spans]))
    return tasks
