"""Search over HTTP against a local server with injected faults."""

import contextlib
import itertools
import json
import socket
import time

import pytest

from memsearcher_jax.retrieval import search
from memsearcher_jax.retrieval.config import MAX_QUERY_CHARS, RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.retrieval.server.client import (
    RequestRejected,
    SearchClient,
    ServiceUnavailable,
)
from memsearcher_jax.types import Passage
from tests.http_server import QuietHandler, serving_http


def good(handler, request):
    """Return one passage per query, whose title is the query."""
    documents = [[{"id": str(row), "contents": f'"{query}"\ntext'}] for row, query in enumerate(request["query"])]
    reply(handler, [documents, [[0.5 + row] for row in range(len(documents))]])


def reply(handler, value, status=200, length=None, raw=None):
    data = json.dumps(value).encode() if raw is None else raw
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def status(code, text="no luck"):
    return lambda handler, request: reply(handler, {"detail": text}, code)


def answering(value=None, raw=None):
    return lambda handler, request: reply(handler, value, raw=raw)


def truncates(handler, request):
    reply(handler, None, raw=b"[[[", length=500)


def closes(handler, request):
    handler.connection.shutdown(socket.SHUT_RDWR)


def sleeps(handler, request):
    time.sleep(1.0)


def drips_body(handler, request):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def sends_garbage(handler, request):
    handler.wfile.write(b"220 mail server ready\r\n\r\n")


@pytest.fixture
def serving():
    """Start a server whose n-th request is handled by the n-th function, and all later ones by the last."""
    with contextlib.ExitStack() as stack:

        def serve(*handlers):
            requests, actions = [], itertools.chain(handlers, itertools.repeat(handlers[-1]))

            class Handler(QuietHandler):
                def do_POST(self):
                    requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                    with contextlib.suppress(OSError):  # the client has disconnected
                        next(actions)(self, requests[-1])

                def do_GET(self):
                    next(actions)(self, None)

            return stack.enter_context(serving_http(Handler)), requests

        yield serve


def test_queries_and_passages(serving):
    """One invalid query must not fail its batch."""
    url, requests = serving(good)
    found = SearchClient(url).search(["誰 \u2028 \x00", "half \ud800 pair", "x" * 1_000_000], 3)
    assert found[0] == [Passage("0", '"誰 \u2028 \x00"\ntext', 0.5)]
    queries = ["誰 \u2028 \x00", "half ? pair", "x" * MAX_QUERY_CHARS]
    assert requests == [{"query": queries, "top_n": 3, "return_score": True}]


def test_passages_are_text_that_can_be_encoded(serving):
    url, _ = serving(answering([[[{"id": "a\ud800", "contents": "be\u0301\udfff"}]], [[1]]]))
    assert SearchClient(url).search(["Who?"], 1) == [[Passage("a?", "b\u00e9?", 1.0)]]


@pytest.mark.parametrize(
    "fault", [status(500), status(408), status(429), truncates, closes, sends_garbage, answering(raw=b"<html>")]
)
def test_a_failure_that_may_be_temporary_is_an_outage(serving, fault):
    url, _ = serving(fault, good)
    with pytest.raises(ServiceUnavailable) as caught:
        SearchClient(url).search(["Who?"], 1)
    assert isinstance(caught.value, ConnectionError) and "\n" not in str(caught.value)
    assert len(SearchClient(url).search(["Who?"], 1)[0]) == 1


@pytest.mark.parametrize("fault", [sleeps, drips_body])
def test_a_request_respects_its_timeout(serving, fault):
    url, _ = serving(fault)
    started = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=r"does not respond within 0\.2 s"):
        SearchClient(url, timeout=0.2).search(["Who?"], 1)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400, "query 0 is too long"), "rejected the request with status 400: .*query 0 is too long"),
        (answering([[], []]), r"did not return passages \(0 rankings for 1 queries\)"),
        (answering([[[{"id": "1"}]], [[1.0]]]), r"did not return passages \('contents'\)"),
        (answering([[[{"id": "1", "contents": 3}]], [[1.0]]]), "contents of type int"),
        (answering([[[{"id": "1", "contents": "x"}]], [[float("nan")]]]), r"passages \(a score is nan\)"),
        (answering([[[{"id": "1", "contents": "x"}]], [[10**400]]]), r"passages \(int too large to convert to float\)"),
    ],
)
def test_a_refusal_is_no_outage(serving, fault, message):
    url, _ = serving(fault)
    with pytest.raises(RequestRejected, match=message) as caught:
        SearchClient(url).search(["Who?"], 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_invalid_addresses(url):
    with pytest.raises(ValueError, match="is not a valid address: write it like http://host:8000"):
        SearchClient(url)


def test_an_address_with_a_path_and_one_without_a_server(serving):
    url, _ = serving(
        lambda handler, request: reply(handler, [[[]], [[]]], 200 if handler.path == "/a/batch_search" else 404)
    )
    assert SearchClient(f"{url}/a/").search(["Who?"], 1) == [[]]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(ServiceUnavailable, match=r"does not respond: .*connection"):
            SearchClient(f"http://127.0.0.1:{taken.getsockname()[1]}").search(["Who?"], 1)


def test_a_searcher_over_a_service(serving, tmp_path, monkeypatch):
    """It batches, caches, and checks that the service is available before the run starts."""
    url, requests = serving(answering({"status": "healthy"}), good)
    monkeypatch.setattr(search, "MAX_BATCH", 2)
    searcher = open_searcher(RetrievalConfig(url=url), tmp_path / "index", ())
    found = searcher.search(["a", "", "b", "a", "c"], 1)
    assert [hits[0].title if hits else None for hits in found] == ["a", None, "b", "a", "c"]
    assert [request["query"] for request in requests] == [["a", "b"], ["c"]]
    assert searcher.search(["a"], 1) == found[:1] and len(requests) == 2
    assert not (tmp_path / "index").exists()


def test_an_unavailable_service_is_an_error_at_once(serving, tmp_path):
    url, _ = serving(status(503))
    for changes, message in (({"corpus": "x"}, "leave out retrieval.corpus and index"), ({}, "returned status 503")):
        with pytest.raises((OSError, ValueError), match=message):
            open_searcher(RetrievalConfig(url=url, **changes), tmp_path / "index", ())
