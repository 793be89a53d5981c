"""The console command `memsearcher`: one subcommand for each program in launch/.

memsearcher train --config tiny
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from memsearcher_jax.launch import cli

# Module and summary of each subcommand; only the module of the chosen one is imported.
COMMANDS = {
    "train": ("tpu_train", "train a search agent"),
    "sft": ("sft", "train a search agent to imitate recorded trajectories"),
    "evaluate": ("evaluate", "evaluate a checkpoint"),
    "sweep": ("sweep", "train or evaluate each value of a setting"),
    "compare": ("compare", "compare two evaluations"),
    "report": ("report", "write the report of a run as an HTML page"),
    "ask": ("ask", "ask one question and watch the agent"),
    "export_hf": ("export_hf", "write a checkpoint as a Hugging Face directory"),
    "build_corpus": ("build_corpus", "turn a folder of documents into a corpus"),
    "import_gguf": ("import_gguf", "convert a GGUF file to a Hugging Face directory"),
    "build_index": ("build_index", "build the index of a corpus"),
    "serve_agent": ("serve_agent", "serve a trained agent over HTTP"),
    "serve_search": ("serve_search", "serve search over HTTP"),
    "plan_tpu": ("plan_tpu", "plan a run on a TPU slice"),
    "jobset": ("pod.jobset", "start a run on Google Kubernetes Engine"),
    "queued_resource": ("pod.queued_resource", "start a run on TPU VMs"),
}


def main() -> None:
    cli.run(run_command)


def run_command(argv: Sequence[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv else ("", ())
    if name in COMMANDS:
        sys.argv = [f"memsearcher {name}", *rest]  # tyro prints the first word as the program's name
        importlib.import_module(f"memsearcher_jax.launch.{COMMANDS[name][0]}").main(sys.argv[1:])
        return
    usage = "\n".join(f"    {command:<16} {summary}" for command, (_, summary) in COMMANDS.items())
    if name in ("", "-h", "--help"):
        text = f"usage: memsearcher COMMAND ...\n\n{usage}\n\nmemsearcher COMMAND --help lists the flags of a command."
        print(text, flush=True)
        return
    print(f"error: no command {name!r}: choose one of {', '.join(COMMANDS)}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
