"""The endpoint of a rollout with a policy that says what a test wants."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
from openai import OpenAI

from memsearcher_jax.http.client import async_client
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.harness import HarnessDriver
from memsearcher_jax.rl.harness_endpoint import HarnessSettings
from memsearcher_jax.rl.harness_programs import HarnessClient
from memsearcher_jax.rl.harness_sessions import Session
from memsearcher_jax.rl.rollout import Job
from memsearcher_jax.rl.tool_executor import search_backend
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.scheduler import FinishedGeneration
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Passage, Problem
from tests.support import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer

PASSAGES = tuple(Passage(str(n), f'"Title {n}"\nText of number {n}.') for n in range(4))


@contextlib.contextmanager
def scripted_endpoint(
    *replies: str, tokenizer: ChatTokenizer | None = None, **settings
) -> Iterator[tuple[OpenAI, Session]]:
    """A client of OpenAI's for one trajectory, whose requests get these replies in turn, the last one for ever."""
    tokenizer = tokenizer or byte_tokenizer()
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    # An engine that runs no program.
    engine = Engine(NANO, replace(NANO_SAMPLING, context_tokens=1_024), tokenizer.stop_ids, mesh)
    backends = {"": search_backend(TinyIndex(PASSAGES))}
    harness = HarnessSettings("python3", **settings)
    driver = HarnessDriver(engine, tokenizer, lambda problem: None, backends, harness=harness)
    generations = queue.SimpleQueue()
    with driver.endpoint(generations) as service:
        session = Session(Job(0, Problem("q0", "Who is 0?", ("a0",))))
        service._sessions[session.key] = session
        threading.Thread(target=_answer, args=(generations, replies, tokenizer), daemon=True).start()
        with OpenAI(base_url=service.base_url, api_key=session.key, max_retries=0) as client:
            yield client, session
        generations.put(None)


def client_of(openai: OpenAI) -> HarnessClient:
    """What a harness would get."""
    base_url = str(openai.base_url).rstrip("/")
    return HarnessClient(base_url, openai.api_key, async_client(base_url, {}))


def _answer(generations: queue.SimpleQueue, replies: Sequence[str], tokenizer: ChatTokenizer) -> None:
    number = 0
    while (generation := generations.get()) is not None:
        ids = [*tokenizer.encode_untrusted(replies[min(number, len(replies) - 1)]), tokenizer.end_ids[0]]
        number += 1
        ends = [end for count in range(1, len(ids) + 1) if (end := generation.find_stop(ids[:count]))]
        if ends:
            ids = ids[: ends[0]]
        context = generation.context
        context.ids = np.concatenate([context.ids, ids]).astype(np.int32)
        context.logprobs = np.concatenate([context.logprobs, np.full(len(ids), -1.0)])
        context.sampled = np.concatenate([context.sampled, np.ones(len(ids), bool)])
        generation.result.set_result(FinishedGeneration(0, tuple(ids), found_stop=bool(ends)))
