"""Mem-alpha's parts of a run: workflows that read streams, the buffers of their contexts, and the exam afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from memsearcher_jax.agent.memalpha import memalpha
from memsearcher_jax.agent.memalpha_memory import Store
from memsearcher_jax.agent.memalpha_prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha_reward import needs_judge
from memsearcher_jax.agent.types import Problem, Prompt, Stream, Workflow
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data import problems as data
from memsearcher_jax.rl import speakers
from memsearcher_jax.rl.config import SpeakerConfig
from memsearcher_jax.rl.exam import Exam
from memsearcher_jax.rl.speakers import SamplerSpeaker, Speaker
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.sampling.buffer import PromptWidths
from memsearcher_jax.sampling.pool import make_sampler


def workflow_maker(
    config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer
) -> Callable[[Problem], Workflow]:
    """What starts the workflow on a problem that is a stream."""
    return lambda problem: memalpha(
        Stream.of(problem), agent=config.agent, config=config.memalpha, prompts=prompts, ruler=tokenizer
    )


def chunk_widths(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> PromptWidths:
    """The buffers of the contexts that read a chunk: the memory stands in front of it."""
    parts = tokenizer.prompt(prompts.chunk("", ""))
    agent = config.agent
    return PromptWidths(
        len(parts.prefix), agent.memory_tokens, len(parts.bridge), config.memalpha.chunk_tokens, len(parts.suffix)
    )


def check_contexts(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError unless the longest contexts, of chunks and of questions, fit the sampler and the model."""
    widths, agent, sampling = chunk_widths(config, prompts, tokenizer), config.agent, config.sampling
    template = widths.prefix + widths.bridge + widths.suffix
    needed = sum(widths.parts) + agent.reply_tokens
    if needed > sampling.context_tokens:
        raise ValueError(
            f"a chunk's context may need {needed} tokens (templates {template}, agent.memory_tokens "
            f"{agent.memory_tokens}, memalpha.chunk_tokens {config.memalpha.chunk_tokens}, agent.reply_tokens "
            f"{agent.reply_tokens}), but sampling.context_tokens is {sampling.context_tokens}: raise it or lower one"
        )
    answer = answer_context(config, prompts, tokenizer)
    if "start" in (config.answerer.who, config.judge.who) and answer > config.model.max_positions:
        raise ValueError(
            f"a context that answers or judges may need {answer} tokens (memalpha.answer_memory_tokens "
            f"{config.memalpha.answer_memory_tokens}, memalpha.answer_tokens {config.memalpha.answer_tokens}, a "
            f"question and its template), but model.max_positions is {config.model.max_positions}: lower one of them"
        )


def check_streams(problems: Sequence[Problem], config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError for a problem that is no stream or over a budget, and for answers that nobody could judge."""
    data.check_streams(problems, tokenizer.count, config.memalpha.chunk_tokens, config.agent.question_tokens)
    sources = {problem.metadata["source"] for problem in problems}
    judged = sorted(source for source in sources if needs_judge(source, evaluation=True))
    if judged and config.judge.who == "nobody":
        raise ValueError(f"answers of {', '.join(judged)} are scored by a judge, and judge.who is nobody: name one")


def open_exam(
    config: RunConfig,
    prompts: MemalphaPrompts,
    tokenizer: ChatTokenizer,
    mesh: Mesh,
    frozen: Callable[[], Any],
    *,
    evaluation: bool = False,
) -> Exam:
    """Whoever answers and judges, ready. `frozen` gives the start's weights as a sampler on `mesh` wants them.

    It is called only if somebody speaks with them, and once. Raises ValueError if an endpoint's settings are not
    enough to ask it.
    """
    settings = config.memalpha
    sampler = None
    if "start" in (config.answerer.who, config.judge.who):
        sampler = _sampler_speaker(config, prompts, tokenizer, mesh, frozen())

    def speaker(who: SpeakerConfig, section: str) -> Speaker | None:
        if who.who == "nobody":
            return None
        if who.who == "start":
            return speakers.remembering(sampler, who)
        tokens, temperature = settings.answer_tokens, settings.answer_temperature
        endpoint = speakers.open_endpoint(who, section=section, max_tokens=tokens, temperature=temperature)
        return speakers.remembering(endpoint, who)

    answerer, judge = speaker(config.answerer, "answerer"), speaker(config.judge, "judge")
    return Exam(settings, prompts, tokenizer, answerer, judge, evaluation)


def _sampler_speaker(
    config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer, mesh: Mesh, params: Any
) -> SamplerSpeaker:
    """The frozen weights on an engine of their own: its contexts are longer than the policy's, and it may be greedy."""
    sampling = replace(
        config.sampling,
        context_tokens=answer_context(config, prompts, tokenizer),
        temperature=config.memalpha.answer_temperature,
    )
    widths = _answer_widths(config, prompts, tokenizer)
    engine = make_sampler(config.model, sampling, widths, tokenizer.stop_ids, mesh)
    return SamplerSpeaker(engine, tokenizer, params, config.memalpha.answer_tokens)


def answer_context(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> int:
    """Tokens of the longest context in which a question is answered, or something judged."""
    return max(sum(one.parts) for one in _kinds(config, prompts, tokenizer)) + config.memalpha.answer_tokens + 1


def _answer_widths(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> PromptWidths:
    """Buffers that hold every kind of prompt."""
    return PromptWidths(*map(max, zip(*(one.parts for one in _kinds(config, prompts, tokenizer)), strict=True)))


def _kinds(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> list[PromptWidths]:
    """What each kind of prompt needs: questions, and if there is a judge, contents and answers to judge."""
    settings, agent = config.memalpha, config.agent

    def widths(prompt: Prompt, question: int, memory: int) -> PromptWidths:
        parts = tokenizer.prompt(prompt)
        return PromptWidths(len(parts.prefix), question, len(parts.bridge), memory, len(parts.suffix))

    # What a source says first is in front of its questions, with two line ends between them.
    said_first = max((tokenizer.count(text) + 2 for text in prompts.prefixes.values()), default=0)
    kinds = [widths(prompts.answer("", ""), settings.answer_memory_tokens, said_first + agent.question_tokens)]
    if config.judge.who == "start":
        longest = max(tokenizer.count(store.value) for store in Store)
        # A content that escapes of JSON make longer than its reply does not fit and fails, which is counted.
        kinds.append(widths(prompts.judge(Store.CORE, ""), longest, agent.reply_tokens))
        case = tokenizer.count(prompts.grade("", "", "").memory)
        kinds.append(widths(prompts.grade("", "", ""), 0, case + agent.question_tokens + 2 * settings.answer_tokens))
    return kinds
