"""From a config to the parts of a run, with everything checked that can be checked before long work starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import jax
from jax.sharding import Mesh

from memsearcher_jax.agent import prompts as templates
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.types import AgentConfig, Problem, Workflow
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data import problems as data
from memsearcher_jax.data.problems import Problems
from memsearcher_jax.data.world import make_world
from memsearcher_jax.model import sharding, weights
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.rl import source
from memsearcher_jax.rl.rollout import RolloutDriver
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.sampling.buffer import PromptWidths
from memsearcher_jax.sampling.engine import Engine

PACKAGED_TOKENIZER = str(files("memsearcher_jax") / "assets" / "tokenizer")
WORKFLOWS = {"memsearcher": memsearcher, "react": react}


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
    prompts: Prompts
    searcher: Searcher
    problems: Problems


def open_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """The tokenizer that the config names, or the one beside the weights, or the packaged small one."""
    folder = model.tokenizer or (source.tokenizer_folder(model.path) if model.path else PACKAGED_TOKENIZER)
    tokenizer = ChatTokenizer.load(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, model.vocab_size is only {model.vocab_size}"
        )
    return tokenizer


def open_meshes(config: RunConfig) -> Meshes:
    """Both meshes. Raises ValueError if the devices or the sizes of the model do not divide."""
    train = sharding.make_mesh(config.mesh)
    sharding.check_divides(config.model, dict(train.shape))
    local = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=config.sampling.tensor), jax.local_devices())
    sharding.check_divides(config.model, dict(local.shape))
    copies = local.shape["data"]
    if config.sampling.slots % copies:
        raise ValueError(f"sampling.slots {config.sampling.slots} does not divide over the {copies} samplers of a host")
    rows, shards = (
        config.training.rows_per_update // config.training.accumulate,
        train.shape["data"] * train.shape["fsdp"],
    )
    if rows % shards:
        raise ValueError(
            f"training.rows_per_update / training.accumulate is {rows} rows, which do not divide over "
            f"{shards} devices (mesh.data x mesh.fsdp)"
        )
    return Meshes(train, local)


def check_context(config: RunConfig, prompts: Prompts, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError unless the longest context that a turn can need fits a slot."""
    agent = config.agent
    template = prompts.template_tokens(agent.max_calls, tokenizer)
    memory = agent.memory_tokens if agent.workflow == "memsearcher" else 0
    needed = template + agent.question_tokens + memory + agent.observation_tokens + 2 * agent.reply_tokens
    if needed > config.sampling.context_tokens:
        raise ValueError(
            f"a turn may need {needed} tokens (templates {template}, question {agent.question_tokens}, memory {memory}, "
            f"observation {agent.observation_tokens}, two replies of {agent.reply_tokens}), but "
            f"sampling.context_tokens is {config.sampling.context_tokens}: raise it or lower one of these"
        )


def check_model(config: RunConfig) -> None:
    """Raises ValueError if the folder in model.path holds another model than the config describes."""
    if config.model.path:
        weights.check_same_model(config.model, source.read_model_config(config.model.path))


def prepare(config: RunConfig, workspace: Path, asked: Sequence[Problem] = ()) -> Run:
    """Opens everything that a run needs; what is built on the way (index, data) is kept in `workspace`.

    Cheap checks come first. `asked` are problems that take the place of the config's test questions.
    Raises ValueError or OSError in one line that names the setting or file.
    """
    check_model(config)
    tokenizer = open_tokenizer(config.model)
    meshes = open_meshes(config)
    prompts = templates.load(config.agent)
    check_context(config, prompts, tokenizer)
    problems = Problems((), asked) if asked else open_problems(config, workspace)
    data.check_questions((*problems.train, *problems.test), tokenizer.count, config.agent.question_tokens)
    searcher = open_searcher(config.retrieval, workspace / "index", make_world(config.data.world).passages)
    return Run(config, meshes, tokenizer, prompts, searcher, problems)


def open_problems(config: RunConfig, workspace: Path) -> Problems:
    """The config's questions. Raises ValueError if they and the passages come from different worlds."""
    embedded_passages = not (config.retrieval.corpus or config.retrieval.index)
    if config.data.embedded and not embedded_passages:
        raise ValueError("the passages come from a file, the questions do not: set data.train, data.test or --data")
    if embedded_passages and not config.data.embedded:
        raise ValueError("the questions come from a file, the passages do not: set retrieval.corpus or retrieval.index")
    return data.load(config.data, workspace / "data")


def make_driver(run: Run, *, evaluation: bool = False) -> RolloutDriver:
    """A rollout driver with an engine of its own, under the settings of training or of evaluation."""
    agent, sampling = run.config.agent, run.config.sampling
    if evaluation:
        agent = replace(agent, max_turns=run.config.evaluation.max_turns)
        sampling = replace(sampling, temperature=run.config.evaluation.temperature)
    engine = Engine(run.config.model, sampling, prompt_widths(run), run.tokenizer.stop_ids, run.meshes.local)
    return RolloutDriver(engine, run.tokenizer, run.searcher, workflow_maker(agent, run.prompts, run.tokenizer))


def workflow_maker(agent: AgentConfig, prompts: Prompts, tokenizer: ChatTokenizer) -> Callable[[Problem], Workflow]:
    """What starts the configured workflow on a problem."""
    workflow = WORKFLOWS[agent.workflow]
    return lambda problem: workflow(problem.question, config=agent, prompts=prompts, ruler=tokenizer)


def prompt_widths(run: Run) -> PromptWidths:
    """The sampler's buffers: as wide as the templates are, and as the budgets allow."""
    ids = run.tokenizer.prompt(run.prompts.opening(""))
    agent = run.config.agent
    return PromptWidths(len(ids.prefix), agent.question_tokens, len(ids.bridge), agent.memory_tokens, len(ids.suffix))


def sampler_params(run: Run, params):
    """The weights as the sampler wants them: on this host's mesh, in the compute type."""
    return sharding.reshard(
        params, sharding.param_shardings(run.config.model, run.meshes.local), run.config.model.compute_dtype
    )
