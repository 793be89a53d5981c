"""Supervised examples from real questions: the run's own workflow and search, played by a script.

A demonstration is used if its answer is right. Where search or a passage does not lead on, the script gives up, and the
contexts before that search are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.report.metrics import Metrics
from memsearcher_jax.report.trajectories import summarize_trajectory
from memsearcher_jax.rl.metrics import answer_metrics
from memsearcher_jax.rl.reward_fn import score_answer
from memsearcher_jax.rl.setup import Run, workflow_factory
from memsearcher_jax.sft.examples import context_examples, demonstrate, span_examples
from memsearcher_jax.sft.question_demonstrator import QuestionDemonstrator
from memsearcher_jax.sft.question_steps import steps
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Problem, ScoredTrajectory, Trajectory

DEMONSTRATED = ("memsearcher", "react")
"""The workflows whose searches and answers the script writes."""
DECIDED_SPANS = {
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
    metrics = answer_metrics([summarize_trajectory(one.scored) for one in demonstrations])
    # With whole questions alone a model learns to follow the link in any case.
    others = [part for problem in problems for part in steps(problem)]
    demonstrations += [one for one in make_demonstrations(run, others) if one.right]
    return context_examples([one.usable for one in demonstrations]), metrics


def held_out_examples(run: Run) -> dict[str, list[TrainingExample]]:
    """Contexts of the test questions, by the kind of decision that they train; some kinds may have none."""
    trajectories = [one.usable for one in make_demonstrations(run, run.problems.test)]
    return {name: span_examples(trajectories, span, run.tokenizer) for name, span in DECIDED_SPANS.items()}


@dataclass(frozen=True)
class Demonstration:
    """A trajectory of the script, and the part of it to imitate."""

    scored: ScoredTrajectory

    @property
    def usable(self) -> Trajectory:
        """The trajectory with the contexts that demonstrate something right: all, or without the search that did not
        lead on and the turn that gives up."""
        trajectory = self.scored.trajectory
        return trajectory if self.right else replace(trajectory, contexts=trajectory.contexts[:-2])

    @property
    def right(self) -> bool:
        return self.scored.scores["exact_match"] == 1


def make_demonstrations(run: Run, problems: Sequence[Problem]) -> list[Demonstration]:
    """One demonstration per problem, in order."""
    start_workflow = workflow_factory(run.config, run.prompts, run.tokenizer)
    trajectories = demonstrate(problems, start_workflow, QuestionDemonstrator, run.searcher, run.tokenizer)
    config = run.config
    return [Demonstration(score_answer(one, config.reward, config.agent.workflow)) for one in trajectories]
