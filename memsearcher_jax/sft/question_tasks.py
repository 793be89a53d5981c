"""Supervised examples from real questions: the run's own workflow and search, played by a script.

A demonstration is used if its answer is right. Where search or a passage does not lead on, the script gives up, and the
contexts before that search are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.rl.metrics import answer_metrics
from memsearcher_jax.rl.reward_fn import score_answer
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run, workflow_factory
from memsearcher_jax.sft.examples import context_examples, demonstrate, span_examples
from memsearcher_jax.sft.question_demonstrator import QuestionDemonstrator
from memsearcher_jax.sft.question_steps import steps
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Problem, ScoredTrajectory, Trajectory

DEMONSTRATED = ("memsearcher", "react")
"""The workflows whose searches and answers the script writes."""
DECIDED_SPANS = {
    "plan": re.compile(r"^(.* Then: (?!answer\.).*?)</think>"),
    "query": re.compile(r'"query": "(.*?)"'),
    "next": re.compile(r"(Next: (?!answer ).*?)[.?]</memory>"),
    "answer": re.compile(r"[>?] ?([^<>?]*\. Next: answer .*?)\.</memory>"),
}
"""What a reply decides, as group 1 of a pattern."""


def step_examples(run: Run, step: int) -> tuple[list[TrainingExample], Metrics]:
    """The examples of the questions of a step, and metrics of all its demonstrations."""
    count = run.config.rl.prompts_per_step
    loader = ProblemLoader(run.problems.train, run.config.seed, run.problems.mixture)
    problems = loader.batch(step * count, count)
    demonstrations = make_demonstrations(run, problems)
    metrics = answer_metrics([summarize_trajectory(one) for one in demonstrations])
    # With whole questions alone a model learns to follow the link in any case; with all of their steps, hardly ever.
    rng = named_rng(run.config.seed, "steps", step)
    others = [parts[rng.integers(len(parts))] for problem in problems[::2] if (parts := steps(problem))]
    demonstrations += make_demonstrations(run, others)
    return context_examples([usable_part(one) for one in demonstrations]), metrics


def held_out_examples(run: Run) -> dict[str, list[TrainingExample]]:
    """Contexts of the test questions, by the kind of decision that they train; some kinds may have none."""
    trajectories = [usable_part(one) for one in make_demonstrations(run, run.problems.test)]
    return {name: span_examples(trajectories, span, run.tokenizer) for name, span in DECIDED_SPANS.items()}


def make_demonstrations(run: Run, problems: Sequence[Problem]) -> list[ScoredTrajectory]:
    """One trajectory of the script per problem, in order."""
    config = run.config
    start_workflow = workflow_factory(config, run.prompts, run.tokenizer)
    trajectories = demonstrate(problems, start_workflow, QuestionDemonstrator, run.searcher, run.tokenizer)
    return [score_answer(one, config.reward, config.agent.workflow) for one in trajectories]


def is_right(demonstration: ScoredTrajectory) -> bool:
    return demonstration.scores["exact_match"] == 1


def usable_part(demonstration: ScoredTrajectory) -> Trajectory:
    """The trajectory with the contexts that demonstrate something right: all, or without the search that did not lead
    on and the turn that gives up."""
    trajectory = demonstration.trajectory
    return trajectory if is_right(demonstration) else replace(trajectory, contexts=trajectory.contexts[:-2])
