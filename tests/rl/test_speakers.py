"""Who answers and who judges: frozen weights on a sampler, or a service that misbehaves on order."""

import contextlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.agent.types import Prompt
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import speakers
from memsearcher_jax.rl.config import SpeakerConfig
from memsearcher_jax.rl.speakers import RememberingSpeaker, Said, SamplerSpeaker
from memsearcher_jax.sampling.buffer import PromptWidths
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.testing import NANO, NANO_SAMPLING, byte_tokenizer

KEY = jax.random.key(0)
TOKENIZER = byte_tokenizer()


def prompt(question: str, memory: str = "m") -> Prompt:
    return Prompt(
        "<|im_start|>system\nAnswer. ",
        memory,
        "<|im_end|>\n<|im_start|>user\n",
        question,
        "<|im_end|>\n<|im_start|>assistant\n",
    )


def completion(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def serving():
    """Starts a service whose replies are what `behave(user message, how often it was asked)` returns."""
    with contextlib.ExitStack() as stack:

        def serve(behave):
            requests, asked, busy, lock = [], Counter(), Counter(), threading.Lock()

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self):
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    user = body["messages"][1]["content"]
                    with lock:
                        requests.append((self.path, dict(self.headers), body))
                        asked[user] += 1
                        busy["now"] += 1
                        busy["most"] = max(busy["most"], busy["now"])
                    status, value = behave(user, asked[user])
                    with lock:
                        busy["now"] -= 1
                    data = value if isinstance(value, bytes) else json.dumps(value).encode()
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    with contextlib.suppress(OSError):
                        self.wfile.write(data)

                def log_message(self, *args):
                    pass

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}/v1", requests, busy

        yield serve


def open_endpoint(url, **settings):
    config = SpeakerConfig(who="endpoint", url=url, model="judge-32b", **settings)
    return speakers.open_endpoint(config, section="judge", max_tokens=9, temperature=0.5)


def test_an_endpoint_is_asked_in_words(serving, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "secret")
    url, requests, _ = serving(lambda user, times: completion(f"about {user}"))
    speaker = open_endpoint(url, key_variable="THEIR_KEY")
    assert speaker.say([prompt("a"), prompt("b")], KEY) == [Said("about a"), Said("about b")]
    path, headers, body = next(request for request in requests if request[2]["messages"][1]["content"] == "a")
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "judge-32b",
        "messages": [{"role": "system", "content": "Answer. m"}, {"role": "user", "content": "a"}],
        "max_tokens": 9,
        "temperature": 0.5,
    }


def test_what_passes_is_tried_again_and_what_does_not_is_an_error_of_its_own(serving):
    def behave(user, times):
        replies = {
            "busy": (503, {"error": "busy"}) if times < 3 else completion("at last"),
            "down": (500, {"error": "no luck"}),
            "wrong": (400, {"error": "too long"}),
            "empty": completion(" "),
            "other": (200, {"choices": []}),
            "no json": (200, b"<html>"),
        }
        return replies.get(user, completion("fine"))

    url, requests, _ = serving(behave)
    questions = ["busy", "down", "wrong", "empty", "other", "no json", "good"]
    said = dict(zip(questions, open_endpoint(url, attempts=3).say(list(map(prompt, questions)), KEY), strict=True))
    assert (said["busy"], said["good"]) == (Said("at last"), Said("fine"))
    for question, reason in [
        ("down", 'answered with status 500: {"error": "no luck"} (attempt 3 of 3)'),
        ("wrong", "refused with status 400"),
        ("empty", "answered with an empty text"),
        ("other", "something else than a chat completion"),
        ("no json", "something else than JSON: <html> (attempt 3 of 3)"),
    ]:
        assert said[question].text == "" and reason in said[question].error, question
    asked = Counter(body["messages"][1]["content"] for _, _, body in requests)
    assert asked == {"busy": 3, "down": 3, "wrong": 1, "empty": 1, "other": 1, "no json": 3, "good": 1}


def test_a_reply_that_takes_too_long_is_an_error(serving):
    def behave(user, times):
        time.sleep(0.6 if user == "slow" else 0.0)
        return completion("done")

    url, _, _ = serving(behave)
    slow, quick = open_endpoint(url, attempts=1, timeout=0.3).say([prompt("slow"), prompt("quick")], KEY)
    assert quick == Said("done") and "no answer in time (attempt 1 of 1)" in slow.error


def test_no_more_are_asked_at_once_than_allowed(serving):
    def behave(user, times):
        time.sleep(0.05)
        return completion("done")

    url, requests, busy = serving(behave)
    open_endpoint(url, at_once=3).say([prompt(str(number)) for number in range(12)], KEY)
    assert len(requests) == 12 and 2 <= busy["most"] <= 3


def test_nobody_listens():
    (said,) = open_endpoint("http://127.0.0.1:9/v1", attempts=1).say([prompt("a")], KEY)
    assert "does not answer" in said.error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ""}, r"judge.who is endpoint: set judge.url and judge.model"),
        ({"url": "host:8000"}, r"answerer.url or judge.url 'host:8000' is no address"),
        (
            {"url": "http://h", "key_variable": "NO_SUCH_KEY"},
            r"judge.key_variable: the environment holds no variable of that name$",
        ),
    ],
)
def test_settings_that_are_not_enough(settings, message):
    with pytest.raises(ValueError, match=message):
        open_endpoint(**settings)


class Parrot:
    """Repeats questions, fails at those that are told to, and counts what it hears."""

    def __init__(self, *failing):
        self.failing, self.heard = set(failing), []

    def say(self, prompts, key):
        self.heard += [one.memory for one in prompts]
        return [
            Said(error="no") if one.memory in self.failing else Said(f"{one.question}:{one.memory}") for one in prompts
        ]


def test_the_same_is_said_once_and_failures_are_asked_anew():
    parrot = Parrot("b")
    speaker = speakers.remembering(parrot, SpeakerConfig(cached=100))
    prompts = [prompt("a"), prompt("b"), prompt("a"), prompt("a", memory="other")]
    assert speaker.say(prompts, KEY) == [Said("m:a"), Said(error="no"), Said("m:a"), Said("other:a")]
    assert parrot.heard == ["a", "b", "a"]
    parrot.failing.clear()
    assert speaker.say(prompts, KEY)[1] == Said("m:b")
    assert parrot.heard == ["a", "b", "a", "b"]


def test_what_is_remembered_is_bounded():
    parrot = Parrot()
    speaker = speakers.remembering(parrot, SpeakerConfig(cached=1))
    assert speaker.say([prompt("a"), prompt("b")], KEY) == [Said("m:a"), Said("m:b")]
    speaker.say([prompt("b")], KEY)
    speaker.say([prompt("a")], KEY)
    assert parrot.heard == ["a", "b", "a"]


def test_parts_of_a_prompt_are_not_mixed_up():
    parrot = Parrot()
    speaker = RememberingSpeaker(parrot, speakers.RecentlyUsed(9))
    assert speaker.say([prompt("b", "a"), prompt("", "ab")], KEY) == [Said("a:b"), Said("ab:")]


@pytest.fixture(scope="module")
def engine():
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    widths = PromptWidths(prefix=24, question=12, bridge=20, memory=12, suffix=24)
    return Engine(NANO, NANO_SAMPLING, widths, TOKENIZER.stop_ids, mesh)


def test_frozen_weights_answer_on_a_sampler(engine):
    params = jax.jit(lambda key: qwen.init(key, NANO))(jax.random.key(1))
    speaker = SamplerSpeaker(engine, TOKENIZER, params, max_tokens=6)
    prompts = [prompt(f"q{number}") for number in range(7)]
    said = speaker.say(prompts, KEY)
    assert not any(one.error for one in said) and len({one.text for one in said}) > 1
    assert speaker.say(prompts, KEY) == said and engine.free == [0, 1, 2]
    alone = [speaker.say([one], KEY)[0] for one in prompts[:1]]
    assert alone == said[:1]


def test_a_prompt_without_room_and_weights_gone_bad_are_errors(engine):
    params = jax.jit(lambda key: qwen.init(key, NANO))(jax.random.key(1))
    long, short = SamplerSpeaker(engine, TOKENIZER, params, 6).say([prompt("x" * 40), prompt("q")], KEY)
    assert "the memory of a prompt has 40 tokens" in long.error and short.text
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    (said,) = SamplerSpeaker(engine, TOKENIZER, broken, 6).say([prompt("q")], KEY)
    assert said == Said(error="the policy's logits were not finite")
