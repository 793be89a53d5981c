"""A served agent in this process, on loopback: the small weights of the package on the synthetic encyclopedia."""

import contextlib
import threading
import time

import pytest
import uvicorn

from memsearcher_jax.http.listener import listen
from memsearcher_jax.launch import cli, serve_agent
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.serving.app import make_app
from tests.support import one_device

SMALL = ["--sampling.slots", "8", "--sampling.decode_batch_sizes", "--retrieval.index_type", "exact"]
LIMITS = ["--limits.max_body_bytes", "100000", "--limits.read_timeout", "5", "--limits.max_memories", "2"]


def flags_of(name, *more):
    checkpoint = str(located(f"package:{name}"))
    return cli.parse(serve_agent.ServeAgent, ["--config", name, "--checkpoint", checkpoint, *LIMITS, *more])


@contextlib.contextmanager
def serve(agent, key="", cors_origins=()):
    """The address of the agent's service."""
    with listen("127.0.0.1", 0) as listener:
        app = make_app(agent, "tiny", key, cors_origins=cors_origins)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def agent(tmp_path_factory):
    with one_device():
        return serve_agent.open_agent(flags_of("tiny", *SMALL), tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="session")
def url(agent):
    with serve(agent) as address:
        yield address


@pytest.fixture
def serving():
    return serve


@pytest.fixture
def flags():
    return flags_of
