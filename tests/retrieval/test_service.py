"""The service in this process, by way of a real server on loopback: what clients send, and what they should not."""

import asyncio
import concurrent.futures
import http.client
import json
import threading
import time

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.client import SearchRefused, SearchService
from memsearcher_jax.retrieval.config import ServiceLimits
from memsearcher_jax.retrieval.microbatch import MicroBatcher, Overloaded
from memsearcher_jax.retrieval.service import make_app

LIMITS = ServiceLimits(query_characters=100, queries=8, top_n=20, body_bytes=5_000, waiting_queries=40, seconds=2.0)


class Echo:
    """A search whose first passage repeats the query; it can be held up, and keeps its batches."""

    def __init__(self):
        self.batches, self.go = [], threading.Event()
        self.go.set()

    def __call__(self, queries, top_n):
        self.batches.append((list(queries), top_n))
        self.go.wait(5)
        if "poison" in queries:
            raise RuntimeError("a bug")
        return [[Passage(str(n), f'"{query}"\ntext', 1.0 / (n + 1)) for n in range(top_n)] for query in queries]


@pytest.fixture(scope="module")
def echo():
    return Echo()


@pytest.fixture(scope="module")
def port(echo):
    """A running server."""
    server = uvicorn.Server(uvicorn.Config(make_app(echo, LIMITS, {"passages": 7}), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(5)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def quiet(echo):
    echo.batches.clear()
    yield
    echo.go.set()


def call(port, path, body, method="POST"):
    """Status and JSON of the answer; `body` is sent as it is if it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


DOCUMENTS = [{"id": "0", "contents": '"Who?"\ntext'}, {"id": "1", "contents": '"Who?"\ntext'}]


def test_search_as_memsearcher_asks(port, echo):
    assert call(port, "/search", {"query": "Who?", "top_n": 2}) == (200, DOCUMENTS)
    assert call(port, "/search", {"query": "Who?", "top_n": 2, "return_score": True}) == (200, [DOCUMENTS, [1.0, 0.5]])
    status, documents = call(port, "/search", {"query": "東京 人口", "extra": [1]})
    assert (status, len(documents), documents[0]["contents"]) == (200, 10, '"東京 人口"\ntext')


def test_every_recorded_request_of_memsearcher(port, shared):
    """What its agent posted to its own server, read as its client reads the answer: the documents' contents."""
    file = shared / "reference" / "memsearcher" / "rollout_trace.jsonl"
    traces = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    recorded = [
        (request["json"], reply)
        for trace in traces
        for request, reply in zip(trace["retriever_requests"], trace["retriever_outputs"], strict=False)
    ]
    assert len(recorded) > 20
    for body, reply in recorded:
        status, documents = call(port, "/search", body)
        if reply.get("status") == 422:
            assert status == 422
        else:
            assert status == 200
            contents = [document["contents"] for document in documents]
            assert contents == [f'"{body["query"]}"\ntext'] * body.get("top_n", 10)


def test_batch_search(port):
    body = {"query": ["Who?", "Why?"], "top_n": 1}
    expected = [[{"id": "0", "contents": f'"{query}"\ntext'}] for query in body["query"]]
    assert call(port, "/batch_search", body) == (200, expected)
    assert call(port, "/batch_search", body | {"return_score": True}) == (200, [expected, [[1.0], [1.0]]])


def test_retrieve_as_search_r1_asks(port):
    scored = [{"document": document, "score": score} for document, score in zip(DOCUMENTS, (1.0, 0.5), strict=True)]
    body = {"queries": ["Who?"], "topk": 2, "return_scores": True}
    assert call(port, "/retrieve", body) == (200, {"result": [scored]})
    assert call(port, "/retrieve", body | {"return_scores": False}) == (200, {"result": [DOCUMENTS]})
    status, answer = call(port, "/retrieve", {"queries": ["a", "b"], "topk": None})
    assert (status, [len(hits) for hits in answer["result"]]) == (200, [3, 3])


def test_our_own_client(port):
    found = SearchService(f"http://127.0.0.1:{port}").find(["Who?", "\u202e\x00 control"], 2)
    assert found[0] == [Passage("0", '"Who?"\ntext', 1.0), Passage("1", '"Who?"\ntext', 0.5)]
    assert found[1][0].contents == '"\u202e\x00 control"\ntext'
    SearchService(f"http://127.0.0.1:{port}").check()
    with pytest.raises(SearchRefused, match=r"status 400: .*9 queries in one request: at most 8 are allowed"):
        SearchService(f"http://127.0.0.1:{port}").find([str(n) for n in range(9)], 1)


def test_health(port):
    status, answer = call(port, "/health", b"", "GET")
    assert (status, answer["status"], answer["passages"]) == (200, "healthy", 7)
    assert answer["limits"]["queries"] == 8


def nested(values):
    names = st.sampled_from(("query", "queries", "top_n", "topk", "return_score", "return_scores"))
    return st.lists(values, max_size=4) | st.dictionaries(names, values, max_size=6)


BAD = [
    ("/search", {"query": ""}, 400, "the query is empty"),
    ("/search", {"query": " \n\t"}, 400, "the query is empty"),
    ("/search", {"query": "x" * 101}, 400, "query 0 has 101 characters: at most 100 are allowed"),
    ("/search", {"query": "x" * 1_000_000}, 413, "the body is larger than 5000 bytes"),
    ("/search", {"query": "Who?", "top_n": 0}, 422, "top_n: Input should be greater than or equal to 1"),
    ("/search", {"query": "Who?", "top_n": -5}, 422, "top_n: "),
    ("/search", {"query": "Who?", "top_n": 21}, 400, "21 passages per query: at most 20 are allowed"),
    ("/search", {"query": "Who?", "top_n": 10**30}, 400, "at most 20 are allowed"),
    ("/search", {"query": "Who?", "top_n": "many"}, 422, "top_n: Input should be a valid integer"),
    ("/search", {"query": "Who?", "top_n": 1.5}, 422, "top_n: "),
    ("/search", {"query": "Who?", "top_n": True}, 422, "top_n: Input should be a valid integer"),
    ("/search", {"query": "Who?", "top_n": None}, 422, "top_n: Input should be a valid integer"),
    ("/search", b'{"query": "Who?", "top_n": NaN}', 422, "top_n: "),
    ("/search", b'{"query": "Who?", "top_n": ' + b"9" * 4_600 + b"}", 400, "error parsing the body"),
    ("/search", {"query": 5, "extra": [1]}, 422, "query: Input should be a valid string"),
    ("/search", {"query": ["Who?"]}, 422, "query: Input should be a valid string"),
    ("/search", {}, 422, "query: Field required"),
    ("/search", [], 422, "body: a JSON object is needed, with Content-Type: application/json"),
    ("/search", b"", 422, "body: a JSON object is needed"),
    ("/search", b"{", 422, "body: JSON decode error"),
    ("/search", b"\xff\xfe", 422, "body: JSON decode error"),
    ("/search", b'{"query": "\xff"}', 400, "error parsing the body"),
    ("/search", b"[" * 4_000, 400, "error parsing the body"),
    ("/search", b'{"query": "x\\ud800"}', 400, "query 0 is no text (a lone surrogate at 1)"),
    ("/search", {"query": "Who?", "return_score": "perhaps"}, 422, "return_score: "),
    ("/batch_search", {"query": []}, 400, "there is no query"),
    ("/batch_search", {"query": ["Who?", ""]}, 400, "query 1 is empty"),
    ("/batch_search", {"query": "Who?"}, 422, "query: Input should be a valid list"),
    ("/batch_search", {"query": ["Who?", 5]}, 422, "query.1: Input should be a valid string"),
    ("/batch_search", {"query": ["x"] * 9}, 400, "9 queries in one request: at most 8 are allowed"),
    ("/batch_search", {"query": ["Who?"] * 10_000}, 413, "the body is larger than 5000 bytes"),
    ("/retrieve", {"queries": []}, 400, "there is no query"),
    ("/retrieve", {"query": ["Who?"]}, 422, "queries: Field required"),
    ("/retrieve", {"queries": ["Who?", "y" * 101]}, 400, "query 1 has 101 characters"),
    ("/retrieve", {"queries": ["Who?"], "topk": 0}, 422, "topk: "),
    ("/nowhere", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "reason"), BAD, ids=range(len(BAD)))
def test_bad_input_gets_a_reason(port, echo, path, body, status, reason):
    got, answer = call(port, path, body)
    assert got == status
    assert set(answer) == {"detail"} and reason in answer["detail"] and "\n" not in answer["detail"]
    assert echo.batches == []
    assert call(port, "/search", {"query": "Who?", "top_n": 2}) == (200, DOCUMENTS), "and it goes on"


@given(
    st.binary(max_size=300) | st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), nested)
)
@settings(max_examples=60, deadline=None)
def test_no_body_is_answered_with_a_failure_of_ours(port, body):
    for path in ("/search", "/batch_search", "/retrieve"):
        status, answer = call(port, path, body)
        assert status == 200 or (400 <= status < 500 and isinstance(answer["detail"], str))


def test_wrong_method(port):
    assert call(port, "/search", b"", "GET") == (405, {"detail": "Method Not Allowed"})


def test_an_empty_query_does_not_cost_the_others_of_search_r1_theirs(port, echo):
    """The searcher behind it finds nothing for a blank query."""
    assert call(port, "/retrieve", {"queries": ["Who?", ""], "topk": 2})[0] == 200
    assert echo.batches == [(["Who?", ""], 2)]


def test_a_body_that_does_not_end(port):
    """Chunks without a length: the limit counts what arrives."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(
        "POST", "/search", iter([b" " * 1_000] * 50), {"Transfer-Encoding": "chunked"}, encode_chunked=True
    )
    response = connection.getresponse()
    assert response.status == 413 and "larger than 5000 bytes" in response.read().decode()
    connection.close()


def many(port, bodies):
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: call(port, "/batch_search", body), bodies))


def when(condition):
    deadline = time.monotonic() + 3
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def together(port, echo, bodies):
    """Sends these while a first search is held up, so that all of them wait."""
    echo.go.clear()
    with concurrent.futures.ThreadPoolExecutor(1 + len(bodies)) as pool:
        first = pool.submit(call, port, "/search", {"query": "first"})
        when(lambda: echo.batches)
        answers = [pool.submit(call, port, "/batch_search", body) for body in bodies]
        time.sleep(0.2)
        echo.go.set()
        assert first.result()[0] == 200
        return [answer.result() for answer in answers]


def test_requests_that_wait_are_searched_for_together(port, echo):
    answers = together(port, echo, [{"query": [f"{n}a", f"{n}b"], "top_n": 2} for n in range(5)])
    for number, (status, found) in enumerate(answers):
        titles = [f'"{number}{letter}"\ntext' for letter in "ab"]
        assert status == 200 and [hits[0]["contents"] for hits in found] == titles
    assert [len(queries) for queries, _ in echo.batches] == [1, 10]


def test_a_request_that_fails_does_not_cost_the_others_theirs(port, echo, caplog):
    answers = together(port, echo, [{"query": [name], "top_n": 2} for name in ("a", "poison", "b")])
    assert [status for status, _ in answers] == [200, 500, 200]
    assert answers[1][1] == {"detail": "the search failed (RuntimeError); the server's log says why"}
    assert "a bug" in caplog.text


def test_what_cannot_be_answered_in_time_is_turned_away(port, echo):
    bodies = [{"query": [str(n)] * 8} for n in range(6)]  # 48 queries, and 40 may wait
    answers = together(port, echo, bodies)
    assert sorted(status for status, _ in answers) == [200] * 5 + [503]
    (reason,) = (answer["detail"] for status, answer in answers if status == 503)
    assert reason == "overloaded: 40 queries are waiting already; come back later"


def test_a_batch_is_bounded_and_of_one_kind():
    """Straight to the batcher, so that the order of arrival is known."""
    seen = []

    def search(queries, top_n):
        seen.append((queries, top_n))
        return [[] for _ in queries]

    async def run():
        batcher = MicroBatcher(search, batch_queries=3)
        asked = [(["a"], 1), (["b", "c"], 1), (["d"], 1), (["e"], 2), (["f"] * 5, 2), (["g"], 2)]
        answers = [asyncio.create_task(batcher.find(*one)) for one in asked]
        await asyncio.sleep(0)
        worker = asyncio.create_task(batcher.serve())
        assert [len(await answer) for answer in answers] == [1, 2, 1, 1, 5, 1]
        worker.cancel()

    asyncio.run(run())
    assert [(len(queries), top_n) for queries, top_n in seen] == [(3, 1), (1, 1), (1, 2), (5, 2), (1, 2)]


def test_nobody_searches_for_those_who_gave_up():
    seen = []

    def search(queries, top_n):
        seen.append(queries)
        return [[] for _ in queries]

    async def run():
        batcher = MicroBatcher(search, timeout=0.05)
        with pytest.raises(Overloaded, match=r"no answer within 0\.05 s"):
            await batcher.find(["gone"], 1)  # nobody serves yet
        worker = asyncio.create_task(batcher.serve())
        assert await batcher.find(["here"], 1) == [[]]
        worker.cancel()

    asyncio.run(run())
    assert seen == [["here"]]
