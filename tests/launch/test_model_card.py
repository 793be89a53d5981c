"""What the README.md of an export tells people to type."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_command_of_a_model_card_runs(exported):
    (command,) = re.findall(r"```bash\n(.*?)\n```", (exported / "README.md").read_text(), re.DOTALL)
    program, *words = shlex.split(command)
    assert (program, words[0], words[2]) == ("python", "launch/ask.py", str(exported))
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
