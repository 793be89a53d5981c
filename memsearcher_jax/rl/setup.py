"""From a config to the parts of a run, with everything checked that can be checked before long work starts."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.tool_functions import Tool
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.data import problems as data
from memsearcher_jax.data.problems import ProblemSplits
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.encoders import text_encoder
from memsearcher_jax.hosts.meshes import Meshes, make_meshes
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.rl.completers import uses_initial_policy
from memsearcher_jax.rl.probe import probe
from memsearcher_jax.rl.rewards import takes_context_rewards
from memsearcher_jax.rl.rollout import Params, RolloutDriver
from memsearcher_jax.rl.tool_executor import Backend, search_backend, tool_backends
from memsearcher_jax.rl.tool_state import lifecycle_tools, with_own_tools
from memsearcher_jax.rl.toolbox import open_tools
from memsearcher_jax.runs import hub, load_weights
from memsearcher_jax.runs.run_dir import DATA, INDEX, PACKAGED_TOKENIZER, tokenizer_folder
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TeacherConfig, learning_rate_plan
from memsearcher_jax.training.trainer import check_offload
from memsearcher_jax.types import Problem, Workflow


@dataclass(frozen=True)
class Run:
    """The checked parts of a run. Nothing large is in device memory yet."""

    config: RunConfig
    agent: Agent
    meshes: Meshes
    tokenizer: ChatTokenizer
    searcher: Searcher | None  # None where the workflow never searches
    problems: ProblemSplits
    tools: tuple[Tool, ...] = ()  # of the run's own


def prepare(
    config: RunConfig,
    workspace: Path,
    *,
    training: bool = True,
    questions: Sequence[Problem] = (),
    index: Path | None = None,
    max_outage: float = 0.0,
    weights: bool = True,
) -> Run:
    """Opens everything that a run needs; data and index that have to be built are kept in `workspace`.

    `training`: problems to train on are required, else problems to test. `questions` replace
    the config's test questions; `index` is an index that exists already, if it is not in `workspace`.
    `max_outage`: seconds to wait for a search service that is down. `weights`: whether those in model.path are read.
    Repositories of the Hub are downloaded. Raises ValueError or OSError in one line that names the setting or file.
    """
    if not weights:
        config = replace(config, model=replace(config.model, path="", adapter=""))
    if not training:
        config = replace(config, teacher=TeacherConfig())
    config = hub.local(config.resolved())
    if config.model.path:
        load_weights.check_weights(config.model.path, config.model)
    tokenizer = open_tokenizer(config.model)
    if config.teacher.path:
        check_teacher(config, tokenizer)
    meshes = make_meshes(config, jax.devices(), jax.local_devices())
    _check_kv_cache(config, meshes.local.shape["data"])
    if training:
        update.check_param_dtype(config.model)
        update.fit_to_mesh(config.training, meshes.train)
        check_offload(config.training, meshes.train)
        prompts = config.rl.prompts_per_step
        hosts = jax.process_count()
        if prompts < hosts:
            raise ValueError(f"rl.prompts_per_step {prompts} leaves some of the {hosts} hosts without one: raise it")
    agent = agent_of(config)
    tools = open_tools(config.agent, workspace)
    if config.rl.carry_over and any(tool.owner for tool in tools):
        raise ValueError("rl.carry_over runs workflows again, and tools with a state for each trajectory cannot: set 0")
    agent = replace(agent, tools=tuple(tool.schema for tool in tools))
    if training and agent.untrainable:
        raise ValueError(f"{agent.untrainable}: evaluate with it, or train without it")
    check_contexts(config, agent, tokenizer)
    problems = ProblemSplits((), questions) if questions else open_problems(config, workspace / DATA, training=training)
    everything = itertools.chain(problems.train, problems.test)
    agent.check_problems(everything, tokenizer.count, has_judge=config.judge.backend != "none")
    if (config.has_own_agent or config.reward.function) and not config.agent.harness:
        problem = next(itertools.chain(problems.train, problems.test))
        probe(agent, tokenizer, problem, takes_context_rewards=takes_context_rewards(config.rl))
    if training:
        config = with_steps(config, len(problems.train))
    searcher = open_search(config, index or workspace / INDEX, max_outage) if needs_search(config, agent) else None
    return Run(config, agent, meshes, tokenizer, searcher, problems, tools)


def needs_search(config: RunConfig, agent: Agent) -> bool:
    """Whether the run opens an index: for an agent that searches, and for a harness where there is one to search."""
    has_index = config.data.is_synthetic or not has_synthetic_passages(config)
    return agent.searches or (bool(config.agent.harness) and has_index)


def open_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """The tokenizer that the config names, or the one in the weights' folder, or the packaged small one."""
    folder = tokenizer_folder(model.tokenizer or model.path) if model.tokenizer or model.path else PACKAGED_TOKENIZER
    tokenizer = ChatTokenizer.load(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens and model.vocab_size is {model.vocab_size}: "
            "set model.tokenizer to the one that this model was made with"
        )
    return tokenizer


def check_teacher(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError or OSError unless the teacher's weights are complete and its tokens are the policy's."""
    path = config.teacher.path
    load_weights.check_weights(path, load_weights.teacher_model(config))
    other = ChatTokenizer.load(tokenizer_folder(path))
    for id in range(max(tokenizer.vocab_size, other.vocab_size)):
        ours = tokenizer.id_to_token(id)
        theirs = other.id_to_token(id)
        if ours != theirs:
            raise ValueError(
                f"teacher.path {path} has another vocabulary: its token {id} is {theirs!r}, and the policy's {ours!r}: "
                "choose a teacher of the same family"
            )


def _check_kv_cache(config: RunConfig, replicas: int) -> None:
    """Raises ValueError if the KV cache alone exceeds a local device, or is smaller than one context."""
    model = config.model
    sampling = config.sampling
    devices = jax.local_devices()
    tokens = sampling.pages_per_replica(replicas) * sampling.page_tokens
    heads = model.kv_heads // sampling.tensor
    cache_bytes = model.layers * tokens * heads * sampling.kv_bytes(model.head_size, model.compute_itemsize)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if devices[0].platform == "cpu":  # which share the host's memory
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    if cache_bytes > limit:
        raise ValueError(
            f"the sampler's cache needs {cache_bytes / 1e9:,.1f} GB on each device, which has {limit / 1e9:,.1f} GB: "
            "lower sampling.slots or sampling.context_tokens, or set sampling.kv_tokens"
        )


def check_contexts(config: RunConfig, agent: Agent, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError or OSError if the agent's template set is incomplete or its contexts do not fit."""
    agent.check_context(config.sampling.context_tokens, tokenizer)
    needed = agent.completer_tokens(tokenizer, judge=config.judge.backend == "initial_policy")
    if uses_initial_policy(config) and needed > config.model.max_positions:
        raise ValueError(
            f"a context that answers or judges may need {needed} tokens (memalpha.answer_memory_tokens "
            f"{config.memalpha.answer_memory_tokens}, memalpha.answer_tokens {config.memalpha.answer_tokens}, a "
            f"question and its template), but model.max_positions is {config.model.max_positions}: lower one of them"
        )


def with_steps(config: RunConfig, problems: int) -> RunConfig:
    """The config with the `rl.steps` that `rl.epochs` make of this many problems, as the original counts them.

    Raises ValueError if there are none, or if the learning rate is 0 before their end.
    """
    rl = config.rl
    if rl.epochs and problems < rl.prompts_per_step:
        raise ValueError(
            f"rl.epochs {rl.epochs}: {problems} training problems do not fill a step of rl.prompts_per_step "
            f"{rl.prompts_per_step}: set rl.steps instead, or lower rl.prompts_per_step"
        )
    steps = rl.epochs * (problems // rl.prompts_per_step) if rl.epochs else rl.steps
    learning_rate_plan(config.training, steps)
    return replace(config, rl=replace(rl, steps=steps))


def open_problems(config: RunConfig, folder: Path, *, training: bool) -> ProblemSplits:
    """The config's problems, stored in `folder`. Where they are evaluated, the test problems are only those that count.

    Raises ValueError if questions and passages do not belong together, or if required ones are missing.
    """
    if agent_of(config).searches and has_synthetic_passages(config) != config.data.is_synthetic:
        if config.data.is_synthetic:
            raise ValueError("the passages come from a file, the questions do not: set data.train, data.test or --data")
        raise ValueError("the questions come from a file, the passages do not: set retrieval.corpus, index or url")
    problems = data.load(config.data, folder)
    if training and not problems.train:
        raise ValueError("there are no questions to train on: set data.train to files of questions")
    if training and not config.rl.evaluate_every:
        return problems
    return replace(problems, test=select_test_problems(problems.test, config.evaluation.max_questions))


def select_test_problems(test: Sequence[Problem], max_questions: int) -> list[Problem]:
    """The problems to evaluate: of each benchmark the first `max_questions`, or all for 0.

    Raises ValueError if there are none, or if two have one id, which identifies their trajectories.
    """
    counts = Counter[str]()
    problems = dict[str, Problem]()
    for problem in test:
        source = str(problem.metadata.get("source", ""))
        counts[source] += 1
        if max_questions and counts[source] > max_questions:
            continue
        if problem.id in problems:
            raise ValueError(f'two test questions have the id "{problem.id}": evaluate the files of data.test apart')
        problems[problem.id] = problem
    if not problems:
        raise ValueError("there are no test questions: set data.test to files of questions")
    return list(problems.values())


def open_search(config: RunConfig, index: Path, max_outage: float = 0.0) -> Searcher:
    """What the config searches; an index that has to be built is kept at `index`."""
    passages = make_encyclopedia(config.data.encyclopedia).passages if has_synthetic_passages(config) else ()
    timeout = config.rl.search_timeout
    return open_searcher(config.retrieval, index, passages, text_encoder.load, max_outage, timeout)


def has_synthetic_passages(config: RunConfig) -> bool:
    """Whether the run searches the synthetic encyclopedia."""
    return not (config.retrieval.url or config.retrieval.corpus or config.retrieval.index)


def make_driver(
    run: Run, *, evaluation: bool = False, check: Callable[[], None] = lambda: None, engine: Engine | None = None
) -> RolloutDriver:
    """A rollout driver under the settings of training or of evaluation, on `engine` or an engine of its own.

    `check` is called after every step of the engine and interrupts a rollout by raising.
    """
    config = run.config
    params = run.config.sampling.params
    agent = run.agent
    if evaluation:
        params = replace(params, temperature=config.evaluation.temperature)
        agent = evaluation_agent(run)
    engine = engine or Engine(config.model, config.sampling, run.tokenizer.stop_ids, run.meshes.local)
    start = make_start(run, agent)
    if not config.agent.harness:
        records_memory = config.training.needs_kinds and not evaluation
        return RolloutDriver(engine, run.tokenizer, start, make_backends(run), check, params, records_memory)
    from memsearcher_jax.rl.harness import HarnessDriver  # which imports uvicorn
    from memsearcher_jax.rl.harness_endpoint import HarnessSettings

    settings = HarnessSettings(
        config.agent.harness,
        timeout=config.agent.harness_timeout,
        max_tokens=config.agent.completion_tokens,
        fixed_sampling=not evaluation,
    )
    return HarnessDriver(engine, run.tokenizer, start, make_backends(run), check, params, harness=settings)


def make_start(run: Run, agent: Agent) -> Callable[[Problem], Workflow]:
    """What starts the workflow of a problem, with the tools that each trajectory has of its own."""
    start = partial(agent.start, token_counter=run.tokenizer)
    return with_own_tools(start, run.tools, run.tokenizer, run.config.agent.question_tokens)


def make_backends(run: Run) -> dict[str, Backend]:
    """What answers searches, under "", and calls, under the tool's name."""
    agent = run.config.agent
    outage = run.config.rl.max_search_outage
    # An index in this process uses all cores for a batch, a service answers several batches at a time.
    concurrency = run.config.retrieval.max_concurrency if run.config.retrieval.url else 1
    clip = partial(run.tokenizer.clip, limit=agent.observation_tokens)
    tools = tool_backends([*run.tools, *lifecycle_tools(run.tools)], agent.tool_timeout, outage, clip)
    return {"": search_backend(run.searcher, run.config.rl.search_timeout, outage, concurrency), **tools}


def evaluation_agent(run: Run) -> Agent:
    """The agent with the limits of evaluation."""
    return replace(run.agent, config=replace(run.config.agent, max_turns=run.config.evaluation.max_turns))


def publish(run: Run, params: Params, *, owned: bool = False) -> Params:
    """The weights on this host's sampling mesh, in the type of `sampling.weights`. Every host must call it.

    `owned`: nobody else uses `params`, see `sharding.publish`.
    """
    model = run.config.model
    dtype = run.config.sampling.weights_dtype(model.compute_dtype)
    return sharding.publish(params, model, run.meshes.local, dtype, owned=owned)
