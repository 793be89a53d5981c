"""Any schedule of failures: limits hold, every request gets one response, and no request pays for another."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.agent.tool_functions import ServerDied, Tool
from memsearcher_jax.rl import tool_executor
from memsearcher_jax.rl.tool_executor import Backend, ToolExecutor, search_backend, tool_backends
from memsearcher_jax.types import Call, Query, Search, ToolResult

TIMEOUT = 0.15
Kind = Literal["good", "wrong", "lost", "late", "killer"]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(tool_executor, "OUTAGE_PAUSE", 0.0)


@dataclass
class Service:
    """Answers calls of a backend as their kinds say, and fails the calls of an outage."""

    kinds: dict[str, Kind]
    outage: range  # numbers of the calls that find it down
    calls: int = 0
    active: int = 0  # that answer in time
    most_active: int = 0
    runs: Counter[str] = field(default_factory=Counter)  # of each request, without those that never reached it
    batches: list[list[str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, requests):
        names = [request.tool_name for request in requests]
        with self.lock:
            number = self.calls
            self.calls += 1
            self.batches.append(names)
            if number in self.outage:
                raise ConnectionError("down")
            self.runs.update(names)
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        kinds = [self.kinds[name] for name in names]
        try:
            time.sleep(0.001)
            if "late" in kinds:
                with self.lock:
                    self.active -= 1  # it is abandoned
                time.sleep(2 * TIMEOUT)
                with self.lock:
                    self.active += 1
            for kind, error in (("wrong", ValueError), ("lost", ConnectionError)):
                if kind in kinds:
                    raise error(kind)
            return [f"result of {name}" for name in names]
        finally:
            with self.lock:
                self.active -= 1


@dataclass(frozen=True)
class Named:
    """A request of the test, which the executor takes for a search."""

    tool_name: str
    queries: tuple = ((),)


def run(executor, requests):
    responses = {}
    for request in requests:
        executor.submit(request.tool_name, request)
    deadline = time.monotonic() + 20
    executor.start()
    while executor.pending:
        assert time.monotonic() < deadline, "a request has no response"
        executor.wait(1.0)
        for caller, response in executor.completed():
            assert caller not in responses, "one response for each request"
            responses[caller] = response
        executor.start()
    return responses


KINDS = st.lists(st.sampled_from(["good", "good", "good", "wrong", "lost", "late"]), min_size=1, max_size=6)


@settings(max_examples=15, deadline=None)
@given(
    kinds=KINDS,
    outage=st.builds(range, st.integers(0, 3), st.integers(0, 6)),
    max_concurrency=st.integers(1, 3),
    batches=st.booleans(),
    repeats=st.booleans(),
)
def test_any_schedule_of_failures(kinds, outage, max_concurrency, batches, repeats):
    service = Service({str(number): kind for number, kind in enumerate(kinds)}, outage)
    backend = Backend(
        service.answer, TIMEOUT, max_outage=1.0, max_concurrency=max_concurrency, batches=batches, repeats=repeats
    )
    requests = [Named(str(number)) for number in range(len(kinds))]
    responses = run(ToolExecutor({"": backend}), requests)
    assert responses.keys() == service.kinds.keys()
    assert service.most_active <= max_concurrency
    shared = {name for names in service.batches if len(names) > 1 for name in names}
    lost = {"lost", "late"} & set(kinds) or outage
    errors = {"wrong": "ValueError: wrong", "lost": "ConnectionError: lost", "late": "TimeoutError: no answer"}
    for name, kind in service.kinds.items():
        if name in shared and not repeats and not lost:
            assert service.runs[name] == 1, "no call runs twice"
        elif kind == "good" and (repeats or name not in shared):
            assert responses[name] == f"result of {name}", "no request pays for another"
        elif kind != "good" and repeats:
            assert responses[name][0].error.startswith(errors[kind])


def test_a_failed_batch_is_repeated_within_the_limit():
    service = Service({str(number): "good" for number in range(12)} | {"12": "wrong"}, range(0))
    backend = Backend(service.answer, 5.0, max_concurrency=2)
    responses = run(ToolExecutor({"": backend}), [Named(str(number)) for number in range(13)])
    assert len(service.batches[0]) == 13 and all(len(names) == 1 for names in service.batches[1:])
    assert service.most_active == 2
    assert [responses[str(number)] for number in range(12)] == [f"result of {number}" for number in range(12)]


def test_a_service_that_answers_nothing_is_given_up_for_all_at_once():
    """Not one time-out after the other, which would take an hour for the searches of a large batch."""

    class Hanging:
        def search(self, queries, top_n):
            time.sleep(1.0)

    backend = search_backend(Hanging(), timeout=TIMEOUT, max_outage=0.2)
    executor = ToolExecutor({"": backend})
    began = time.monotonic()
    for caller in range(60):
        executor.submit(caller, Search((Query("q", 1),)))
    executor.start()
    errors = {}
    while executor.pending:
        executor.wait(1.0)
        errors |= {caller: result.error for caller, (result,) in executor.completed()}
        executor.start()
    assert set(errors.values()) == {f"TimeoutError: no answer in {TIMEOUT:g} s"} and len(errors) == 60
    assert time.monotonic() - began < 3.0


class DyingServer:
    """A server of two tools that the argument "die" kills: all calls under way are lost."""

    def __init__(self):
        self.starts = 1
        self.alone = []  # what ran when it died
        self.running = []
        self.lock = threading.Lock()

    def tool(self, name):
        return Tool({"name": name}, self.answer, server="mcp")

    def answer(self, calls, timeout):
        (arguments,) = calls
        generation = self.starts
        with self.lock:
            self.running.append(arguments["text"])
        try:
            for _ in range(10):
                time.sleep(0.002)
                if self.starts > generation:
                    raise ServerDied("the connection was lost")
            if arguments["text"] == "die":
                with self.lock:
                    self.alone.append(sorted(self.running))
                    self.starts += 1
                raise ServerDied("the connection was lost")
            return [arguments["text"].upper()]
        finally:
            with self.lock:
                self.running.remove(arguments["text"])


def test_the_call_that_kills_its_server_is_found_and_takes_no_other_with_it():
    server = DyingServer()
    backends = tool_backends([server.tool("say"), server.tool("shout")], timeout=5.0, max_outage=600.0)
    executor = ToolExecutor({"": search_backend(None), **backends})
    began = time.monotonic()
    texts = ["a", "b", "die", "c", "d", "e"]
    for number, text in enumerate(texts):
        executor.submit(number, Call(("say", "shout")[number % 2], {"text": text}))
    results: dict[int, ToolResult] = {}
    executor.start()
    while executor.pending:
        executor.wait(1.0)
        results |= dict(executor.completed())
        executor.start()
    assert [results[number].text for number in range(6)] == ["A", "B", "", "C", "D", "E"]
    assert results[2].lost and "the connection was lost" in results[2].error
    assert len(server.alone) == 2 and server.alone[1] == ["die"], "once with others, once alone"
    assert time.monotonic() - began < 5.0, "it is not repeated for max_outage"


def test_a_batch_that_raises_runs_no_call_twice():
    seen = []

    def answer(calls, timeout):
        seen.extend(call["name"] for call in calls)
        if any(call["name"] == "bad" for call in calls):
            raise KeyError("bad")
        return [call["name"] for call in calls]

    executor = ToolExecutor({"": search_backend(None), **tool_backends([Tool({"name": "f"}, answer, batches=True)])})
    for name in ("good", "bad", "other"):
        executor.submit(name, Call("f", {"name": name}))
    executor.start()
    results = {}
    while executor.pending:
        executor.wait(1.0)
        results |= dict(executor.completed())
        executor.start()
    assert sorted(seen) == ["bad", "good", "other"], "each once"
    assert all(result.lost and "KeyError: 'bad'" in result.error for result in results.values())


def test_a_result_that_is_an_error_is_of_its_call_alone():
    def answer(calls, timeout):
        return [KeyError("bad") if call["name"] == "bad" else call["name"] for call in calls]

    executor = ToolExecutor({"": search_backend(None), **tool_backends([Tool({"name": "f"}, answer, batches=True)])})
    for name in ("good", "bad"):
        executor.submit(name, Call("f", {"name": name}))
    executor.start()
    executor.wait(5.0)
    results = dict(executor.completed())
    assert results["good"].text == "good" and results["bad"].error == "KeyError: 'bad'" and not results["bad"].lost
