"""docs/pods.md: the output of every dry run equals the documented output, in which `…` means any lines."""

import re
import shlex
from pathlib import Path

import pytest

from memsearcher_jax.launch.pod import jobset, queued_resource

ROOT = Path(__file__).resolve().parents[2]
INDENT = "    "


def documented_outputs(text):
    """Maps each command after `$` to the indented text below it, up to the next empty line."""
    blocks = re.findall(rf"^{INDENT}\$ ((?:.*\\\n)*.*)\n((?:{INDENT}.*\n)*)", text, flags=re.MULTILINE)
    return {command.replace("\\\n", ""): re.sub(f"^{INDENT}", "", output, flags=re.M) for command, output in blocks}


def matches(output, documented):
    return re.fullmatch(re.escape(documented).replace("…\\\n", "(?:.*\n)*"), output) is not None


DRY_RUNS = documented_outputs((ROOT / "docs" / "pods.md").read_text(encoding="utf-8"))


def test_the_page_shows_every_launch_command():
    words = [shlex.split(command) for command in DRY_RUNS]
    assert {(Path(line[1]).name, line[2] if line[2].isalpha() else "") for line in words} == {
        ("jobset.py", ""),
        *(("queued_resource.py", action) for action in ("create", "status", "ssh", "delete")),
    }
    assert all("--dry_run" in line[: line.index("--") if "--" in line else None] for line in words)


@pytest.mark.parametrize("command", DRY_RUNS)
def test_a_dry_run_prints_the_documented_output(command, capsys):
    _, file, *words = shlex.split(command)
    program = {"jobset.py": jobset, "queued_resource.py": queued_resource}[Path(file).name]
    program.main(words)
    assert matches(capsys.readouterr().out, DRY_RUNS[command])
