"""Records scripted policies, and tasks in the same form, as trajectory files for launch/sft.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby, pairwise

import numpy as np

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.data.problems import ProblemSplits
from memsearcher_jax.rl.setup import Run, open_tokenizer
from memsearcher_jax.rl.tool_executor import respond, search_backend
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import (
    Completion,
    Context,
    Generate,
    Outcome,
    Problem,
    Prompt,
    ScoredTrajectory,
    Search,
    SearchResult,
    StopReason,
    Trajectory,
)

HELD_OUT_SEED = 999
COPY_LENGTHS = (2, 12)  # minimum and exclusive maximum


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's data. Seeds below 1,000 are for the data of RL runs and of the small tokenizer."""
    return 1_000 + seed * 1_000_000 + step


def open_run(config: RunConfig) -> Run:
    """What scripts need of a preset: the agent, its templates and the tokenizer."""
    return Run(config, agent_of(config), None, open_tokenizer(config.model), None, ProblemSplits((), ()))


def demonstrate(run: Run, problems: Iterable[Problem], make_policy: Callable) -> list[ScoredTrajectory]:
    """One trajectory of `make_policy(problem)` per problem, in order. Raises ConnectionError where a search fails."""
    trajectories = []
    for problem in problems:
        trajectories.append(play(run, problem, make_policy(problem)))
        if error := trajectories[-1].outcome.error:
            raise ConnectionError(f"no demonstration of problem {problem.id}: {error}")
    return run.agent.rewards(trajectories, Scoring(run.tokenizer, notify=print))


def play(run: Run, problem: Problem, policy: Callable) -> Trajectory:
    """The run's agent with a scripted policy, which finds the results of its last search in its attribute `results`.

    Contexts hold the ids that a sampler would; log-probabilities are 0.
    """
    tokenizer = run.tokenizer
    contexts: list[list[tuple[int, bool]]] = []  # (id, sampled) by context

    def generate(request: Generate) -> Completion:
        if isinstance(request.text, Prompt):
            contexts.append([])
            ids = tuple(chain.from_iterable(tokenizer.prompt(request.text)))
        else:
            ids = tokenizer.encode_spans(request.text)
        completion = policy(request)
        if request.same_turn and contexts[-1][-1][0] in tokenizer.stop_ids:
            contexts[-1].pop()
        found_stop = request.stop and re.search(request.stop, completion.text, re.DOTALL)
        reply = tokenizer.encode_untrusted(completion.text) if found_stop else encode_reply(tokenizer, completion.text)
        contexts[-1] += [*((id, False) for id in ids), *((id, True) for id in reply)]
        return completion

    def search(request: Search) -> tuple[SearchResult, ...]:
        policy.results = respond({"": search_backend(run.searcher)}, request)
        return policy.results

    outcome = run_workflow(run.agent.start(problem, tokenizer), generate, search)
    recorded = tuple(map(_context, contexts))
    transcript = tokenizer.transcript(recorded[-1].ids) if recorded else ""
    return Trajectory(problem, 0, outcome, recorded, transcript)


def encode_reply(tokenizer: ChatTokenizer, text: str) -> tuple[int, ...]:
    """The ids that a model samples for a reply, with the end of the turn."""
    return (*tokenizer.encode_untrusted(text), tokenizer.end_ids[0])


def _context(tokens: Iterable[tuple[int, bool]]) -> Context:
    """Of (id, trained)."""
    ids, trained = zip(*tokens, strict=True)
    return Context(ids, (0.0,) * len(ids), trained)


def task(kind: str, tokenizer: ChatTokenizer, spans: Iterable[tuple[Sequence[int], bool]]) -> ScoredTrajectory:
    """A context that belongs to no workflow: spans (ids, trained), of which what is trained is right."""
    context = _context((int(id), trained) for span, trained in spans for id in span)
    problem = Problem(kind, "", (), {"source": kind})
    outcome = Outcome(StopReason.ANSWERED)
    return ScoredTrajectory(Trajectory(problem, 0, outcome, (context,), tokenizer.transcript(context.ids)), 1.0)


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
    contexts = chain.from_iterable(demonstration.trajectory.contexts for demonstration in demonstrations)
    for context in contexts:
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
