"""A checkpoint that writes questions on this host's devices, in place of a service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax

from memsearcher_jax.agent.memalpha.workflow import generate_once
from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding, weights
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.questions.config import WriterConfig
from memsearcher_jax.questions.writer import SAMPLED_TEMPERATURE
from memsearcher_jax.rl.completers import completion_of, prompt_seed
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import Job, Params, RolloutDriver
from memsearcher_jax.rl.setup import open_tokenizer
from memsearcher_jax.runs import hub, load_weights
from memsearcher_jax.runs.run_dir import is_run, located
from memsearcher_jax.sampling.config import SamplingConfig, SamplingParams
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.types import Completion, Prompt, StopReason


@dataclass(frozen=True)
class EngineWriter:
    """Weights on an engine, and the tokens that they read and wrote."""

    driver: RolloutDriver  # whose problems are prompts
    params: Params
    seed: int
    tokens: Counter[str] = field(default_factory=Counter)  # prompt_tokens and completion_tokens

    def ask(self, prompts: Sequence[Prompt], draw: int = 0) -> list[Completion]:
        """One completion of each prompt, in order. Another `draw` samples others."""
        jobs = [Job(prompt_seed(prompt), prompt, index) for index, prompt in enumerate(prompts)]
        key = named_key(self.seed, "questions", draw)
        trajectories, _ = self.driver.trajectories(jobs, self.params, key, lambda line: None)
        completions = list[Completion]()
        for trajectory in trajectories:
            for context in trajectory.contexts:
                sampled = int(context.sampled.sum())
                self.tokens["completion_tokens"] += sampled
                self.tokens["prompt_tokens"] += len(context.ids) - sampled
            completion = completion_of(trajectory.outcome)
            if trajectory.outcome.stop is StopReason.CONTEXT_FULL:
                completion = Completion(error=f"{completion.error}: raise --writer.context_tokens")
            if not completion.error and not completion.text.strip():
                completion = Completion(error="the checkpoint answered with an empty text")
            completions.append(completion)
        return completions


def open_engine_writers(config: WriterConfig, max_tokens: int, seed: int) -> tuple[EngineWriter, EngineWriter]:
    """The writer, which is greedy, and the same weights sampled. Raises ValueError or OSError, in one line."""
    model = read_model(config.checkpoint)
    devices = jax.local_devices()
    slots = -(-config.max_concurrency // len(devices)) * len(devices)
    sampling = SamplingConfig(slots=slots, context_tokens=config.context_tokens)
    if model.max_positions < config.context_tokens:
        raise ValueError(
            f"--writer.checkpoint {config.checkpoint} has {model.max_positions} positions and writer.context_tokens is "
            f"{config.context_tokens}: lower it"
        )
    tokenizer = open_tokenizer(model)
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1), devices)
    loaded = load_weights.load_params(model.path, model, mesh, model.compute_dtype)
    params = sharding.publish(loaded, model, mesh, sampling.weights_dtype(model.compute_dtype))
    engine = Engine(model, sampling, tokenizer.stop_ids, mesh)
    start = partial(generate_once, max_tokens=max_tokens)
    driver = RolloutDriver(engine, tokenizer, start, sampling=SamplingParams(temperature=0.0))
    sampled = replace(driver, sampling=SamplingParams(temperature=SAMPLED_TEMPERATURE))
    return EngineWriter(driver, params, seed), EngineWriter(sampled, params, seed)


def read_model(checkpoint: str) -> ModelConfig:
    """The model of a checkpoint, whose files are there and complete. Raises ValueError or OSError, in one line."""
    folder = hub.local(RunConfig(model=ModelConfig(path=checkpoint))).model.path
    if is_run(folder):
        found = load_weights.trained_model(folder)
    elif (located(folder) / "config.json").is_file():
        found = weights.read_config(located(folder))
    else:
        raise FileNotFoundError(f"--writer.checkpoint {checkpoint}: neither a run nor a Hugging Face directory")
    model = replace(found, path=folder, tokenizer="", adapter="", lora_rank=0)
    load_weights.check_weights(folder, model)
    return model
