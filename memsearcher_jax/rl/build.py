"""From a config to the parts of a run, with everything checked that can be checked before long work starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from memsearcher_jax.agent import memalpha_prompts
from memsearcher_jax.agent import prompts as templates
from memsearcher_jax.agent.direct import direct
from memsearcher_jax.agent.memalpha_prompts import MemalphaPrompts
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.rag import rag
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.types import AgentConfig, Problem, Workflow
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data import problems as data
from memsearcher_jax.data.problems import Problems
from memsearcher_jax.data.world import make_world
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.rl import embedder, reading, source
from memsearcher_jax.rl.rollout import RolloutDriver
from memsearcher_jax.rl.run_folder import DATA, INDEX, located, tokenizer_folder
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.sampling.buffer import PromptWidths
from memsearcher_jax.sampling.pool import make_sampler
from memsearcher_jax.training import update

PACKAGED_TOKENIZER = str(located("package:tiny"))
WORKFLOWS = {"memsearcher": memsearcher, "react": react, "direct": direct, "rag": rag}


@dataclass(frozen=True)
class Meshes:
    """Where training runs, and where this host samples."""

    train: Mesh
    local: Mesh


@dataclass(frozen=True)
class Run:
    """The checked parts of a run. Nothing large is in device memory yet."""

    config: RunConfig
    meshes: Meshes
    tokenizer: ChatTokenizer
    prompts: Prompts | MemalphaPrompts
    searcher: Searcher | None  # None where the workflow never searches
    problems: Problems


def open_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """The tokenizer that the config names, or the one beside the weights, or the packaged small one."""
    folder = tokenizer_folder(model.tokenizer or model.path) if model.tokenizer or model.path else PACKAGED_TOKENIZER
    tokenizer = ChatTokenizer.load(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens and model.vocab_size is {model.vocab_size}: "
            "set model.tokenizer to the one that this model was made with"
        )
    return tokenizer


def open_meshes(config: RunConfig) -> Meshes:
    """Both meshes. Raises ValueError if the devices, the model or the slots do not divide, or have no room."""
    train = sharding.make_mesh(config.mesh)
    sharding.check_divides(config.model, dict(train.shape))
    devices, together = jax.local_devices(), config.sampling.tensor
    if len(devices) % together:
        raise ValueError(f"sampling.tensor {together} does not divide the {len(devices)} devices of a host")
    local = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=together), devices)
    sharding.check_divides(config.model, dict(local.shape))
    copies = local.shape["data"]
    if config.sampling.slots % copies:
        raise ValueError(
            f"sampling.slots {config.sampling.slots} does not divide over the {copies} samplers of a host: "
            f"choose a multiple of {copies}"
        )
    _check_cache(config, copies)
    return Meshes(train, local)


def check_shares(config: RunConfig, train: Mesh) -> None:
    """Raises ValueError if the rows of an update, or the problems of a step, cannot be shared by all of the mesh."""
    hosts = jax.process_count()
    if config.rl.problems < hosts:
        raise ValueError(f"rl.problems {config.rl.problems} leaves some of the {hosts} hosts without one: raise it")
    if hosts > 1 and config.rl.method != "grpo":
        raise ValueError(f"rl.method {config.rl.method} runs on one host, and these are {hosts}: start it on one")
    update.on_mesh(config.training, train)


def _check_cache(config: RunConfig, copies: int) -> None:
    """Raises ValueError if the sampler's cache alone is larger than a device, which its allocation would say worse."""
    model, sampling = config.model, config.sampling
    tokens = sampling.slots // copies * sampling.context_tokens
    heads = model.kv_heads // sampling.tensor
    cache_bytes = 2 * model.layers * tokens * heads * model.head_size * jnp.dtype(model.compute_dtype).itemsize
    if cache_bytes > (limit := _device_bytes()):
        raise ValueError(
            f"the sampler's cache needs {cache_bytes / 1e9:,.1f} GB on each device, which has {limit / 1e9:,.1f} GB: "
            "lower sampling.slots or sampling.context_tokens"
        )


def _device_bytes() -> float:
    """Memory of one local device; infinite where it is not known. CPU devices share the host's."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)


def check_context(config: RunConfig, prompts: Prompts, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError unless the longest context that a turn can need fits a slot."""
    agent = config.agent
    template = prompts.template_tokens(agent.max_calls, tokenizer)
    memory = agent.memory_tokens if agent.workflow == "memsearcher" else 0
    needed = template + agent.question_tokens + memory + agent.observation_tokens + 2 * agent.reply_tokens
    if needed > config.sampling.context_tokens:
        raise ValueError(
            f"a turn may need {needed} tokens (templates {template}, question {agent.question_tokens}, "
            f"memory {memory}, observation {agent.observation_tokens}, two replies of {agent.reply_tokens}), but "
            f"sampling.context_tokens is {config.sampling.context_tokens}: raise it or lower one of these"
        )


def prepare(
    config: RunConfig,
    workspace: Path,
    *,
    training: bool = True,
    asked: Sequence[Problem] = (),
    index: Path | None = None,
) -> Run:
    """Opens everything that a run needs; what is built on the way (data, index) is kept in `workspace`.

    Cheap checks come first. `training`: problems to train on are needed, else problems to test. `asked` are problems
    that take the place of the config's test questions; `index` is where an index stands already, if not in `workspace`.
    Raises ValueError or OSError in one line that names the setting or file.
    """
    if config.model.path:
        source.check_weights(config.model.path, config.model)
    tokenizer = open_tokenizer(config.model)
    meshes = open_meshes(config)
    if training:
        check_shares(config, meshes.train)
    prompts = open_prompts(config, tokenizer)
    problems = Problems((), asked) if asked else open_problems(config, workspace / DATA, training=training)
    check_problems((*problems.train, *problems.test), config, tokenizer)
    searcher = open_search(config, index or workspace / INDEX) if searches(config) else None
    return Run(config, meshes, tokenizer, prompts, searcher, problems)


def open_prompts(config: RunConfig, tokenizer: ChatTokenizer) -> Prompts | MemalphaPrompts:
    """The wording for the workflow. Raises ValueError or OSError if it is not whole or its contexts do not fit."""
    if config.agent.workflow == "memalpha":
        prompts = memalpha_prompts.load(config.agent)
        reading.check_contexts(config, prompts, tokenizer)
    else:
        prompts = templates.load(config.agent)
        check_context(config, prompts, tokenizer)
    return prompts


def check_problems(problems: Sequence[Problem], config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError that names a problem which the workflow cannot take."""
    if config.agent.workflow == "memalpha":
        reading.check_streams(problems, config, tokenizer)
    else:
        data.check_questions(problems, tokenizer.count, config.agent.question_tokens)


def searches(config: RunConfig) -> bool:
    """Whether the workflow searches at all."""
    return config.agent.workflow not in ("direct", "memalpha")


def open_search(config: RunConfig, index: Path) -> Searcher:
    """What the config searches; an index that has to be built is kept at `index`."""
    embedded = make_world(config.data.world).passages if has_embedded_passages(config) else ()
    return open_searcher(config.retrieval, index, embedded, partial(embedder.load, config.retrieval))


def has_embedded_passages(config: RunConfig) -> bool:
    """Whether what is searched is the embedded world."""
    return not (config.retrieval.url or config.retrieval.corpus or config.retrieval.index)


def open_problems(config: RunConfig, folder: Path, *, training: bool) -> Problems:
    """The config's questions, stored in `folder`.

    Raises ValueError if they and the passages come from different worlds, or if those that are needed are missing.
    """
    if searches(config) and config.data.embedded and not has_embedded_passages(config):
        raise ValueError("the passages come from a file, the questions do not: set data.train, data.test or --data")
    if searches(config) and has_embedded_passages(config) and not config.data.embedded:
        raise ValueError("the questions come from a file, the passages do not: set retrieval.corpus, index or url")
    problems = data.load(config.data, folder)
    if training and not problems.train:
        raise ValueError("there are no questions to train on: set data.train to files of questions")
    if config.rl.evaluate_every and training and not problems.test:
        raise ValueError("rl.evaluate_every needs test questions: set data.test to files of questions, or set it to 0")
    if not training and not problems.test:
        raise ValueError("there are no test questions: set data.test to files of questions, or --data to one")
    return problems


def make_driver(run: Run, *, evaluation: bool = False, check: Callable[[], None] = lambda: None) -> RolloutDriver:
    """A rollout driver with an engine of its own, under the settings of training or of evaluation.

    `check` is called whenever a rollout could be broken off, which it does by raising.
    """
    agent, sampling = run.config.agent, run.config.sampling
    if evaluation:
        agent = replace(agent, max_turns=run.config.evaluation.max_turns)
        sampling = replace(sampling, temperature=run.config.evaluation.temperature)
    engine = make_sampler(run.config.model, sampling, prompt_widths(run), run.tokenizer.stop_ids, run.meshes.local)
    if agent.workflow == "memalpha":
        make_workflow = reading.workflow_maker(run.config, run.prompts, run.tokenizer)
    else:
        make_workflow = workflow_maker(agent, run.prompts, run.tokenizer)
    return RolloutDriver(engine, run.tokenizer, run.searcher, make_workflow, run.config.rl.search_seconds, check=check)


def workflow_maker(agent: AgentConfig, prompts: Prompts, tokenizer: ChatTokenizer) -> Callable[[Problem], Workflow]:
    """What starts the configured workflow on a question."""
    workflow = WORKFLOWS[agent.workflow]
    return lambda problem: workflow(problem.question, config=agent, prompts=prompts, ruler=tokenizer)


def prompt_widths(run: Run) -> PromptWidths:
    """The sampler's buffers: as wide as the templates are, and as the budgets allow."""
    if run.config.agent.workflow == "memalpha":
        return reading.chunk_widths(run.config, run.prompts, run.tokenizer)
    ids = run.tokenizer.prompt(run.prompts.opening(""))
    agent = run.config.agent
    memory = agent.observation_tokens if agent.workflow == "rag" else agent.memory_tokens
    return PromptWidths(len(ids.prefix), agent.question_tokens, len(ids.bridge), memory, len(ids.suffix))


def sampler_params(run: Run, params):
    """The weights as the sampler wants them: on this host's mesh, in the compute type. All hosts ask together."""
    return sharding.publish(params, run.config.model, run.meshes.local, run.config.model.compute_dtype)
