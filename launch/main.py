"""The console command `memsearcher`: one subcommand for each program in launch/.

memsearcher train --config tiny
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from memsearcher_jax.launch import interrupts

# The module of each subcommand; only that of the chosen one is imported.
COMMANDS = {
    "train": "tpu_train",
    "sft": "sft",
    "evaluate": "evaluate",
    "sweep": "sweep",
    "compare": "compare",
    "report": "report",
    "ask": "ask",
    "export_hf": "export_hf",
    "import_gguf": "import_gguf",
    "build_corpus": "build_corpus",
    "build_index": "build_index",
    "make_questions": "make_questions",
    "serve_agent": "serve_agent",
    "serve_search": "serve_search",
    "check_device": "check_device",
    "plan_tpu": "plan_tpu",
    "jobset": "pod.jobset",
    "queued_resource": "pod.queued_resource",
}


def main() -> None:
    """Runs the command in the file that Python was started with, or the one that the first argument names."""
    interrupts.end_at_once()
    gc.set_threshold(20_000)  # for 700: imports and JAX's traces create much and free little, a tenth of a start
    from memsearcher_jax.launch import cli

    cli.run(run_command)


def run_command(argv: Sequence[str]) -> None:
    of_file = {module.rpartition(".")[2]: module for module in COMMANDS.values()}
    module = of_file.get(Path(sys.argv[0]).stem)
    name = ""
    rest = argv
    if not module and argv:
        name, *rest = argv
        module = COMMANDS.get(name)
        sys.argv = [f"memsearcher {name}", *rest]  # tyro prints the first word as the program's name
    if module:
        importlib.import_module(f"memsearcher_jax.launch.{module}").main(rest)
    elif name in ("", "-h", "--help"):
        print("usage: memsearcher COMMAND ...\n")
        for command, module in COMMANDS.items():
            source = Path(__file__).parent / f"{module.replace('.', '/')}.py"
            summary = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").splitlines()[0]
            print(f"    {command:<16} {summary}")
        print("\nmemsearcher COMMAND --help lists the flags of a command.", flush=True)
    else:
        print(f"error: no command {name!r}: choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
