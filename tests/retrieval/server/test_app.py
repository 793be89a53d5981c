"""The service in this process behind a real server on loopback: valid and invalid requests."""

import asyncio
import concurrent.futures
import http.client
import json
import socket
import sys
import threading
import time

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.http.server import limited_protocol
from memsearcher_jax.retrieval.config import MAX_QUERY_CHARS, ServiceLimits
from memsearcher_jax.retrieval.server.app import MicroBatcher, Overloaded, make_app
from memsearcher_jax.types import Passage
from tests.http_server import until

LIMITS = ServiceLimits(
    max_body_bytes=5_000,
    max_waiting_queries=40,
    read_timeout=1.0,
    max_connections=64,
    max_buffered_bytes=12_000,
)


class Echo:
    """A search whose first passage repeats the query. It records its batches and can be blocked."""

    def __init__(self):
        self.batches, self.unblocked, self.last = [], threading.Event(), ()
        self.unblocked.set()

    @property
    def is_healthy(self):
        return "hung" not in self.last

    def close(self):
        pass

    def __call__(self, queries, top_n):
        self.batches.append((list(queries), top_n))
        self.last = queries
        self.unblocked.wait(60)
        if "poison" in queries:
            raise RuntimeError("a bug")
        if "hung" in queries:
            raise TimeoutError("the search did not end within 5 s")
        first = float("nan") if "nan" in queries else 1.0
        return [[Passage(str(n), f'"{query}"\ntext', first / (n + 1)) for n in range(top_n)] for query in queries]


@pytest.fixture(scope="module")
def echo():
    return Echo()


@pytest.fixture(scope="module")
def app(echo):
    return make_app(echo, LIMITS, {"passages": 7}, echo)


@pytest.fixture(scope="module")
def port(app):
    """A running server."""
    protocol = limited_protocol(64, LIMITS.read_timeout)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(5)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def reset_echo(echo):
    echo.batches.clear()
    yield
    echo.unblocked.set()


def call(port, path, body, method="POST"):
    """Return status and JSON of the response; `body` is sent unchanged if it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


DOCUMENTS = [{"id": "0", "contents": '"Who?"\ntext'}, {"id": "1", "contents": '"Who?"\ntext'}]


SCORED = [{"document": document, "score": score} for document, score in zip(DOCUMENTS, (1.0, 0.5), strict=True)]
TWO = [[{"id": "0", "contents": f'"{query}"\ntext'}] for query in ("Who?", "Why?")]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/search", {"query": "Who?", "top_n": "2"}, DOCUMENTS),
        ("/search", {"query": "Who?", "top_n": 2, "return_score": True, "extra": [1]}, [DOCUMENTS, [1.0, 0.5]]),
        ("/batch_search", {"query": ["Who?", "Why?"], "top_n": 1}, TWO),
        ("/batch_search", {"query": ["Who?", "Why?"], "top_n": 1, "return_score": True}, [TWO, [[1.0], [1.0]]]),
        ("/retrieve", {"queries": ["Who?"], "topk": 2}, {"result": [DOCUMENTS]}),
        ("/retrieve", {"queries": ["Who?"], "topk": 2, "return_scores": True}, {"result": [SCORED]}),
    ],
)
def test_the_endpoints_of_memsearcher_and_search_r1(port, path, body, answer):
    assert call(port, path, body) == (200, answer)


def test_the_default_numbers_of_passages_are_those_of_the_original_servers(port):
    assert len(call(port, "/search", {"query": "東京 人口"})[1]) == 10
    for topk in (None, 0):
        (hits,) = call(port, "/retrieve", {"queries": ["a"], "topk": topk})[1]["result"]
        assert len(hits) == 3


def test_recorded_requests_of_memsearcher(port, shared):
    """Requests of its agent to its server, checked by the contents that its client reads."""
    file = shared / "reference" / "memsearcher" / "rollout_trace.jsonl"
    traces = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    recorded = [
        (request["json"], response)
        for trace in traces
        for request, response in zip(trace["retriever_requests"], trace["retriever_outputs"], strict=False)
    ]
    assert len(recorded) > 20
    for body, response in recorded:
        status, documents = call(port, "/search", body)
        if response.get("status") == 422:
            assert status == 422
        else:
            assert status == 200
            contents = [document["contents"] for document in documents]
            assert contents == [f'"{body["query"]}"\ntext'] * body.get("top_n", 10)


def test_search_r1_sends_what_its_policy_writes(port, echo):
    """No query, empty, long and invalid ones; the searcher returns nothing for a blank query."""
    assert call(port, "/retrieve", {"queries": [], "topk": 2}) == (200, {"result": []})
    assert echo.batches == []
    queries = ["Who?", "", "x" * (MAX_QUERY_CHARS + 100), "half \ud800 pair"]
    status, answer = call(port, "/retrieve", {"queries": queries, "topk": 2})
    assert (status, len(answer["result"])) == (200, 4)
    assert echo.batches == [(["Who?", "", "x" * MAX_QUERY_CHARS, "half ? pair"], 2)]


def test_a_hung_search_is_in_the_health(port):
    for query, state in (("hung", "degraded"), ("Who?", "healthy")):
        call(port, "/search", {"query": query})
        status, answer = call(port, "/health", b"", "GET")
        assert (status, answer["status"], answer["passages"]) == (200, state, 7)
        assert answer["limits"]["max_waiting_queries"] == 40
        probe = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        probe.request("HEAD", "/health")
        assert (probe.getresponse().status, probe.close()) == (200, None)


def nested(values):
    names = st.sampled_from(("query", "queries", "top_n", "topk", "return_score", "return_scores"))
    return st.lists(values, max_size=4) | st.dictionaries(names, values, max_size=6)


# Python 3.13 parses deeper than its stack of calls.
TOO_DEEP = (400, "error parsing the body") if sys.version_info < (3, 13) else (422, "JSON decode error")
BAD = [
    ("/search", {"query": ""}, 400, "the query is empty"),
    ("/search", {"query": "x" * 1_000_000}, 413, "the body is larger than 5000 bytes"),
    ("/search", {"query": "Who?", "top_n": 0}, 422, "top_n: Input should be greater than or equal to 1"),
    ("/search", {"query": "Who?", "top_n": 101}, 400, "101 passages per query: at most 100 are allowed"),
    ("/search", {"query": "Who?", "top_n": "two"}, 422, "top_n: Input should be a valid integer"),
    ("/search", b'{"query": "Who?", "top_n": ' + b"9" * 4_600 + b"}", 400, "error parsing the body"),
    ("/search", [], 422, "body: a JSON object is needed, with Content-Type: application/json"),
    ("/search", b"{", 422, "body: JSON decode error"),
    ("/search", b'{"query": "\xff"}', 400, "error parsing the body"),
    ("/search", b"[" * 4_000, *TOO_DEEP),
    ("/batch_search", {"query": []}, 400, "there is no query"),
    ("/batch_search", {"query": ["Who?", ""]}, 400, "query 1 is empty"),
    ("/batch_search", {"query": ["Who?", 5]}, 422, "query.1: Input should be a valid string"),
    ("/batch_search", {"query": ["x"] * 41}, 400, "41 queries in one request: at most 40 are allowed"),
    ("/retrieve", {"queries": ["Who?"], "topk": -1}, 422, "topk: "),
    ("/search", {"query": "nan"}, 500, "search failed (ValueError); see the server's log"),
]


@pytest.mark.parametrize(("path", "body", "status", "reason"), BAD, ids=range(len(BAD)))
def test_invalid_requests_get_a_reason(port, echo, path, body, status, reason):
    got, answer = call(port, path, body)
    assert got == status
    assert set(answer) == {"detail"} and reason in answer["detail"] and "\n" not in answer["detail"]
    assert echo.batches == [] or status == 500
    assert call(port, "/search", {"query": "Who?", "top_n": 2}) == (200, DOCUMENTS), "the service continues"


@given(
    st.binary(max_size=300) | st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), nested)
)
@settings(max_examples=60, deadline=None)
def test_no_body_causes_a_server_error(port, body):
    for path in ("/search", "/batch_search", "/retrieve"):
        status, answer = call(port, path, body)
        assert status == 200 or (400 <= status < 500 and isinstance(answer["detail"], str))


def send(port, text):
    """A connection on which this text was sent."""
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(text.encode())
    return client


def headers(length, *more):
    size = [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join(["POST /search HTTP/1.1", "Host: x", *size, *more, "", ""])


def reply(client):
    """All that the server sends until it closes the connection."""
    with client:
        return b"".join(iter(lambda: client.recv(65_536), b"")).decode()


@pytest.mark.parametrize(
    "text", ["", "POST /search HTTP/1.1\r\nHost", "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he"]
)
def test_a_request_without_complete_headers_is_closed_in_time(port, text):
    start = time.monotonic()
    answer = reply(send(port, text))
    assert 0.5 < time.monotonic() - start < 5
    assert answer == "" or answer.startswith("HTTP/1.1 200")


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (headers(100) + "{", 408, "the body did not arrive within 1 s"),
        (headers(5_001, "Expect: 100-continue"), 413, "larger than 5000 bytes"),  # before it is sent
        (headers(None, "Transfer-Encoding: chunked") + 6 * f"3e8\r\n{' ' * 1_000}\r\n", 413, "larger than 5000 bytes"),
    ],
)
def test_a_slow_or_large_body_is_rejected_in_time(port, text, status, reason):
    """Chunked encoding has no length: the limit counts received bytes."""
    start = time.monotonic()
    answer = reply(send(port, text))
    assert time.monotonic() - start < 5
    assert answer.startswith(f"HTTP/1.1 {status}") and reason in answer


def test_the_bytes_of_all_bodies_are_limited(port):
    """Two unfinished bodies of 5,000 bytes leave no room for a third of 3,000 within 12,000."""
    unfinished = [send(port, headers(5_000, "Expect: 100-continue")) for _ in range(2)]
    for client in unfinished:
        assert client.recv(65_536).startswith(b"HTTP/1.1 100 "), "the service waits for the body"
    answer = reply(send(port, headers(3_000, "Expect: 100-continue")))
    assert answer.startswith("HTTP/1.1 503") and "too many requests are being received" in answer
    assert call(port, "/search", {"query": "Who?"})[0] == 200
    assert all("408" in reply(client) for client in unfinished)
    assert call(port, "/search", {"query": "x" * 90})[0] == 200


def test_connections_are_limited(port):
    idle = [send(port, "") for _ in range(64)]
    time.sleep(0.2)
    answer = reply(send(port, ""))
    assert answer.startswith("HTTP/1.1 503") and "too many connections; retry later" in answer
    assert all(reply(client) == "" for client in idle)
    assert call(port, "/search", {"query": "Who?"})[0] == 200


@pytest.mark.variant
def test_a_client_that_does_not_read_loses_its_connection():
    """One that reads some of the response in every interval gets all of it, however long that takes."""
    size = 24 << 20  # more than the system buffers

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})

    protocol = limited_protocol(64, read_timeout=0.4)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with send(port, request), send(port, request) as slow:
        received = 0
        while got := slow.recv(1 << 20, socket.MSG_WAITALL):
            received += len(got)
            time.sleep(0.1)
        assert received > size
        until(lambda: not server.server_state.connections)
    server.should_exit = True
    thread.join()


def send_concurrently(port, app, echo, bodies):
    """Send the requests while a first search is blocked, so that all of them wait or are rejected."""
    echo.unblocked.clear()
    with concurrent.futures.ThreadPoolExecutor(1 + len(bodies)) as pool:
        first = pool.submit(call, port, "/search", {"query": "first"})
        until(lambda: echo.batches)
        answers = [pool.submit(call, port, "/batch_search", body) for body in bodies]
        waiting = app.state.batcher._waiting
        until(lambda: len(waiting) + sum(answer.done() for answer in answers) == len(bodies))
        echo.unblocked.set()
        assert first.result()[0] == 200
        return [answer.result() for answer in answers]


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("poison", 500, "search failed (RuntimeError); see the server's log"),
        ("hung", 503, "overloaded: the search did not end within 5 s; retry later"),
    ],
)
def test_a_failing_request_does_not_fail_the_others(port, app, echo, name, status, reason):
    answers = send_concurrently(port, app, echo, [{"query": [query], "top_n": 2} for query in ("a", name, "b")])
    assert [code for code, _ in answers] == [200, status, 200]
    assert answers[1][1] == {"detail": reason}
    assert [answers[row][1][0][0]["contents"] for row in (0, 2)] == ['"a"\ntext', '"b"\ntext']


def test_requests_beyond_the_queue_limit_are_rejected(port, app, echo):
    bodies = [{"query": [str(n)] * 8} for n in range(6)]  # 48 queries, and 40 may wait
    answers = send_concurrently(port, app, echo, bodies)
    assert sorted(status for status, _ in answers) == [200] * 5 + [503]
    (reason,) = (answer["detail"] for status, answer in answers if status == 503)
    assert reason == "overloaded: 40 queries are already waiting; retry later"


def test_a_batch_is_bounded_and_has_one_top_n():
    """Without a server, so that the order of arrival is known."""
    seen = []

    def search(queries, top_n):
        seen.append((queries, top_n))
        return [[] for _ in queries]

    async def run():
        batcher = MicroBatcher(search, ServiceLimits(max_batch_queries=3))
        requests = [(["a"], 1), (["b", "c"], 1), (["d"], 1), (["e"], 2), (["f"] * 5, 2), (["g"], 2)]
        answers = [asyncio.create_task(batcher.search(*request)) for request in requests]
        assert [len(await answer) for answer in answers] == [1, 2, 1, 1, 5, 1]

    asyncio.run(run())
    assert [(len(queries), top_n) for queries, top_n in seen] == [(3, 1), (1, 1), (1, 2), (5, 2), (1, 2)]


def test_requests_that_timed_out_are_not_searched():
    seen, unblocked = [], threading.Event()

    def search(queries, top_n):
        seen.extend(queries)
        unblocked.wait(60)
        return [[] for _ in queries]

    async def run():
        batcher = MicroBatcher(search, ServiceLimits(request_timeout=0.3))
        for query in ("slow", "gone"):
            with pytest.raises(Overloaded, match=r"no result within 0\.3 s"):
                await batcher.search([query], 1)
        unblocked.set()
        assert await batcher.search(["here"], 1) == [[]]

    asyncio.run(run())
    assert seen == ["slow", "here"]
