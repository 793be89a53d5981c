"""Runs harnesses, the agents of other frameworks: functions of a file in Python, and programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from memsearcher_jax.agent.harness import open_harness, parse_output, parse_result
from memsearcher_jax.python_files import described
from memsearcher_jax.types import Problem

MODEL = "policy"
"""The name of the model at the endpoint."""
LAST_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class HarnessClient:
    """What a harness in Python gets: the endpoint, as the openai package, LangChain or curl need it."""

    base_url: str
    api_key: str
    http_client: Any = field(repr=False, compare=False)  # httpx2.AsyncClient
    """All coroutines of the rollout share it. What it sends to `base_url` is answered without a connection; a client of
    their own would read all certificates first."""
    model: str = MODEL


class ProcessError(Exception):
    """A program that failed; the message is one line."""


RunHarness = Callable[[Problem, HarnessClient], Any]
"""An asynchronous function that returns (answer, reward)."""


def runner_of(harness: str) -> RunHarness:
    """The harness that the setting names. Raises ValueError or OSError in one line."""
    opened = open_harness(harness)
    if isinstance(opened, list):
        return partial(_run_command, opened)
    function = opened

    async def run(problem: Problem, client: HarnessClient) -> tuple[str | None, float | None]:
        if iscoroutinefunction(function):
            return parse_result(await function(problem, client))
        return parse_result(await _in_thread(function, problem, client))

    return run


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that may block, in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if result.done():  # it timed out
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function(*arguments)
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError(described(error))
        with contextlib.suppress(RuntimeError):  # the rollout has ended
            loop.call_soon_threadsafe(finish, value, failure)

    threading.Thread(target=work, daemon=True).start()
    return await result


async def _run_command(
    words: Sequence[str], problem: Problem, client: HarnessClient
) -> tuple[str | None, float | None]:
    """Runs a program, which gets the problem as JSON on its standard input, and prints its answer."""
    environment = os.environ | {
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "OPENAI_MODEL": client.model,
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )
    content = json.dumps(asdict(problem), default=str).encode()
    try:
        output, errors = await process.communicate(content)
    finally:
        if process.returncode is None:  # it is stopped with all programs that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        lines = [line for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]
        reason = lines[-1].strip()[:LAST_ERROR_CHARACTERS] if lines else "it printed no error"
        raise ProcessError(f"the harness ended with status {process.returncode}: {reason}")
    return parse_output(output.decode("utf-8", "replace"))
