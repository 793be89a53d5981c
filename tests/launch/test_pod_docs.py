"""docs/pods.md: the output of every dry run equals the documented output."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDENT = "    "


def documented_outputs(text):
    """Maps each command after `$` to the indented lines below it, up to the next empty line."""
    blocks = re.findall(rf"^{INDENT}\$ ((?:.*\\\n)*.*)\n((?:{INDENT}.*\n)*)", text, flags=re.MULTILINE)
    return {
        command.replace("\\\n", ""): [line[len(INDENT) :] for line in output.splitlines()] for command, output in blocks
    }


DRY_RUNS = documented_outputs((ROOT / "docs" / "pods.md").read_text(encoding="utf-8"))


def test_commands_and_outputs_are_parsed_from_a_page():
    page = "a\n\n    $ run \\\n        -- two\n    1\n      2\n\n    no command\n\n    $ three\n    3\n"
    assert documented_outputs(page) == {"run         -- two": ["1", "  2"], "three": ["3"]}


def test_the_page_shows_every_launch_command():
    words = [shlex.split(command) for command in DRY_RUNS]
    assert {(Path(line[1]).name, line[2] if line[2].isalpha() else "") for line in words} == {
        ("jobset.py", ""),
        *(("queued_resource.py", action) for action in ("create", "status", "ssh", "delete")),
    }
    assert all("--dry_run" in line[: line.index("--") if "--" in line else None] for line in words)


@pytest.mark.parametrize("command", DRY_RUNS)
def test_a_dry_run_prints_the_documented_output(command):
    python, *rest = shlex.split(command)
    assert python == "python"
    done = subprocess.run([sys.executable, *rest], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == DRY_RUNS[command]
