"""OpenAI's chat completions: the official client, evaluation's answers, cancellation, limits and invalid requests."""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.agent.memalpha.memory import Memory
from memsearcher_jax.agent.tool_functions import Tool
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.http.chat import Message
from memsearcher_jax.http.listener import listen
from memsearcher_jax.launch import evaluate
from memsearcher_jax.launch.serve_search import run_server
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.rl.tool_executor import tool_backends
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.serving.agent import Overloaded
from memsearcher_jax.serving.app import make_app
from memsearcher_jax.types import Call, Generate, Outcome, StopReason


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def questions(agent):
    return [problem.question for problem in make_encyclopedia(agent.run.config.data.encyclopedia).test]


def ask(client, question, **options):
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": question}], **{"seed": 3} | options
    )


def wait_while(busy):
    deadline = time.monotonic() + 20
    while busy():
        assert time.monotonic() < deadline, "a request keeps its slot"
        time.sleep(0.02)


def test_answers_equal_those_of_an_evaluation(client, questions, tmp_path, on_one_device):
    flags = ["--config", "tiny", "--model.path", "package:tiny", "--retrieval.index_type", "exact"]
    flags += ["--evaluation.max_questions", "3", "--evaluation.temperature", "0.8", "--sampling.slots", "8"]
    evaluate.main([*flags, "--checkpoint", str(located("package:tiny")), "--out", str(tmp_path / "out")])
    (file,) = (tmp_path / "out" / "trajectories").iterdir()
    expected = {scored.trajectory.problem.question: scored.trajectory for scored in read_trajectories(file)}
    assert set(expected) == set(questions[:3])
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda row: ask(client, questions[row], seed=row, temperature=0.8), range(3)))
    for question, answer in zip(questions, answers, strict=False):
        trajectory, message = expected[question], answer.choices[0].message
        assert message.content == trajectory.outcome.answer
        assert message.memsearcher["stop"] == trajectory.outcome.stop.value
        assert message.memsearcher["turns"] == json.loads(json.dumps([asdict(one) for one in trajectory.outcome.turns]))
        assert answer.usage.completion_tokens == sum(sum(context.sampled) for context in trajectory.contexts)
        assert answer.usage.total_tokens == sum(len(context.ids) for context in trajectory.contexts)


def test_a_streamed_answer_equals_the_whole_one(client, questions):
    answer = ask(client, questions[0])
    whole = answer.choices[0]
    chunks = list(ask(client, questions[0], stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content != ""
    thoughts = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert thoughts == whole.message.reasoning_content
    events = [event for delta in deltas for event in getattr(delta, "memsearcher", ())]
    types = [event["type"] for event in events]
    assert (
        types[0] == "turn" and types[-1] == "end" and {"reply", "search", "results", "rewrite", "memory"} < set(types)
    )
    results = [result for event in events if event["type"] == "results" for result in event["results"]]
    shown = [passage for result in results for passage in result["passages"]]
    assert shown and all(source in shown for source in events[-1]["sources"])
    assert [event["queries"] for event in events if event["type"] == "search"] == [
        [query["text"] for query in turn["queries"]] for turn in whole.message.memsearcher["turns"] if turn["queries"]
    ]
    assert events[-1]["sources"] == whole.message.memsearcher["sources"] != []
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    messages = [{"role": "user", "content": questions[0]}]
    with client.chat.completions.stream(model="tiny", messages=messages, seed=3) as stream:
        joined = stream.get_final_completion().choices[0].message
    assert (joined.content, joined.memsearcher) == (whole.message.content, events)


def test_models_and_draws_of_a_request(client, questions):
    def thoughts(seed, **options):
        answer = ask(client, questions[1], seed=seed, temperature=1.5, max_completion_tokens=40, **options)
        return answer.choices[0].message.reasoning_content

    assert len({thoughts(seed) for seed in range(4)}) > 1
    assert len({thoughts(seed, top_p=1e-6) for seed in range(2)}) == 1
    short = ask(client, questions[1], max_completion_tokens=5)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)
    for limit in range(20, 40):  # one of them is the length of a reply
        cut = ask(client, questions[1], max_tokens=limit)
        assert cut.usage.completion_tokens <= limit and cut.choices[0].message.memsearcher["turns"], limit
    (listed,) = client.models.list()
    assert (listed.id, listed.workflow) == ("tiny", "memsearcher")
    assert client.models.retrieve("tiny") == listed
    with pytest.raises(openai.NotFoundError, match="'org/gpt' is not served: use 'tiny'"):
        client.models.retrieve("org/gpt")


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt"}, 404, "model: 'gpt' is not served: use 'tiny'"),
        ({"messages": []}, 400, "messages: List should have at least 1 item after validation, not 0"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "the question is empty"),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, 400, "tokens: at most 32 are allowed"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "the question is not valid Unicode"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "the last message must have the role user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "Input should be 'text'"),
        ({"n": 2}, 400, "n: the agent does not support it"),
        ({"tool_choice": "required"}, 400, "tool_choice: the agent does not support it"),
        ({"top_k": 1}, 400, "top_k: the agent does not support it"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs: the agent does not"),
        ({"tools": [{"type": "function"}]}, 400, "tools: the agent does not support it"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format: the agent does not support it"),
        ({"user": "x" * 200_000}, 413, "the body is larger than 100000 bytes"),
    ],
)
def test_errors_have_openais_format(url, change, status, message):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}]} | change
    refused_status, answer = post(url, json.dumps(body).encode())
    assert (refused_status, answer["error"]["code"]) == (status, str(status))
    assert message in answer["error"]["message"]


def test_parameters_that_change_nothing_are_accepted(url):
    neutral = {"n": 1, "top_logprobs": 0, "logprobs": False, "stop": "", "tools": [], "tool_choice": "auto", "top_k": 0}
    neutral |= {"top_p": 0, "temperature": 1e-9, "response_format": {"type": "text"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1} | neutral
    assert post(url, json.dumps(body).encode())[0] == 200
    assert post(url, json.dumps(body | {"stop": "x"}).encode())[0] == 400
    assert Message(role="user", content=[{"type": "text", "text": text} for text in "ab"]).text == "a\nb"


def test_a_page_of_an_allowed_origin_may_send_the_key(agent, serving):
    allowed, asked = "https://a.example", {"Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type"
    with serving(agent, key="s3cret", cors_origins=(allowed,)) as url:
        for path in ("/v1/chat/completions", "/mcp"):
            for origin, status in ((allowed, 200), ("https://b.example", 400)):
                preflight = httpx.options(url + path, headers={"Origin": origin} | asked)
                assert preflight.status_code == status, (path, origin)
                assert preflight.headers.get("access-control-allow-origin") == (allowed if status == 200 else None)
        refused = httpx.get(f"{url}/v1/models", headers={"Origin": allowed})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == allowed
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        headers = {"Authorization": "Bearer s3cret", "Accept": "application/json, text/event-stream"}
        assert httpx.post(f"{url}/mcp", json=ping, headers=headers | {"Origin": allowed}).status_code == 200


def post(url, body, path="/v1/chat/completions"):
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_other_errors(url):
    assert post(url, b'{"model": ')[1]["error"]["message"] == "body: JSON decode error"
    error = {"message": "Not Found", "type": "not_found_error", "param": None, "code": "404"}
    assert post(url, b"{}", "/v1/embeddings") == (404, {"error": error})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=8), child, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "system"]) | JSON, "content": JSON})
FIELDS = ("stream_options", "max_tokens", "temperature", "top_p", "seed", "n", "stop", "tools", "logprobs", "user")
BODY = st.fixed_dictionaries(
    {"model": st.just("tiny") | JSON, "messages": st.lists(MESSAGE, max_size=3) | JSON},
    optional=dict.fromkeys(FIELDS, JSON),
)


@settings(max_examples=150)
@given(BODY | JSON)
def test_any_body_gets_an_answer_or_a_reason(url, body):
    if isinstance(body, dict):
        body["max_completion_tokens"] = 1
    status, answer = post(url, json.dumps(body).encode())
    assert status in (200, 400, 404), answer
    assert ("choices" in answer) if status == 200 else answer["error"]["message"]


@pytest.fixture
def hanging_search(monkeypatch):
    """An event that lets searches return: until then, nothing ends by itself."""
    release, real = threading.Event(), Searcher.search

    def slow(self, queries, top_n):
        release.wait(30)
        return real(self, queries, top_n)

    monkeypatch.setattr(Searcher, "search", slow)
    yield release
    release.set()


def test_requests_that_are_left_when_the_service_stops_get_an_error(agent, questions, hanging_search):
    def stop():
        try:
            wait_while(lambda: not agent.active)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(2) as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        asked = pool.submit(ask, openai.OpenAI(base_url=url, api_key="none", max_retries=0), questions[0])
        pool.submit(stop)
        run_server(make_app(agent, "tiny"), agent.limits, listener, "it", 2, agent.end_requests)
        signal.signal(signal.SIGTERM, before)
        assert "overloaded: the service stops; retry later" in str(asked.exception())


def test_a_client_that_disconnects_frees_its_slot(agent, client, questions, hanging_search):
    stream = ask(client, questions[0], stream=True)
    next(stream)  # the role
    while next(stream).choices[0].delta.memsearcher[0]["type"] != "search":
        assert agent.active == 1
    with pytest.raises(openai.APITimeoutError):
        ask(client, questions[1], timeout=1)
    stream.close()
    wait_while(lambda: agent.active)
    hanging_search.set()
    wait_while(lambda: agent._requests)
    assert ask(client, questions[0]).choices[0].message.content


def test_limits(agent, client, questions, monkeypatch):
    limits = agent.limits
    monkeypatch.setattr(agent, "limits", replace(limits, max_requests=0))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="overloaded: 0 requests are being answered") as refused:
            ask(client, questions[0], stream=stream)
        assert refused.value.status_code == 503
    with pytest.raises(Overloaded, match="0 questions wait for an answer"):
        asyncio.run(agent.recall("Who?", Memory()))
    monkeypatch.setattr(agent, "limits", replace(limits, request_timeout=0.0))
    with pytest.raises(openai.InternalServerError, match="no answer within 0 s") as refused:
        ask(client, questions[0])
    assert refused.value.status_code == 504
    wait_while(lambda: agent._requests)


def test_a_fault_is_an_error_and_the_next_request_is_answered(agent, client, questions, monkeypatch):
    def fail(self, queries, top_n):
        raise RuntimeError("the index is gone")

    monkeypatch.setattr(Searcher, "search", fail)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: the index is gone") as failed:
        ask(client, questions[0])
    assert failed.value.status_code == 502
    with pytest.raises(openai.APIError, match="RuntimeError: the index is gone"):
        list(ask(client, questions[0], stream=True))
    monkeypatch.undo()
    engine = agent._driver.engine
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "step", lambda self: 1 / 0)
        with pytest.raises(openai.InternalServerError, match=r"the engine failed \(ZeroDivisionError\)"):
            ask(client, questions[0])
    assert ask(client, questions[0]).choices[0].message.content
    assert len(engine.scheduler.free_slots) == 8


def test_calls_of_tools_are_events(agent, client, questions, monkeypatch):
    def calling(problem):
        result = yield Call("double", {"number": 4})
        yield Generate(agent.run.agent.prompts.initial_prompt(problem.question, result.text), 8)
        return Outcome(StopReason.ANSWERED, result.text)

    tool = Tool({"name": "double"}, lambda calls, timeout: [2 * call["number"] for call in calls])
    monkeypatch.setattr(agent, "_start", calling)
    backends = {**agent._driver.backends, **tool_backends([tool])}
    monkeypatch.setattr(agent, "_driver", replace(agent._driver, backends=backends))
    chunks = list(ask(client, questions[0], stream=True))
    events = [event for chunk in chunks for event in getattr(chunk.choices[0].delta, "memsearcher", ())]
    assert events[0] == {"index": 0, "type": "call", "turn": 0, "tool": "double", "arguments": {"number": 4}}
    assert events[1] == {"index": 1, "type": "result", "turn": 0, "text": "8", "error": ""}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "8"


def test_a_key(agent, serving, questions):
    with serving(agent, key="s3cret") as url:
        for key in ("wrong", "s3cret1", "S3cret"):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0).models.list()
        status, answer = post(url, b"{}", "/mcp")
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        right = openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret", max_retries=0)
        assert ask(right, questions[0]).choices[0].message.content
        for authorization, status in (
            ("bearer s3cret", 200),
            ("BEARER  s3cret", 200),
            ("Basic s3cret", 401),
            ("Bearers3cret", 401),
            ("s3cret", 401),
        ):
            found = httpx.get(f"{url}/v1/models", headers={"Authorization": authorization})
            assert found.status_code == status, authorization
        with urllib.request.urlopen(f"{url}/health") as response:
            assert "s3cret" not in response.read().decode()
        probe = httpx.head(f"{url}/health")
        assert probe.status_code == 200 and probe.content == b""


def test_other_host_names_are_refused_on_loopback(url):
    """Such as that of a web page whose name resolves to this machine."""
    port = url.rpartition(":")[2]
    hosts = {f"localhost:{port}": 200, "[::1]": 200, "pages.example": 400, f"127.0.0.1.x:{port}": 400}
    for host, status in hosts.items():
        request = urllib.request.Request(f"{url}/v1/models", headers={"Host": host})
        try:
            found = urllib.request.urlopen(request).status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status
