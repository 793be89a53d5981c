"""Multi-context GRPO in one file: trains `tiny` from its packaged start as `launch/tpu_train.py --config tiny` does.

    python examples/minimal_grpo.py [--steps 50] [--seed 0]

It uses the package's sampler, model, loss and workflow, and nothing of `memsearcher_jax/rl/`. A step:

1. roll out G trajectories of each problem: every turn of MemSearcher is a context of its own in the sampler;
2. reward each trajectory once, by its answer;
3. normalise the rewards over the trajectories of a problem, and give every context its trajectory's advantage;
4. pack all contexts into rows, and update the weights one mini-batch of rows at a time;
5. publish the new weights to the sampler.

What it leaves out, and `rl/` has: several hosts and meshes, searches that run while the devices decode, checkpoints and
resuming, a trajectory that fails alone, alarms and rollback, Mem-alpha and the other agents, a reference or a teacher,
carrying trajectories over, dynamic sampling, logs and reports.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memsearcher_jax import types
from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.data.problems import ProblemLoader, make_problems
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.model import sharding, weights
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.sampling.config import SamplingParams
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training import update
from memsearcher_jax.training.config import learning_rate_plan, with_plan
from memsearcher_jax.training.grpo import group_advantages
from memsearcher_jax.training.packing import TrainingExample, merge_equal, pack
from memsearcher_jax.types import Context, Generate, Outcome, Problem, Prompt, ScoredTrajectory, Trajectory


@dataclass
class Rollout:
    """A workflow that holds a slot of the sampler."""

    number: int  # seeds its draws, with the number of the context
    problem: Problem
    workflow: types.Workflow
    slot: int
    contexts: list[Context] = field(default_factory=list)
    has_open_context: bool = False

    def close_context(self, engine: Engine) -> None:
        if self.has_open_context:
            context = engine.scheduler.pop_context(self.slot)
            self.contexts.append(Context(context.ids, context.logprobs, context.sampled))
        self.has_open_context = False


@dataclass(frozen=True)
class Sampler:
    """Rolls workflows out: what they generate comes from the engine, what they search from the encyclopedia."""

    config: RunConfig
    engine: Engine
    tokenizer: ChatTokenizer
    searcher: Searcher

    def trajectories(
        self, problems: Sequence[Problem], copies: int, params: Params, key: jax.Array, rule: SamplingParams
    ) -> list[Trajectory]:
        """`copies` trajectories of each problem, in order. A workflow keeps its slot until it ends."""
        agent = agent_of(self.config)
        waiting = deque(enumerate(problem for problem in problems for _ in range(copies)))
        active: dict[int, Rollout] = {}  # by slot
        trajectories: dict[int, Trajectory] = {}
        self.engine.start(params, key)
        while waiting or active:
            for slot in self.engine.scheduler.free_slots:
                if slot not in active and waiting:
                    number, problem = waiting.popleft()
                    active[slot] = Rollout(number, problem, agent.start(problem, self.tokenizer), slot)
                    assert self.advance(active[slot], None, rule) is None, "a workflow begins with a context"
            for generation in self.engine.step():
                rollout = active[generation.slot]
                outcome = self.advance(rollout, self.tokenizer.completion(generation.ids), rule)
                if outcome is not None:
                    rollout.close_context(self.engine)
                    transcript = self.tokenizer.transcript(rollout.contexts[-1].ids)
                    trajectories[rollout.number] = Trajectory(
                        rollout.problem, rollout.number % copies, outcome, tuple(rollout.contexts), transcript
                    )
                    del active[rollout.slot]
        self.engine.stop()
        return [trajectories[number] for number in sorted(trajectories)]

    def advance(self, rollout: Rollout, response: Any, rule: SamplingParams) -> Outcome | None:
        """Resumes the workflow until it waits for the sampler (None) or ends."""
        while True:
            try:
                request = rollout.workflow.send(response)
            except StopIteration as end:
                return end.value
            if not isinstance(request, Generate):
                passages = self.searcher.search(
                    [query.text for query in request.queries], max(query.top_n for query in request.queries)
                )
                response = tuple(
                    types.SearchResult(tuple(found[: query.top_n]))
                    for query, found in zip(request.queries, passages, strict=True)
                )
            elif self.generate(rollout, request, rule):
                return None
            else:
                response = types.Completion("", types.FinishReason.CONTEXT_FULL)

    def generate(self, rollout: Rollout, request: Generate, rule: SamplingParams) -> bool:
        """Hands the request's text to the rollout's slot; False if it does not fit the context."""
        scheduler = self.engine.scheduler
        if isinstance(request.text, Prompt):  # a new turn of MemSearcher: a context of its own
            prompt_ids = [id for segment_ids in self.tokenizer.prompt(request.text) for id in segment_ids]
            if not scheduler.fits(None, len(prompt_ids)):
                return False
            rollout.close_context(self.engine)
            stream = (rollout.number, len(rollout.contexts))
            scheduler.open_context(rollout.slot, prompt_ids, stream, request.max_tokens, rule)
            rollout.has_open_context = True
            return True
        added_ids = self.tokenizer.encode_spans(request.text)
        if not scheduler.fits(rollout.slot, len(added_ids)):
            return False
        scheduler.extend_context(rollout.slot, added_ids, request.max_tokens)
        return True


def training_examples(scored: Sequence[ScoredTrajectory], group_size: int) -> list[TrainingExample]:
    """One example for each context: its tokens, and the advantage of its trajectory.

    Groups whose rewards are equal teach nothing, and are left out.
    """
    reward_R = np.array([trajectory.reward for trajectory in scored], np.float32)
    group_R = np.arange(len(scored)) // group_size
    advantage_R = group_advantages(reward_R, group_R)
    mixed = {group for group in set(group_R) if len(set(reward_R[group_R == group])) > 1}
    examples = []
    for trajectory, advantage, group in zip(scored, advantage_R, group_R, strict=True):
        if group not in mixed:
            continue
        for number, context in enumerate(trajectory.trajectory.contexts):
            arrays = (
                np.array(context.ids, np.int32),
                np.array(context.logprobs, np.float32),
                np.array(context.sampled, bool),
            )
            examples.append(TrainingExample(*arrays, float(advantage), number))
    return examples


def exact_match(scored: Sequence[ScoredTrajectory]) -> float:
    return float(np.mean([trajectory.scores["exact_match"] for trajectory in scored]))


def train(config: RunConfig, steps: int, directory: Path) -> tuple[float, float]:
    """(greedy exact match on the test questions before, and after `steps` steps). `directory` gets the index."""
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    model = config.model
    training = update.fit_to_mesh(config.training, mesh)
    training = with_plan(training, learning_rate_plan(training, steps))
    tokenizer = ChatTokenizer.load(located(model.path))
    passages = make_encyclopedia(config.data.encyclopedia).passages
    searcher = open_searcher(config.retrieval, directory / "index", passages)
    engine = Engine(model, config.sampling, tokenizer.stop_ids, mesh)
    sampler = Sampler(config, engine, tokenizer, searcher)
    problems = make_problems(config.data)
    loader = ProblemLoader(problems["train"], config.seed)
    agent = agent_of(config)

    with jax.set_mesh(mesh):
        _, params = weights.load(located(model.path), mesh=mesh, dtype=model.param_dtype)
        optimizer = update.make_optimizer(training)
        state = update.init_state(params, model, optimizer, mesh)
        packed_model = sharding.select_attention(model, mesh, training.seq_len)
        take_update = update.make_update(
            packed_model, training, optimizer, mesh, temperature=config.sampling.temperature
        )

    def published() -> Params:
        publish = sharding.publish_program(model, mesh, tuple(mesh.devices.flat), model.compute_dtype)
        return sharding.on_submesh(publish(state.params), mesh)

    def scored(problems: Sequence[Problem], copies: int, key: jax.Array, rule: SamplingParams):
        trajectories = sampler.trajectories(problems, copies, published(), key, rule)
        return agent.rewards(trajectories, Scoring(tokenizer))

    root_key = jax.random.key(config.seed)
    greedy = replace(config.sampling.params, temperature=0.0)
    before = exact_match(scored(problems["test"], 1, root_key, greedy))
    print(f"exact match before training, greedy: {before:.3f}", flush=True)
    for step in range(steps):
        began = time.monotonic()
        batch = loader.batch(step * config.rl.prompts_per_step, config.rl.prompts_per_step)
        key = jax.random.fold_in(root_key, step + 1)
        rollouts = scored(batch, config.rl.group_size, key, config.sampling.params)
        examples = training_examples(rollouts, config.rl.group_size)
        if examples:
            packed = pack(
                merge_equal(examples),
                training.seq_len,
                training.minibatch_rows,
                np.random.default_rng((config.seed, step)),
                microbatches=training.grad_accum_steps,
                minibatch_contexts=training.minibatch_contexts,
            )
            with jax.set_mesh(mesh):
                for minibatch in packed.split(training.minibatch_rows):
                    state, _ = take_update(state, minibatch, None, np.int32(step))
        reward = float(np.mean([trajectory.reward for trajectory in rollouts]))
        seconds = time.monotonic() - began
        print(
            f"step {step + 1}: reward {reward:.3f}, exact match {exact_match(rollouts):.3f}, {seconds:.1f} s",
            flush=True,
        )
    after = exact_match(scored(problems["test"], 1, root_key, greedy))
    print(f"exact match after training, greedy: {after:.3f}", flush=True)
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        train(replace(tiny(), seed=flags.seed), flags.steps, Path(directory))


if __name__ == "__main__":
    main()
