"""Search over HTTP against a local server that misbehaves on order."""

import contextlib
import itertools
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.breaker import CircuitBreaker
from memsearcher_jax.retrieval.client import QUERY_CHARACTERS, SearchRefused, SearchService, SearchUnavailable
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher


def good(handler, request):
    """One passage per query, which says what it was asked."""
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


def breaks_off(handler, request):
    reply(handler, None, raw=b"[[[", length=500)


def hangs_up(handler, request):
    handler.connection.shutdown(socket.SHUT_RDWR)


def sleeps(handler, request):
    time.sleep(1.0)


def drips(handler, request):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(20):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def talks_nonsense(handler, request):
    handler.wfile.write(b"220 mail server ready\r\n\r\n")


@pytest.fixture
def serving():
    """Starts a server that behaves as the functions say, one after the other, the last one for good."""
    with contextlib.ExitStack() as stack:

        def serve(*behaviours):
            requests, acts = [], itertools.chain(behaviours, itertools.repeat(behaviours[-1]))

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self):
                    requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                    with contextlib.suppress(OSError):  # of a client that is gone
                        next(acts)(self, requests[-1])

                def do_GET(self):
                    next(acts)(self, None)

                def log_message(self, *args):
                    pass

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}", requests

        yield serve


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now, self.naps = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds


def service(url, clock, *, timeout=5.0, attempts=4, failures=3):
    breaker = CircuitBreaker(failures=failures, cooldown=30.0, clock=clock)
    return SearchService(url, timeout, attempts, breaker, sleep=clock.sleep, draw=lambda: 0.5)


def test_queries_and_passages(serving):
    url, requests = serving(good)
    found = service(url, Clock()).find(["Who?", "誰 \u2028 \x00"], 3)
    assert found == [[Passage("0", '"Who?"\ntext', 0.5)], [Passage("1", '"誰 \u2028 \x00"\ntext', 1.5)]]
    assert requests == [{"query": ["Who?", "誰 \u2028 \x00"], "top_n": 3, "return_score": True}]


def test_what_a_service_could_not_read_is_not_sent(serving):
    """One such query must not cost the others of its batch their answers."""
    url, requests = serving(good)
    service(url, Clock()).find(["half \ud800 pair", "x" * 1_000_000], 1)
    assert requests[0]["query"] == ["half ? pair", "x" * QUERY_CHARACTERS]


@pytest.mark.parametrize(
    "fault", [status(500), status(503), status(429), breaks_off, hangs_up, talks_nonsense, answering(raw=b"<html>")]
)
def test_what_passes_is_tried_again(serving, fault):
    url, requests = serving(fault, fault, good)
    clock = Clock()
    assert len(service(url, clock).find(["Who?"], 1)[0]) == 1
    assert len(requests) == 3
    assert clock.naps == [0.5 * 0.4, 0.5 * 0.8], "pauses grow"


@pytest.mark.parametrize("fault", [sleeps, drips])
def test_an_attempt_ends_in_time(serving, fault):
    url, requests = serving(fault)
    started = time.monotonic()
    with pytest.raises(SearchUnavailable, match=r"no answer in time \(attempt 2 of 2\)"):
        service(url, Clock(), timeout=0.2, attempts=2).find(["Who?"], 1)
    assert time.monotonic() - started < 0.9
    assert len(requests) == 2


def test_it_gives_up_in_one_line(serving):
    url, requests = serving(status(500, "out\nof memory"))
    with pytest.raises(SearchUnavailable) as caught:
        service(url, Clock()).find(["Who?"], 1)
    assert str(caught.value) == f'{url} answered with status 500: {{"detail": "out\\nof memory"}} (attempt 4 of 4)'
    assert len(requests) == 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400, "query 0 is too long"), "refused with status 400: .*query 0 is too long"),
        (status(404), "refused with status 404"),
        (answering({"result": []}), "something else than passages"),
        (answering([]), "something else than passages"),
        (answering([[], []]), r"something else than passages \(0 rankings for 1 queries\)"),
        (answering([[["text"]], [[1.0]]]), "something else than passages"),
        (answering([[[{"id": "1"}]], [[1.0]]]), r"something else than passages \('contents'\)"),
        (answering([[[{"id": "1", "contents": 3}]], [[1.0]]]), "contents of type int"),
        (answering([[[{"id": "1", "contents": "x"}]], [["high"]]]), "something else than passages"),
        (answering([[[{"id": "1", "contents": "x"}]], [[]]]), "something else than passages"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(serving, fault, message):
    url, requests = serving(fault)
    with pytest.raises(SearchRefused, match=message) as caught:
        service(url, Clock()).find(["Who?"], 1)
    assert "\n" not in str(caught.value)
    assert len(requests) == 1


def test_a_broken_service_is_left_alone_and_tried_again_later(serving):
    url, requests = serving(*[status(503)] * 5, good)
    clock = Clock()
    client = service(url, clock, attempts=2, failures=2)
    for _ in range(2):
        with pytest.raises(SearchUnavailable, match="status 503"):
            client.find(["Who?"], 1)
    assert len(requests) == 4
    with pytest.raises(SearchUnavailable, match="kept failing and is left alone for another 30 s"):
        client.find(["Who?"], 1)
    assert len(requests) == 4, "not even asked"
    clock.now += 31
    with pytest.raises(SearchUnavailable, match=r"attempt 1 of 1"):
        client.find(["Who?"], 1)
    assert len(requests) == 5, "one trial"
    with pytest.raises(SearchUnavailable, match="left alone"):
        client.find(["Who?"], 1)
    clock.now += 31
    assert client.find(["Who?"], 1) and client.find(["Who?"], 1)
    assert len(requests) == 7


def test_a_refusal_is_a_sign_of_life(serving):
    url, _ = serving(status(400), status(503), status(400))
    client = service(url, Clock(), attempts=1, failures=2)
    for error in (SearchRefused, SearchUnavailable, SearchRefused, SearchRefused):
        with pytest.raises(error):
            client.find(["Who?"], 1)


def test_only_one_call_tries_a_broken_service():
    clock = Clock()
    breaker = CircuitBreaker(failures=1, cooldown=10.0, clock=clock)
    breaker.failed()
    assert breaker.refuses() == 10.0
    clock.now += 10
    assert [breaker.refuses() > 0 for _ in range(3)] == [False, True, True]
    breaker.succeeded()
    assert [breaker.refuses() for _ in range(3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_no_address(url):
    with pytest.raises(ValueError, match="is no address: write it like http://host:8000"):
        SearchService(url)


def test_a_path_and_nobody_there(serving):
    url, _ = serving(
        lambda handler, request: reply(handler, [[[]], [[]]], 200 if handler.path == "/a/batch_search" else 404)
    )
    assert service(f"{url}/a/", Clock()).find(["Who?"], 1) == [[]]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(SearchUnavailable, match=r"does not answer: .*refused"):
            service(f"http://127.0.0.1:{taken.getsockname()[1]}", Clock(), attempts=1).find(["Who?"], 1)


def test_the_config_names_a_service(serving, tmp_path):
    """The same searcher, with its cache, over another source; whether anybody is there shows before the run starts."""
    url, requests = serving(answering({"status": "healthy"}), good)
    searcher = open_searcher(RetrievalConfig(url=(url,), batch_limit=2), tmp_path / "index", ())
    found = searcher.search(["a", "", "b", "a", "c"], 1)
    assert [hits[0].title if hits else None for hits in found] == ["a", None, "b", "a", "c"]
    assert [request["query"] for request in requests] == [["a", "b"], ["c"]]
    assert searcher.search(["a"], 1) == found[:1] and len(requests) == 2
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "x.jsonl"}, "leave out retrieval.corpus and index"),
        ({"index": "x"}, "leave out retrieval.corpus and index"),
        ({}, "answered with status 503"),
    ],
)
def test_a_service_that_cannot_serve_is_refused_at_once(serving, tmp_path, changes, message):
    url, _ = serving(status(503))
    with pytest.raises((OSError, ValueError), match=message):
        open_searcher(RetrievalConfig(url=(url,), **changes), tmp_path / "index", ())


@pytest.mark.parametrize(
    ("first", "second"), [({"scale": "dense/a"}, {"scale": "dense/b"}), ({}, {}), ({"scale": "dense/a"}, ["healthy"])]
)
def test_parts_whose_scores_mean_different_things(serving, tmp_path, first, second):
    urls = tuple(serving(answering(health))[0] for health in (first, second))
    with pytest.raises(ValueError, match=f"the scores of {urls[0]} .* and {urls[1]} .* cannot be compared"):
        open_searcher(RetrievalConfig(url=urls), tmp_path / "index", ())


def test_services_with_parts_of_a_corpus(serving, tmp_path):
    health = answering({"scale": "dense/a"})
    urls = tuple(serving(health, good)[0] for _ in range(2))
    searcher = open_searcher(RetrievalConfig(url=urls), tmp_path / "index", ())
    (hits,) = searcher.search(["Who?"], 5)
    assert [(hit.title, hit.score) for hit in hits] == [("Who?", 0.5), ("Who?", 0.5)]
