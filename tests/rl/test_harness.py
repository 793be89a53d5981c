"""Agents of other frameworks: what they ask over HTTP is sampled, recorded and rewarded as contexts of a workflow."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.harness import Harness, parse_output, parse_result
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.model import sharding, weights
from memsearcher_jax.rl import harness_endpoint
from memsearcher_jax.rl.harness import HarnessDriver
from memsearcher_jax.rl.harness_endpoint import HarnessSettings
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.rl.tool_executor import search_backend
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Passage, Problem, StopReason
from tests.rl.scripted_endpoint import scripted_endpoint
from tests.support import NANO, NANO_SAMPLING, SMALL_RUN, TinyIndex, byte_tokenizer, with_flags

KEY = jax.random.key(3)
PROBLEMS = [Problem(f"q{number}", f"Who is {number}?", (f"a{number}",)) for number in range(4)]
PASSAGES = tuple(Passage(str(n), f'"Title {n}"\nText of number {n}.') for n in range(4))

POST = """
import json, os, sys, urllib.request
def post(base_url, key, path, body):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
def ask(client, messages, **more):
    body = {"model": client.model, "messages": messages, "max_tokens": 6, **more}
    return post(client.base_url, client.api_key, "/chat/completions", body)["choices"][0]["message"]
def user(text):
    return {"role": "user", "content": text}
"""


@pytest.fixture
def rollouts(engine, params, tmp_path):
    """(body of a harness or its command, settings of the driver) -> the trajectories of two rollouts a problem."""

    def run(body, problems=PROBLEMS, copies=2, **settings):
        harness = body
        if "\n" in body:
            file = tmp_path / "my_agent.py"
            file.write_text(POST + body)
            harness = str(file)
        driver = HarnessDriver(
            settings.pop("engine", engine),
            byte_tokenizer(),
            lambda problem: None,
            {"": search_backend(TinyIndex(PASSAGES))},
            sampling=settings.pop("sampling", None),
            harness=HarnessSettings(harness, **{"timeout": 60.0, "max_tokens": 8} | settings),
        )
        done, _ = driver.trajectories(make_jobs(problems, copies), params, KEY, lambda line: None)
        scheduler = driver.engine.scheduler
        assert len(scheduler.free_slots) == scheduler.settings.slots
        return done

    return run


def sampled_runs(context):
    """Numbers of consecutive sampled tokens."""
    edges = np.diff(np.concatenate([[0], np.asarray(context.sampled, int), [0]]))
    return (np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)).tolist()


def test_a_request_that_continues_a_reply_extends_its_context_and_another_opens_one(rollouts):
    done = rollouts(
        """
def my_agent(problem, client):
    messages = [{"role": "system", "content": "Be brief."}, user(problem.question)]
    messages += [ask(client, messages), user("Sure?")]
    messages += [ask(client, messages), user("Really?")]
    ask(client, messages)
    return ask(client, [user("A new conversation.")])["content"], 0.5
"""
    )
    tokenizer = byte_tokenizer()
    for trajectory in done:
        first, second = trajectory.contexts
        assert len(sampled_runs(first)) == 3
        assert len(sampled_runs(second)) == 1
        assert trajectory.outcome.counts == {"requests": 4, "contexts": 2, "altered_replies": 0}
        text = tokenizer.transcript(first.ids)
        assert text.startswith(
            f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{trajectory.problem.question}"
        )
        assert text.count("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n") == 1
        assert all(logprob < 0 for logprob, sampled in zip(first.logprobs, first.sampled, strict=True) if sampled)
    agent = Harness(AgentConfig(harness="x.py"))
    assert [scored.reward for scored in agent.rewards(done, Scoring(tokenizer))] == [0.5] * 8


@pytest.mark.parametrize(
    ("change", "contexts", "altered"),
    [
        ("reply['content'] = ' ' + reply['content'] + '\\n'", 1, 0),
        ("reply['content'] = [{'type': 'text', 'text': reply['content']}]", 1, 0),
        ("reply['refusal'] = None", 1, 0),
        ("reply['content'] = 'x' + reply['content']", 2, 1),
        ("reply['content'] = ''", 2, 1),
        ("messages[0]['content'] += '?'", 2, 0),
    ],
)
def test_a_reply_that_comes_back_altered_opens_a_context_and_is_counted(rollouts, change, contexts, altered):
    (trajectory,) = rollouts(
        f"""
def my_agent(problem, client):
    messages = [user(problem.question)]
    reply = ask(client, messages)
    {change}
    ask(client, [*messages, reply, user("Sure?")])
    return "an answer"
""",
        PROBLEMS[:1],
        1,
    )
    assert len(trajectory.contexts) == contexts
    assert trajectory.outcome.counts["altered_replies"] == altered


SUB_AGENTS = """
import asyncio
async def my_agent(problem, client):
    loop = asyncio.get_running_loop()
    main = [user(problem.question)]
    main.append(await loop.run_in_executor(None, lambda: ask(client, main)))
    parts = [
        loop.run_in_executor(None, lambda name=name: ask(client, [user(f"{name} of {problem.question}")]))
        for name in ("one", "two", "three")
    ]
    found = await asyncio.gather(*parts)
    main.append(user("The parts are done."))
    await loop.run_in_executor(None, lambda: ask(client, main))
    return "done"
"""


@pytest.mark.parametrize("slots", [3, 32])
def test_sub_agents_ask_at_the_same_time_and_more_trajectories_than_slots_end(rollouts, one_device, slots):
    """64 trajectories, with 32 slots all at once, each with three requests at once: none waits for another's slot."""
    settings = {}
    if slots != NANO_SAMPLING.slots:
        sampling = replace(NANO_SAMPLING, context_tokens=160, slots=slots)
        settings["engine"] = Engine(NANO, sampling, byte_tokenizer().stop_ids, one_device)
    done = rollouts(SUB_AGENTS, PROBLEMS, 16, **settings)
    assert len(done) == 64
    # A reply that opened another turn cannot be continued: the last request then opens a context, too.
    assert {len(trajectory.contexts) for trajectory in done} <= {4, 5}
    assert {trajectory.outcome.stop for trajectory in done} == {StopReason.ANSWERED}


FAULTS = {
    "raises": (
        "    ask(client, [user('a')])\n    raise KeyError('no such page')",
        "KeyError: 'no such page' (my_agent.py",
    ),
    "never asks": ("    return 'an answer'", "without a request to the model"),
    "is late": ("    ask(client, [user('a')])\n    import time; time.sleep(30)", "did not return within 2 s"),
    "returns nonsense": (
        "    ask(client, [user('a')])\n    return object()",
        "must be an answer, a finite number",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_that_of_one_trajectory_and_names_its_place(rollouts, fault):
    body, message = FAULTS[fault]
    rollouts("\ndef my_agent(problem, client):\n    ask(client, [user('a')])\n", copies=1)  # compiles: not in its time
    done = rollouts(
        f"""
def my_agent(problem, client):
    if problem.id != "q1":
        return ask(client, [user("a")])["content"]
{body}
""",
        copies=1,
        timeout=2.0 if fault == "is late" else 60.0,
    )
    assert [trajectory.outcome.stop for trajectory in done] == [
        StopReason.FAULT if trajectory.problem.id == "q1" else StopReason.ANSWERED for trajectory in done
    ]
    assert message in done[1].outcome.error


SHARED_CLIENT = """
import asyncio
async def my_agent(problem, client):
    async def ask(content):
        headers = {"Authorization": "Bearer " + client.api_key}
        body = {"model": client.model, "messages": [user(content)], "max_tokens": 6}
        url = client.base_url + "/chat/completions"
        return (await client.http_client.post(url, headers=headers, json=body)).raise_for_status().json()
"""


def test_the_shared_client_asks_without_a_connection(rollouts, monkeypatch):
    """And at the same time as a thread with connections of its own: each request opens one context."""
    servers = []
    initialize = harness_endpoint.uvicorn.Server.__init__

    def keep(server, config):
        initialize(server, config)
        servers.append(server)

    monkeypatch.setattr(harness_endpoint.uvicorn.Server, "__init__", keep)
    before = sys.getswitchinterval()
    done = rollouts(SHARED_CLIENT + "    return (await ask('Who?'))['choices'][0]['message']['content']\n")
    assert all(trajectory.outcome.error == "" and len(trajectory.contexts) == 1 for trajectory in done)
    assert [server.server_state.total_requests for server in servers] == [0]
    both = """
    thread = asyncio.to_thread(lambda: [post(client.base_url, client.api_key, "/chat/completions", {
        "model": client.model, "max_tokens": 4, "messages": [user("Same?")]}) for _ in range(4)])
    await asyncio.gather(thread, *(ask("Same?") for _ in range(4)))
    return "all"
"""
    for trajectory in rollouts(SHARED_CLIENT + both):
        assert trajectory.outcome.counts == {"requests": 8, "contexts": 8, "altered_replies": 0}
        assert all(len(sampled_runs(context)) == 1 for context in trajectory.contexts)
    assert servers[-1].server_state.total_requests == 4 * len(done)
    assert sys.getswitchinterval() == before


def test_a_harness_that_is_late_leaves_its_generation_to_the_engine(rollouts):
    """A cancelled request must neither answer its harness nor end the rollout."""
    done = rollouts(SHARED_CLIENT + "    return str(await ask('Who?'))\n", timeout=0.002)
    for trajectory in done:
        assert trajectory.outcome.stop is StopReason.FAULT
        assert trajectory.outcome.error == "the harness did not return within 0.002 s (agent.harness_timeout)"


def test_a_conversation_that_does_not_fit_is_refused_and_is_the_policys_doing(rollouts):
    (trajectory,) = rollouts(
        """
def my_agent(problem, client):
    ask(client, [user("short")])
    ask(client, [user("long " * 100)])
""",
        PROBLEMS[:1],
        1,
    )
    assert trajectory.outcome.stop is StopReason.CONTEXT_FULL
    assert len(trajectory.contexts) == 1


ASKING_PROGRAM = (
    POST
    + """
from types import SimpleNamespace
problem = json.load(sys.stdin)
client = SimpleNamespace(
    base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], model=os.environ["OPENAI_MODEL"]
)
ask(client, [user(problem["question"])])
"""
)

PROGRAM = (
    ASKING_PROGRAM
    + """
if problem["id"] == "q1":
    os.kill(os.getpid(), 9)
if problem["id"] == "q2":
    sys.exit("the shop is closed")
print("thinking ...")
print(json.dumps({"answer": "a0", "reward": 0.25}) if problem["id"] == "q0" else "a3")
"""
)


def test_a_program_answers_on_its_output_and_one_that_dies_is_a_fault(rollouts, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = rollouts(f"{sys.executable} {file}", copies=1)
    outcomes = [trajectory.outcome for trajectory in done]
    assert [outcome.stop.value for outcome in outcomes] == ["answered", "fault", "fault", "answered"]
    assert (outcomes[0].answer, outcomes[0].reward, outcomes[3].answer) == ("a0", 0.25, "a3")
    assert "status -9" in outcomes[1].error
    assert outcomes[2].error.endswith("the shop is closed")
    rewards = [scored.reward for scored in Harness(AgentConfig(harness="x")).rewards(done, Scoring(byte_tokenizer()))]
    assert rewards[0] == 0.25 and np.isnan(rewards[1:3]).all() and rewards[3] == 1.0


KILLED = (
    ASKING_PROGRAM
    + """
with open(STARTS, "ab", 0) as starts:
    starts.write(b".")
    if starts.tell() == 40:  # of 16 in a step
        os.kill(os.getpid(), 9)
print("an answer")
"""
)


@pytest.mark.slow
def test_a_harness_is_killed_in_step_3_and_the_run_goes_on(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"STARTS = {str(tmp_path / 'starts')!r}\n{KILLED}")
    harness = f"{sys.executable} {program}"
    flags = ["--rl.prompts_per_step", "8", "--rl.steps", "4", "--rl.evaluate_every", "0", "--agent.harness", harness]
    tpu_train.main([*with_flags(SMALL_RUN.split(), *flags), "--out", str(tmp_path / "run")])
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step.get("stop/fault", 0) for step in steps] == [0, 0, 1 / 16, 0]
    assert [step["contexts"] for step in steps] == [1.0] * 4


@pytest.mark.slow
def test_a_resumed_run_repeats_its_step(tmp_path):
    """A run in two parts samples what a run in one part samples. Each is a process of its own, with one device."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def train(*words):
        command = [sys.executable, "-m", "memsearcher_jax.launch", "train", *words]
        subprocess.run(command, env=environment, check=True, capture_output=True)

    file = tmp_path / "my_agent.py"
    file.write_text(POST + "def my_agent(problem, client):\n    return ask(client, [user('Who?')])['content'], 0.5\n")
    harness = ["--agent.harness", str(file)]
    flags = with_flags(SMALL_RUN.split(), "--rl.evaluate_every", "0", *harness)
    sampled = []
    for steps in ("2", "1"):
        out = tmp_path / steps
        train(*with_flags(flags, "--rl.steps", steps), "--out", str(out))
        if steps == "1":
            train("--resume", "--out", str(out), "--rl.steps", "2", *harness)
        files = sorted((out / "trajectories").glob("*.jsonl.gz"))
        sampled.append(
            [
                [context.ids.tolist() for context in scored.trajectory.contexts]
                for file in files
                for scored in read_trajectories(file)
            ]
        )
    assert sampled[0] == sampled[1] and len(sampled[0]) == 16


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALLS = '<tool_call>\n{"name": "search", "arguments": {"query": "Ada"}}\n</tool_call>'


def test_tool_calls_are_parsed_and_their_results_extend_the_context():
    with scripted_endpoint(f"I look it up. {CALLS}") as (client, session):
        messages = [{"role": "user", "content": "Who?"}]
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.content == "I look it up."
        (call,) = reply.message.tool_calls
        assert json.loads(call.function.arguments) == {"query": "Ada"}
        echoed = reply.message.model_dump(exclude_none=True)
        echoed["tool_calls"][0]["function"]["arguments"] = '{ "query" : "Ada" }'  # written anew
        messages += [echoed, {"role": "tool", "tool_call_id": call.id, "content": "Found."}]
        client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        assert len(session.contexts) == 1 and session.altered_replies == 0
        text = byte_tokenizer().transcript(session.contexts[0].ids.tolist())
        assert text.count("<tool_call>\n") == 2 and "<tool_response>\nFound.\n</tool_response>" in text
        untouched = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], tool_choice="none")
        assert untouched.choices[0].message.tool_calls is None and len(session.contexts) == 2


def test_a_stream_and_a_whole_reply_say_the_same():
    with scripted_endpoint(f"Text. {CALLS}") as (client, _):
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Who?"}], "tools": [TOOL]}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.content == whole.choices[0].message.content == "Text."
        (one,), (other,) = (found.choices[0].message.tool_calls for found in (whole, streamed))
        assert one.function.arguments == other.function.arguments
        assert streamed.usage.completion_tokens == whole.usage.completion_tokens > 0


def test_a_stop_ends_the_reply_before_it():
    with scripted_endpoint("one STOP two") as (client, session):
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Count."}]}
        reply = client.chat.completions.create(**asked, stop=["STOP"])
        assert reply.choices[0].message.content == "one "
        text = byte_tokenizer().transcript(session.contexts[0].ids.tolist())
        assert text.endswith("one STOP")


REFUSED = {
    "temperature": ({"temperature": 0.3}, 400, "training samples with 1"),
    "top_p": ({"top_p": 0.5}, 400, "training samples with 1"),
    "seed": ({"seed": 3}, 400, "training draws by the run's seed"),
    "n": ({"n": 2}, 400, "n: the endpoint does not support it"),
    "logprobs": ({"logprobs": True}, 400, "logprobs"),
    "tool_choice": ({"tool_choice": "required"}, 400, "tool_choice"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
    "model": ({"model": "gpt-4o"}, 404, "use 'policy'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_one_clear_error(name):
    changes, status, message = REFUSED[name]
    with scripted_endpoint("a reply") as (client, _):
        body = {"model": "policy", "messages": [{"role": "user", "content": "Who?"}]} | changes
        headers = {"Authorization": f"bearer {client.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{client.base_url}chat/completions", json.dumps(body).encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request)
        assert raised.value.code == status
        assert message in json.load(raised.value)["error"]["message"]


def test_the_endpoint_knows_its_model_and_its_keys():
    with scripted_endpoint("a reply", fixed_sampling=False) as (client, session):
        assert [model.id for model in client.models.list()] == ["policy"] == [client.models.retrieve("policy").id]
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Who?"}]}
        client.chat.completions.create(**asked, temperature=0.3, seed=1)  # not in training
        session.is_ended = True
        with pytest.raises(Exception, match="the trajectory has ended"):
            client.chat.completions.create(**asked)
        with pytest.raises(Exception, match="names no trajectory"):
            client.with_options(api_key="wrong").chat.completions.create(**asked)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", ("a", None)),
        (0.5, (None, 0.5)),
        (("a", 1), ("a", 1.0)),
        ({"answer": "a"}, ("a", None)),
        (None, (None, None)),
        (True, (None, 1.0)),
    ],
)
def test_a_harness_returns_an_answer_a_reward_or_both(value, expected):
    assert parse_result(value) == expected
    assert parse_output(f"noise\n{json.dumps(value) if isinstance(value, dict) else expected[0] or ''}\n\n")[0] in (
        expected[0],
        "noise",
    )


MEMSEARCHER = '''
import sys
import threading
from memsearcher_jax.types import Completion, FinishReason, Generate, Passage, Prompt, SearchResult
from tests.rl.test_harness import agent, TOKENIZER, messages_of

def my_agent(problem, client):
    """The project's own workflow, whose requests go over HTTP."""
    workflow = agent().start(problem, TOKENIZER)
    response, messages = None, []
    while True:
        try:
            request = workflow.send(response)
        except StopIteration as end:
            return end.value.answer if end.value.stop.value == "answered" else None
        if not isinstance(request, Generate):
            response = ()
            for query in request.queries:
                found = post(client.base_url, client.api_key, "/search", {"query": query.text, "top_n": query.top_n})
                response += (SearchResult(tuple(Passage(**passage) for passage in found["passages"])),)
            continue
        if isinstance(request.text, Prompt):
            messages = []
        new, prefill = messages_of(request.text)
        messages = [*messages, *new]
        body = {"model": client.model, "max_tokens": request.max_tokens, "messages": messages}
        if prefill:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
            body["messages"] = [*messages, {"role": "assistant", "content": prefill}]
        choice = post(client.base_url, client.api_key, "/chat/completions", body)["choices"][0]
        messages.append({"role": "assistant", "content": prefill + choice["message"]["content"]})
        finish = FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP
        response = Completion(choice["message"]["content"], finish)
'''
TOKENIZER = ChatTokenizer.load(located("package:tiny"))


def agent():
    return make_agent(tiny().agent)


def messages_of(text):
    """(messages, beginning of the reply) of what a workflow appends: each of its segments is a part of a message."""
    spans = text.segments if hasattr(text, "segments") else text
    messages, prefill = [], ""
    for span in spans:
        if not span.trusted:
            messages[-1]["content"].append({"type": "text", "text": span.text})
            continue
        *ended, rest = span.text.split("<|im_end|>\n") if "<|im_end|>\n" in span.text else [span.text]
        for piece in [*ended, rest]:
            _, opened, content = piece.rpartition("<|im_start|>")
            if not opened:
                if piece.strip("\n") or (piece and messages):
                    messages[-1]["content"].append({"type": "text", "text": piece})
                continue
            role, _, content = content.partition("\n")
            if role == "assistant":
                prefill = content
            else:
                messages.append({"role": role, "content": [{"type": "text", "text": content}] if content else []})
    return messages, prefill


def test_memsearcher_over_http_samples_what_the_workflow_samples(one_device, tmp_path):
    """The same contexts, masks, rewards and advantages, in float32, with the same draws."""
    config = tiny()
    sampling = replace(config.sampling, slots=8, decode_batch_sizes=())
    engine = Engine(config.model, sampling, TOKENIZER.stop_ids, one_device)
    with jax.set_mesh(one_device):
        _, loaded = weights.load(located(config.model.path), mesh=one_device, dtype="float32")
    params = sharding.publish_program(config.model, one_device, tuple(one_device.devices.flat), "float32")(loaded)
    params = sharding.on_submesh(params, one_device)
    encyclopedia = make_encyclopedia(
        replace(config.data.encyclopedia, train_people=16, train_questions=8, test_questions=4)
    )
    backends = {"": search_backend(TinyIndex(encyclopedia.passages))}
    problems = encyclopedia.train[:4]
    jobs = make_jobs(problems, 2)
    start = lambda problem: agent().start(problem, TOKENIZER)  # noqa: E731
    workflow, _ = RolloutDriver(engine, TOKENIZER, start, backends).trajectories(jobs, params, KEY, lambda line: None)
    file = tmp_path / "my_agent.py"
    file.write_text(POST + MEMSEARCHER)
    settings = HarnessSettings(str(file), timeout=120.0, max_tokens=512)
    driver = HarnessDriver(engine, TOKENIZER, start, backends, harness=settings)
    harness, _ = driver.trajectories(jobs, params, KEY, lambda line: None)
    for one, other in zip(workflow, harness, strict=True):
        assert other.outcome.error == ""
        assert len(one.contexts) == len(other.contexts)
        for mine, theirs in zip(one.contexts, other.contexts, strict=True):
            assert list(mine.ids) == list(theirs.ids)
            assert list(mine.sampled) == list(theirs.sampled)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
        assert (one.outcome.answer or None) == (other.outcome.answer or None)
    assert sum(len(trajectory.contexts) for trajectory in harness) > 8
