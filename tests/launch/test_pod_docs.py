"""docs/pods.md: each dry run in it, started as a user starts it, prints what stands below it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDENT = "    "


def shown(text):
    """The commands behind `$` with the lines below them, up to the next line that is empty or not indented."""
    blocks = re.findall(rf"^{INDENT}\$ ((?:.*\\\n)*.*)\n((?:{INDENT}.*\n)*)", text, flags=re.MULTILINE)
    return {
        command.replace("\\\n", ""): [line[len(INDENT) :] for line in below.splitlines()] for command, below in blocks
    }


DRY_RUNS = shown((ROOT / "docs" / "pods.md").read_text(encoding="utf-8"))


def test_the_reading_of_a_page():
    page = "a\n\n    $ one \\\n        -- two\n    1\n      2\n\n    no command\n\n    $ three\n    3\n"
    assert shown(page) == {"one         -- two": ["1", "  2"], "three": ["3"]}


def test_every_kind_of_launch_is_on_the_page():
    words = [shlex.split(command) for command in DRY_RUNS]
    assert {(Path(line[1]).name, line[2] if line[2].isalpha() else "") for line in words} == {
        ("jobset.py", ""),
        *(("queued_resource.py", action) for action in ("create", "status", "ssh", "delete")),
    }
    assert all("--dry-run" in line[: line.index("--") if "--" in line else None] for line in words)


@pytest.mark.parametrize("command", DRY_RUNS)
def test_a_dry_run_prints_what_stands_on_the_page(command):
    python, *rest = shlex.split(command)
    assert python == "python"
    done = subprocess.run([sys.executable, *rest], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == DRY_RUNS[command]
