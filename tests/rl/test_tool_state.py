"""Tools that each trajectory has of its own: classes, environments of TRL, and sessions of a server."""

import json
import math
import threading
from dataclasses import replace
from functools import partial

import jax
import pytest
import uvicorn

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.tool_state import named_tools
from memsearcher_jax.logs.trajectories import compress_trajectories, read_trajectories
from memsearcher_jax.python_files import load
from memsearcher_jax.rl.rewards import RewardFn
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.rl.tool_executor import search_backend, tool_backends
from memsearcher_jax.rl.tool_state import lifecycle_tools, with_own_tools
from memsearcher_jax.rl.toolbox import open_tools
from memsearcher_jax.types import (
    Call,
    Generate,
    Outcome,
    Problem,
    ScoredTrajectory,
    StopReason,
)
from tests.http_server import until
from tests.support import byte_tokenizer, make_prompt

TOKENIZER = byte_tokenizer()
PROBLEMS = [Problem(name, f"Buy {name}", (name,), {"price": price}) for price, name in enumerate(("tea", "jam"), 1)]
SHOP = '''
OPEN, CLOSED = [], []

class Shop:
    def __init__(self, problem):
        self.problem, self.cart = problem, []
        OPEN.append(self)
        if problem.id == "broken":
            raise KeyError("no such shop")

    def add(self, item: str, count: int = 1) -> list:
        """Puts an item into the cart."""
        self.cart += [item] * count
        return self.cart

    async def total(self) -> dict:
        """The price of the cart."""
        return {"total": len(self.cart) * self.problem.metadata["price"]}

    def helper(self):
        return "no docstring, no tool"

    def reward(self):
        if "poison" in self.cart:
            raise ValueError("bad cart")
        return len(self.cart) / 2

    def close(self):
        CLOSED.append(self.problem.id)
'''
ENVIRONMENT = '''
class Guess:
    def __init__(self):
        self.tries = None

    def reset(self, prompt, price, **kwargs) -> str | None:
        self.price, self.tries = price, 0
        self.reward = 1.0  # a number of its own
        assert prompt == [{"role": "user", "content": kwargs["question"]}]
        return f"It costs less than {price + 5}."

    def guess(self, price: int) -> str:
        """
        Guess the price.

        Args:
            price: The price.

        Returns:
            Whether it is right.
        """
        self.tries += 1
        if price > 100:
            raise ValueError("too expensive")
        return "right" if price == self.price else "wrong"

    def get_reward(self) -> float:
        return 1.0 / self.tries
'''


@pytest.fixture
def named(tmp_path):
    def write(source, name):
        path = tmp_path / "mine.py"
        path.write_text(source, encoding="utf-8")
        return f"{path}:{name}"

    return write


def workflow(problem, calls, shown):
    """Makes the problem's calls one after the other."""
    shown[problem.id] = [problem.question]
    yield Generate(make_prompt("", problem.question[:6], "", "", ""), 3)
    for name, arguments in calls[problem.id]:
        result = yield Call(name, arguments)
        shown[problem.id].append(result.text or result.error)
        yield Generate(make_prompt("", "more", "", "", ""), 3)
    if calls[problem.id] and calls[problem.id][-1][1].get("item") == "crash":
        raise RuntimeError("crashed")
    return Outcome(StopReason.ANSWERED, problem.id)


def run(engine, params, tools, calls, problems=PROBLEMS, question_tokens=200):
    shown = {}
    start = with_own_tools(partial(workflow, calls=calls, shown=shown), tools, TOKENIZER, question_tokens)
    backends = {"": search_backend(None)} | tool_backends([*tools, *lifecycle_tools(tools)])
    driver = RolloutDriver(engine, TOKENIZER, start, backends)
    done, _ = driver.trajectories(make_jobs(problems, 1), params, jax.random.key(0), lambda line: None)
    return done, shown


def test_a_class_is_made_for_each_trajectory_rewarded_and_closed(engine, params, named, tmp_path):
    tools = named_tools(value := named(SHOP, "Shop"))
    assert [tool.name for tool in tools] == ["add", "total"]
    assert tools[0].schema["parameters"]["required"] == ["item"]
    problems = [*PROBLEMS, Problem("broken", "Buy", ()), Problem("poison", "Buy", ()), Problem("crash", "Buy", ())]
    calls = {
        "tea": [("add", {"item": "tea"}), ("add", {"item": "milk", "count": 2}), ("total", {})],
        "jam": [("total", {}), ("add", {"items": "jam"})],
        "broken": [],
        "poison": [("add", {"item": "poison"})],
        "crash": [("add", {"item": "crash"})],
    }
    done, shown = run(engine, params, tools, calls, problems)
    assert shown["tea"][1:] == ['["tea"]', '["tea", "milk", "milk"]', '{"total": 3}']
    assert shown["jam"][1] == '{"total": 0}' and "missing a required argument: 'item'" in shown["jam"][2]
    tea, jam, broken, poison, crash = done
    assert (tea.outcome.tool_reward, jam.outcome.tool_reward) == (1.5, 0.0)
    assert tea.tool_results[-1].text == "1.5" and [one.tool for one in jam.tool_results[:2]] == ["Shop (made)", "total"]
    assert [one.outcome.stop for one in done[2:]] == [StopReason.FAULT] * 3
    assert "no such shop" in broken.outcome.error and "mine.py, line 9)" in broken.outcome.error
    assert "bad cart" in poison.outcome.error and "crashed" in crash.outcome.error
    module = load(value.rpartition(":")[0], "agent.tools")
    assert len({id(shop) for shop in module.OPEN}) == 5
    until(lambda: sorted(module.CLOSED) == ["crash", "jam", "poison", "tea"], 10)
    (tmp_path / "log.gz").write_bytes(compress_trajectories([ScoredTrajectory(one, 0.0) for one in done]))
    assert [one.trajectory.outcome.tool_reward for one in read_trajectories(tmp_path / "log.gz")][:2] == [1.5, 0.0]

    reward_fn = RewardFn(make_agent(AgentConfig()), TOKENIZER)
    scored = reward_fn(done, jax.random.key(0), print)
    without = replace(tea, outcome=replace(tea.outcome, tool_reward=None))
    (alone,) = reward_fn([without], jax.random.key(0), print)
    assert scored[0].reward == alone.reward + 1.5 and scored[0].scores["tool_reward"] == 1.5
    assert "tool_reward" not in alone.scores and all(math.isnan(one.reward) for one in scored[2:])


def test_an_environment_of_trl_works_unchanged(engine, params, named):
    tools = named_tools(named(ENVIRONMENT, "Guess"))
    assert [tool.name for tool in tools] == ["guess"] and "Whether it is right." in tools[0].schema["description"]
    calls = {"tea": [("guess", {"price": 3}), ("guess", {"price": 1})], "jam": [("guess", {"price": 999})]}
    done, shown = run(engine, params, tools, calls)
    assert shown["tea"] == ["Buy tea\n\nIt costs less than 6.", "wrong", "right"]
    assert shown["jam"][0].endswith("less than 7.") and "too expensive" in shown["jam"][1]
    assert [one.outcome.tool_reward for one in done] == [0.5, 1.0]
    (long, _), _ = run(engine, params, tools, calls, question_tokens=12)
    assert long.outcome.stop is StopReason.FAULT and "raise agent.question_tokens" in long.outcome.error


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def Shop(): ...", "Shop", "must be a class; FILE.py alone names functions"),
        ("class Shop:\n    def add(self, item: str): ...", "Shop", "has no public method with a docstring"),
        ("class Shop: ...", "Store", "defines no Store"),
        ('class Shop:\n    def add(self, item):\n        """Adds."""', "Shop", "line 2: add has a parameter without"),
    ],
)
def test_a_mistake_in_a_class_is_one_line(source, name, message, named):
    with pytest.raises(ValueError, match=r"^agent\.tools .*" + message.replace("(", r"\(")) as error:
        named_tools(named(source, name))
    assert "\n" not in str(error.value)


def test_a_run_with_states_cannot_be_replayed(named, tmp_path):
    open_tools(AgentConfig(tools=(named(SHOP, "Shop"),)), tmp_path)
    with pytest.raises(ValueError, match="its tool add has a state for each trajectory"):
        open_tools(AgentConfig(replay=str(tmp_path)), tmp_path / "other")


class SessionServer:
    """A server over HTTP that keeps a session for each connection, as many do; it says which calls one has made."""

    def __init__(self):
        self.sessions = {}  # the texts of each
        self.ended = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        session = dict(scope["headers"]).get(b"mcp-session-id", b"").decode()
        status, answer, headers = 200, None, []
        if scope["method"] == "DELETE":
            self.ended.append(session)
        elif scope["method"] != "POST":
            status = 405
        else:
            request = json.loads(body)
            result = self.result(request, session)
            if request["method"] == "initialize":
                session = f"s{len(self.sessions)}"
                self.sessions[session] = []
                headers = [(b"mcp-session-id", session.encode())]
            if "id" not in request:
                status = 202
            elif result is None:
                error = {"code": -32601, "message": "no such method"}
                answer = {"jsonrpc": "2.0", "id": request["id"], "error": error}
            else:
                answer = {"jsonrpc": "2.0", "id": request["id"], "result": result}
        headers.append((b"content-type", b"application/json"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode() if answer else b""})

    def result(self, request, session):
        if request["method"] == "initialize":
            about = {"name": "cart", "version": "1"}
            version = request["params"]["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        if request["method"] == "tools/list":
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
            return {"tools": [{"name": "note", "description": "Notes.", "inputSchema": schema}]}
        if request["method"] == "tools/call":
            self.sessions[session].append(request["params"]["arguments"]["text"])
            return {"content": [{"type": "text", "text": " ".join(self.sessions[session])}]}
        return None


def test_a_server_with_sessions_gets_one_for_each_trajectory(engine, params, tmp_path):
    pytest.importorskip("mcp")
    app = SessionServer()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        address = f"mcp:http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
        tools = open_tools(AgentConfig(tools=(address,)), tmp_path)
        calls = {
            "tea": [("note", {"text": "a"}), ("note", {"text": "b"})],
            "jam": [("note", {"text": "c"}), ("note", {"text": "d"})],
        }
        done, shown = run(engine, params, tools, calls)
        assert (shown["tea"][1:], shown["jam"][1:]) == (["a", "a b"], ["c", "c d"])
        assert len(app.sessions) == 3, "one listed the tools"
        assert [len(one.tool_results) for one in done] == [2, 2] and done[0].outcome.tool_reward is None
        until(lambda: len(app.ended) == 2, 10)
    finally:
        server.should_exit = True
        thread.join()
