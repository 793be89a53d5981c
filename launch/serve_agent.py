"""Serves a trained agent: OpenAI's chat completions, MCP tools, and a page in the browser. See docs/serve.md.

python launch/serve_agent.py --checkpoint runs/NAME                           # http://127.0.0.1:8000
python launch/serve_agent.py --checkpoint runs/NAME --api_key_env AGENT_KEY   # clients need the key in AGENT_KEY
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from memsearcher_jax.agent.base import ReadingAgent
from memsearcher_jax.config import agent_of
from memsearcher_jax.http.listener import listen
from memsearcher_jax.launch import cli, preconditions
from memsearcher_jax.launch.serve_search import run_server
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.ranges import Port
from memsearcher_jax.rl.config import read_key
from memsearcher_jax.serving.config import AgentLimits
from memsearcher_jax.types import Problem

if TYPE_CHECKING:
    from memsearcher_jax.serving.agent import AgentService


@dataclass(frozen=True)
class ServeAgent(cli.Command):
    """Serve a trained agent."""

    has_result: ClassVar[bool] = False

    name: str = ""
    """The model's name for clients. Default: that of the directory in --checkpoint."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: for all interfaces."""
    port: Port = 8_000
    """Port to listen on; 0 for any free one."""
    api_key_env: str = ""
    """Environment variable that holds the key which clients must send; empty: no key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the service from a browser, such as https://host; "*" for all."""
    limits: AgentLimits = field(default_factory=AgentLimits)


def main(argv: Sequence[str]) -> None:
    with contextlib.ExitStack() as resources:
        with cli.one_line_errors():
            flags = cli.parse(ServeAgent, argv)
            preconditions.require_extra("serve", "fastapi", "uvicorn", "mcp")
            preconditions.require_checkpoint(flags.run)
            preconditions.require_inputs(flags.run)
            if flags.run.memalpha.answer_from != "memory":
                raise ValueError("questions are answered from the memory: omit memalpha.answer_from")
            for origin in flags.cors_origins:
                if not re.fullmatch(r"\*|null|[a-z-]+://[^/A-Z]+", origin):
                    raise ValueError(f"--cors_origins {origin}: write https://host, without a path")
            key = read_key(flags.api_key_env, "--api_key_env") if flags.api_key_env else ""
            listener = resources.enter_context(listen(flags.host, flags.port))
            scratch = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            agent = resources.enter_context(contextlib.closing(open_agent(flags, scratch)))

        from memsearcher_jax.serving.app import make_app

        name = flags.name or Path(flags.run.model.path).resolve().name.partition("@")[0]  # of the Hub: NAME@COMMIT
        app = make_app(agent, name, key, flags.host, flags.cors_origins)
        run_server(app, flags.limits, listener, f"the agent {name}", 30, agent.end_requests)


def open_agent(flags: ServeAgent, scratch: Path) -> AgentService:
    """The agent of the checkpoint with evaluation's settings; all programs are compiled."""
    with announced() as begin:
        begin("loading JAX")  # seconds; --help and errors do not need it
        from memsearcher_jax.rl import setup
        from memsearcher_jax.serving.agent import AgentService

        agent = agent_of(flags.run)
        problem = agent.text_problem(["any"], "any") if isinstance(agent, ReadingAgent) else Problem("any", "any", ())
        index = preconditions.reusable_index(flags.run)
        begin("opening the model's files and the index")
        run = setup.prepare(flags.run, scratch, training=False, questions=[problem], index=index)
        return AgentService(run, flags.limits, begin)
