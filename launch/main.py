"""The console command `memsearcher`: one subcommand for each program in launch/.

memsearcher train --config tiny
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from memsearcher_jax.launch import interrupts

# The subcommands, and the modules whose name differs; only the module of the chosen one is imported.
COMMANDS = (
    "train",
    "sft",
    "evaluate",
    "sweep",
    "compare",
    "report",
    "ask",
    "export_hf",
    "import_gguf",
    "build_corpus",
    "build_index",
    "serve_agent",
    "serve_search",
    "plan_tpu",
    "jobset",
    "queued_resource",
)
MODULES = {"train": "tpu_train", "jobset": "pod.jobset", "queued_resource": "pod.queued_resource"}


def main() -> None:
    interrupts.end_at_once()
    from memsearcher_jax.launch import cli

    cli.run(run_command)


def run_file(file: str) -> NoReturn:
    """Runs the command of a file in launch/, and exits. It is imported again, by its name in the package."""
    interrupts.end_at_once()
    from memsearcher_jax.launch import cli

    package = "memsearcher_jax.launch.pod" if Path(file).parent.name == "pod" else "memsearcher_jax.launch"
    cli.run(importlib.import_module(f"{package}.{Path(file).stem}").main)
    raise SystemExit


def run_command(argv: Sequence[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv else ("", ())
    if name in COMMANDS:
        sys.argv = [f"memsearcher {name}", *rest]  # tyro prints the first word as the program's name
        importlib.import_module(f"memsearcher_jax.launch.{MODULES.get(name, name)}").main(sys.argv[1:])
    elif name in ("", "-h", "--help"):
        print("usage: memsearcher COMMAND ...\n")
        for command in COMMANDS:
            source = Path(__file__).parent / f"{MODULES.get(command, command).replace('.', '/')}.py"
            summary = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").splitlines()[0]
            print(f"    {command:<16} {summary}")
        print("\nmemsearcher COMMAND --help lists the flags of a command.", flush=True)
    else:
        print(f"error: no command {name!r}: choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
