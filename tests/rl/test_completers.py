"""Completers of answers and judgements: frozen weights on a sampling engine, or a chat service with injected errors."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.agent.memalpha.workflow import generate_once
from memsearcher_jax.agent.prompts import fill
from memsearcher_jax.hosts.distributed import Interrupted
from memsearcher_jax.rl import completers
from memsearcher_jax.rl.completers import EngineCompleter
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.rl.rewards import completing_once
from memsearcher_jax.rl.rollout import RolloutDriver
from memsearcher_jax.types import Completion, FinishReason, Prompt
from tests.support import byte_tokenizer, chat_completion, make_prompt

KEY = jax.random.key(0)
TOKENIZER = byte_tokenizer()


def prompt(question: str, memory: str = "m") -> Prompt:
    return make_prompt(
        "<|im_start|>system\nAnswer. ",
        memory,
        "<|im_end|>\n<|im_start|>user\n",
        question,
        "<|im_end|>\n<|im_start|>assistant\n",
    )


def open_openai_completer(url, **settings):
    settings = {"max_outage": 0.0} | settings
    config = CompleterConfig(backend="openai", url=url, model="judge-32b", **settings)
    return completers.open_openai_completer(config, section="judge", max_tokens=9, temperature=0.5)


def test_a_completion_request_has_the_openai_format(serving, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "secret")
    url, requests = serving(lambda user, times: chat_completion(f"about {user}"))
    completer = open_openai_completer(url, api_key_env="THEIR_KEY", extra_body='{"top_p": 0.8, "temperature": null}')
    assert completer.complete([prompt("a"), prompt("b")], KEY) == [Completion("about a"), Completion("about b")]
    path, headers, body = next(request for request in requests if request[2]["messages"][1]["content"] == "a")
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "judge-32b",
        "messages": [{"role": "system", "content": "Answer. m"}, {"role": "user", "content": "a"}],
        "max_tokens": 9,
        "top_p": 0.8,
    }
    completer.complete([fill(("",), ("c",), {})], KEY)
    assert requests[-1][2]["messages"] == [{"role": "user", "content": "c"}], "a set without a system message"


def test_a_service_is_asked_through_the_proxy_of_the_environment(serving, monkeypatch):
    url, requests = serving(lambda user, times: chat_completion("through the proxy"))
    monkeypatch.setenv("HTTP_PROXY", url.removesuffix("/v1"))
    completer = open_openai_completer("http://judge.example/v1")
    assert completer.complete([prompt("a")], KEY) == [Completion("through the proxy")]
    assert [path for path, _, _ in requests] == ["http://judge.example/v1/chat/completions"]


def test_requests_are_repeated_while_the_service_is_down_and_other_errors_are_returned(serving):
    def behave(user, times):
        replies = {
            "busy": (503, {"error": "busy"}) if times < 3 else chat_completion("at last"),
            "good": chat_completion([{"type": "thinking"}, {"type": "text", "text": "fine"}]),
            "down": (500, {"error": "no luck"}),
            "behind": (200, {"error": {"code": 502, "message": "no provider"}}),
            "unpaid": (200, {"error": {"code": 402, "message": "no credits"}}),
            "wrong": (400, {"error": "too long"}),
            "long": chat_completion("fi", "length"),
            "empty": chat_completion(" "),
            "other": (200, {"choices": []}),
        }
        return replies[user]

    url, requests = serving(behave)
    questions = ["busy", "good", "long", "down", "behind", "unpaid", "wrong", "empty", "other"]
    completer = open_openai_completer(url, max_outage=3.0)
    busy, good, long, *failed = completer.complete(list(map(prompt, questions)), KEY)
    assert (busy, good, long) == (Completion("at last"), Completion("fine"), Completion("fi", FinishReason.LENGTH))
    reasons = [
        'returned status 500: {"error": "no luck"}',
        'returned status 502: {"code": 502, "message": "no provider"}',
        'rejected the request with status 402: {"code": 402, "message": "no credits"}',
        "rejected the request with status 400",
        "answered with an empty text (stop)",
        "did not return a chat completion",
    ]
    for one, reason in zip(failed, reasons, strict=True):
        assert one.text == "" and reason in one.error
    request_counts = Counter(body["messages"][1]["content"] for _, _, body in requests)
    assert request_counts.pop("down") > 1 and request_counts.pop("behind") > 1
    assert request_counts == {"busy": 3, "unpaid": 1, "wrong": 1, "empty": 1, "other": 1, "good": 1, "long": 1}


def test_a_stop_interrupts_requests(serving):
    url, requests = serving(lambda user, times: (503, b""))
    completer = open_openai_completer(url, max_outage=60.0)

    def check():
        if requests:
            raise Interrupted

    with pytest.raises(Interrupted):
        replace(completer, check=check).complete([prompt("q")], KEY)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ""}, r"judge.backend is openai: set judge.url and judge.model"),
        ({"url": "host:8000"}, r"answerer.url or judge.url 'host:8000' is not a valid address"),
        (
            {"url": "http://h", "api_key_env": "NO_SUCH_KEY"},
            r"judge.api_key_env: the environment holds no variable of that name$",
        ),
        ({"url": "http://h", "extra_body": "[]"}, r"judge.extra_body: a JSON object is needed, found list"),
    ],
)
def test_incomplete_settings_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        open_openai_completer(**settings)


def test_equal_prompts_are_completed_once():
    received = []

    def complete(prompts, key):
        received.extend(prompt["memory"] for prompt in prompts)
        return [Completion(str(prompt)) for prompt in prompts]

    prompts = [prompt("a"), prompt("b"), prompt("a"), prompt("a", memory="other")]
    expected = [Completion(str(one)) for one in prompts]
    assert completing_once(SimpleNamespace(complete=complete), KEY)(prompts, 0) == expected
    assert received == ["a", "b", "a"]


@pytest.fixture
def driver(engine):
    return RolloutDriver(engine, TOKENIZER, partial(generate_once, max_tokens=6))


def test_engine_completions_are_reproducible_and_independent_of_the_batch(driver, params):
    completer = EngineCompleter(driver, params)
    prompts = [prompt(f"q{number}") for number in range(7)]
    completions = completer.complete(prompts, KEY)
    assert {reply.error for reply in completions} == {""} and len({reply.text for reply in completions}) > 1
    assert {reply.finish for reply in completions if len(reply.text.encode()) == 6} == {FinishReason.LENGTH}
    assert completer.complete(prompts, KEY) == completions and driver.engine.scheduler.free_slots == [0, 1, 2]
    assert completer.complete(prompts[4:5], KEY) == completions[4:5]
    assert completer.complete([prompts[2]] * 2, KEY) == [completions[2]] * 2


def test_too_long_prompts_and_nonfinite_weights_are_errors(driver, params):
    long, short = EngineCompleter(driver, params).complete([prompt("x" * 140), prompt("q")], KEY)
    assert long.error == "the prompt does not fit the context" and short.text
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    (result,) = EngineCompleter(driver, broken).complete([prompt("q")], KEY)
    assert result == Completion(error="the policy's logits were not finite")
