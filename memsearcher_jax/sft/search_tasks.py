"""Supervised examples for search agents: demonstrations, and tasks that demonstrations alone teach slowly.

Demonstrations copy only a few tokens, so a small model learns copying late; the copy and extraction tasks train little
else. And an agent that answers early rarely sees two of three facts, so the action task shows it memories with any
number of facts.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from memsearcher_jax.agent.prompts import Prompts, with_workflow
from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.synthetic.encyclopedia import Encyclopedia, make_encyclopedia
from memsearcher_jax.data.synthetic.relations import noun_phrase
from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.rl.metrics import answer_metrics
from memsearcher_jax.rl.reward_fn import score_answer
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run, workflow_factory
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.runtime import text_encoder
from memsearcher_jax.sft.config import NO_ERRORS, SFTConfig
from memsearcher_jax.sft.examples import (
    HELD_OUT_SEED,
    context_examples,
    continuation,
    copy_examples,
    demonstrate,
    encode_reply,
    join_spans,
    span_examples,
    step_seed,
)
from memsearcher_jax.sft.search_demonstrator import SearchDemonstrator
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Problem, Trajectory

COPIED_SPANS = {
    "query": re.compile(r'(?:"query": "|<search>)(.*?)["<]'),
    "fact": re.compile(r".* is (.*?)\.</memory>"),
    "answer": re.compile(r"(?:\\boxed\{|<answer>)(.*?)[}<]"),
}
"""The names that a reply copies from its context, as group 1 of a pattern."""


def step_examples(run: Run, step: int) -> tuple[list[TrainingExample], Metrics]:
    """The examples of a step, and metrics of the demonstrations with the run's workflow."""
    config, sft, tokenizer = run.config, run.config.sft, run.tokenizer
    tasks = make_tasks(run, step_seed(config.seed, step))
    demonstrations = tasks.demonstrations(sft, step)
    # The generator's name decides the draws, on which the packaged models depend.
    rng = named_rng(config.seed, "exercises", step)
    ordinary_ids = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.stop_ids)
    examples = [
        *(example for trajectories in demonstrations for example in context_examples(trajectories)),
        *copy_examples(rng, ordinary_ids, sft.copy_examples),
        *tasks.extraction_examples(rng, sft.extraction_examples),
        *tasks.action_examples(rng, sft, sft.action_examples),
    ]
    scored = [score_answer(one, config.reward, config.agent.workflow) for one in demonstrations[0]]
    return examples, answer_metrics([summarize_trajectory(trajectory) for trajectory in scored])


def held_out_examples(run: Run) -> dict[str, list[TrainingExample]]:
    """Contexts of a held-out encyclopedia without errors, by the kind of copied span that they train; some kinds may
    have none: ReAct writes no facts to a memory."""
    demonstrations = make_tasks(run, HELD_OUT_SEED).demonstrations(NO_ERRORS, step=0)
    prefixes = ("", *(f"{workflow}/" for workflow in run.config.sft.other_workflows))
    return {
        prefix + name: span_examples(trajectories, span, run.tokenizer)
        for prefix, trajectories in zip(prefixes, demonstrations, strict=True)
        for name, span in COPIED_SPANS.items()
    }


def make_tasks(run: Run, seed: int) -> SearchTasks:
    """The tasks over a new encyclopedia, with a search engine that keeps no files."""
    encyclopedia = make_encyclopedia(replace(run.config.data.encyclopedia, seed=seed))
    retrieval = replace(run.config.retrieval, index_type="exact")
    with tempfile.TemporaryDirectory() as folder:
        searcher = open_searcher(retrieval, Path(folder) / "index", encyclopedia.passages, text_encoder.load)
    return SearchTasks(run.config, run.tokenizer, encyclopedia, searcher)


@dataclass(frozen=True)
class SearchTasks:
    """Generates examples from one encyclopedia."""

    config: RunConfig
    tokenizer: ChatTokenizer
    encyclopedia: Encyclopedia
    searcher: Searcher

    def demonstrations(self, errors: SFTConfig, step: int) -> list[list[Trajectory]]:
        """Demonstrations of random questions with the run's workflow, then with each of `sft.other_workflows`."""
        config, sft = self.config, self.config.sft
        problem_counts = [(config.agent, config.rl.prompts_per_step)]
        for workflow in sft.other_workflows:
            problem_counts.append((with_workflow(config.agent, workflow), sft.other_problems))
        demonstrations = []
        for agent, count in problem_counts:
            rng = named_rng(config.seed, f"demonstrate {agent.workflow}", step)
            tasks = replace(self, config=replace(config, agent=agent))
            demonstrations.append(tasks.demonstrate(self._random_problems(rng, count), errors, rng))
        return demonstrations

    def demonstrate(self, problems: Sequence[Problem], errors: SFTConfig, rng: np.random.Generator) -> list[Trajectory]:
        """One trajectory of the scripted agent per problem, in order."""

        def policy(problem: Problem) -> SearchDemonstrator:
            agent = self.config.agent.workflow
            return SearchDemonstrator(problem, self.encyclopedia, errors, _python_rng(rng), workflow=agent)

        start_workflow = workflow_factory(self.config, self._prompts, self.tokenizer)
        return demonstrate(problems, start_workflow, policy, self.searcher, self.tokenizer)

    def extraction_examples(self, rng: np.random.Generator, count: int) -> list[TrainingExample]:
        """Random passages, each followed by its facts in random order as a memory states them, which are trained."""
        passages = self.encyclopedia.passages
        chosen = rng.choice(len(passages), min(count, len(passages)), replace=False)
        shuffle = _python_rng(rng).shuffle
        examples = []
        for passage in (passages[row] for row in chosen):
            facts = list(self.encyclopedia.entities[passage.title].relations.items())
            shuffle(facts)
            text = " ".join(f"{noun_phrase(name, passage.title)} is {value}." for name, value in facts)
            examples.append(continuation(self.tokenizer, passage.contents + "\n", text))
        return examples

    def action_examples(self, rng: np.random.Generator, errors: SFTConfig, count: int) -> list[TrainingExample]:
        """First replies of a turn, errors included, to random questions with a correct memory of one or more facts."""
        examples = []
        for problem in self._random_problems(rng, count):
            chain = [*problem.metadata["supporting_titles"], *problem.golden_answers]
            known = chain[: int(rng.integers(2, len(chain) + 1))]
            policy = SearchDemonstrator(problem, self.encyclopedia, errors, _python_rng(rng), known)
            prompt = self.tokenizer.prompt(self._prompts.initial_prompt(problem.question, policy.memory()))
            reply = encode_reply(self.tokenizer, policy.act())
            examples.append(join_spans([*((ids, False) for ids in prompt), (reply, True)]))
        return examples

    @cached_property
    def _prompts(self) -> Prompts:
        return WORKFLOWS[self.config.agent.workflow].load_prompts(self.config.agent)

    def _random_problems(self, rng: np.random.Generator, count: int) -> list[Problem]:
        """At most `count` different problems of both splits."""
        problems = (*self.encyclopedia.train, *self.encyclopedia.test)
        return [problems[row] for row in rng.choice(len(problems), min(count, len(problems)), replace=False)]


def _python_rng(rng: np.random.Generator) -> random.Random:
    return random.Random(int(rng.integers(2**63)))
