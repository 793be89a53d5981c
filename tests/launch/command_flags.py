"""The flags of every command, for tests that hold for each of them."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from memsearcher_jax.config import RunConfig
from memsearcher_jax.launch import (
    ask,
    build_corpus,
    build_index,
    check_device,
    cli,
    compare,
    evaluate,
    export_hf,
    import_gguf,
    make_questions,
    plan_tpu,
    report,
    serve_agent,
    serve_search,
    sft,
    sweep,
    tpu_train,
)
from memsearcher_jax.launch.pod import jobset, queued_resource

COMMANDS: dict[str, type] = {
    "train": tpu_train.Train,
    "sft": sft.SFT,
    "evaluate": evaluate.Evaluate,
    "sweep": sweep.Sweep,
    "compare": compare.Compare,
    "report": report.Report,
    "ask": ask.Ask,
    "export_hf": export_hf.Export,
    "import_gguf": import_gguf.ImportGGUF,
    "build_corpus": build_corpus.BuildCorpus,
    "build_index": build_index.BuildIndex,
    "make_questions": make_questions.MakeQuestions,
    "serve_agent": serve_agent.ServeAgent,
    "serve_search": serve_search.Serve,
    "check_device": check_device.CheckDevice,
    "plan_tpu": plan_tpu.PlanTpu,
    "jobset": jobset.Jobset,
    "queued_resource": queued_resource.QueuedResource,
}
"""The name of each command and the dataclass of its flags."""

REQUIRED = {
    "sweep": {"setting": "seed=0,1", "out": "out"},
    "compare": {"first": "a", "second": "b"},
    "report": {"run": "a"},
    "import_gguf": {"file": "a.gguf", "out": "out"},
    "build_corpus": {"folder": "documents", "out": "out"},
    "make_questions": {"passages": "passages.jsonl", "out": "out"},
    "jobset": {"topology": "v6e:4x8", "image": "i", "name": "n", "config": "nano", "out": "gs://b/d"},
    "queued_resource": {"action": "status", "name": "n", "zone": "z"},
}
"""The flags that a command does not run without, and a value of each."""

POSITIONALS = {
    "compare": ("first", "second"),
    "report": ("run",),
    "ask": ("question",),
    "import_gguf": ("file",),
    "build_corpus": ("folder",),
    "queued_resource": ("action", "name"),
}
"""The flags of a command that are written without their name."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command."""

    command: str
    name: str
    hint: Any

    @property
    def plain_type(self) -> Any:
        """The type without annotations."""
        return self.hint.__origin__ if typing.get_origin(self.hint) is typing.Annotated else self.hint

    @property
    def is_path(self) -> bool:
        marked = cli.IS_PATH in getattr(self.hint, "__metadata__", ())
        return marked or Path in (self.plain_type, *typing.get_args(self.plain_type))

    @property
    def is_text(self) -> bool:
        """Whether any text is a value."""
        members = typing.get_args(self.plain_type) if self.is_list else (self.plain_type,)
        return str in members

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.plain_type) is tuple


def flags_of(command: str) -> list[Flag]:
    """The flags of a command, without the settings of a run and without groups of flags."""
    hints = typing.get_type_hints(COMMANDS[command], include_extras=True)
    flags = [Flag(command, name, hint) for name, hint in hints.items()]
    return [flag for flag in flags if not dataclasses.is_dataclass(flag.plain_type)]


def takes_settings(command: str) -> bool:
    return issubclass(COMMANDS[command], cli.Command)


def parsed(command: str, name: str, *values: str, joined: bool = False) -> Any:
    """The flags of a command that is given one flag, or one setting, and what it does not run without.

    `joined`: written as --flag=value.
    """
    kind = COMMANDS[command]
    given = {required: [value] for required, value in REQUIRED.get(command, {}).items()} | {name: list(values)}
    positionals, words = [], []
    for flag, texts in given.items():
        if flag in POSITIONALS.get(command, ()):
            positionals += texts
        elif joined:
            words += [f"--{flag}={texts[0]}", *texts[1:]]
        else:
            words += [f"--{flag}", *texts]
    default = kind(run=RunConfig()) if takes_settings(command) else None
    return cli.parse_flags(kind, [*positionals, *words], default)
