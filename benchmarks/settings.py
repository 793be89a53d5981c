"""Rollouts of training by the values of one setting, such as rl.carry_over or sampling.slots.

python benchmarks/settings.py --setting rl.carry_over=0,1,2 --search-delay 2 -- --config tiny
python benchmarks/settings.py --setting sampling.decode_steps_per_call=8,16,32 -- --config tiny

Trains for a few steps with each value, at a learning rate that changes no weight, so that all values sample alike.
Prints, over the steps after the first --skip, trajectories and tokens per second of rollout, the share of idle slots,
and with carried trajectories the share of the generated tokens that were of interrupted contexts, and the mean
staleness. With --search-delay, searches ask a service that answers after a random time of up to that many seconds.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import common
import service
import tyro

from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.launch import cli
from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.runtime.run_dir import read_run_config

FROZEN = ("--training.learning_rate", "1e-30", "--rl.evaluate_every", "0", "--rl.save_trajectories", "False")


@dataclass(frozen=True)
class Flags:
    """What to measure. The flags of training follow after --, the preset first."""

    setting: str
    """A setting and its values: rl.carry_over=0,1,2."""
    steps: int = 8
    """Steps to train, with those to skip."""
    skip: int = 2
    """First steps, which compile and in which nothing is carried yet."""
    search_delay: float = 0.0
    """Longest delay of a search, in seconds."""
    json: Path | None = None
    """Also write the results to this file."""


def measure(flags: Flags, training: list[str]) -> Iterator[dict[str, float | str]]:
    """A row for each value."""
    name, _, values = flags.setting.partition("=")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if flags.search_delay:
            _, url = stack.enter_context(service.serving(service.Load(serve=" ".join(training[:2]))))
            encyclopedia = make_encyclopedia(cli.load_preset(training[1]).data.encyclopedia)
            rows = [json.dumps(asdict(problem)) + "\n" for problem in encyclopedia.train]
            (folder / "questions.jsonl").write_text("".join(rows), encoding="utf-8")
            slow = stack.enter_context(delayed(url, flags.search_delay))
            training = [*training, "--retrieval.url", slow, "--data.train", str(folder / "questions.jsonl")]
        for value in values.split(","):
            words = [*training, *FROZEN, "--rl.steps", flags.steps, f"--{name}", value, "--out", folder / value]
            common.run_child(common.REPOSITORY / "launch" / "tpu_train.py", *words)
            yield {name: value} | summary(folder / value, flags.skip)


def summary(run: Path, skip: int) -> dict[str, float]:
    """Means over the steps of a run."""
    rl, steps = read_run_config(run).rl, read_metrics(run / METRICS_FILE)[skip:]
    tokens = sum(step["generated_tokens"] for step in steps)
    seconds = sum(step["generated_tokens"] / step["tokens_per_second"] for step in steps)
    row = {
        "trajectories/s": len(steps) * rl.prompts_per_step * rl.group_size / seconds,
        "tokens/s": tokens / seconds,
        "idle slots": sum(step["idle_slot_share"] for step in steps) / len(steps),
    }
    if rl.carry_over:
        row["interrupted tokens"] = sum(step["interrupted_tokens"] for step in steps) / tokens
        row["staleness"] = sum(step["staleness"] for step in steps) / len(steps)
    return row


@contextlib.contextmanager
def delayed(url: str, max_seconds: float) -> Iterator[str]:
    """The address of a proxy for the service at `url` that answers searches after a random time."""
    rng = random.Random(0)

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(rng.uniform(0, max_seconds))
            self._forward(body)

        def do_GET(self) -> None:
            self._forward(None)

        def _forward(self, body: bytes | None) -> None:
            request = urllib.request.Request(url + self.path, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Only the results are printed."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    own, training = cli.split_passthrough(sys.argv[1:])
    flags = tyro.cli(Flags, description=__doc__, args=own)
    common.report(measure(flags, list(training)), flags.json)
