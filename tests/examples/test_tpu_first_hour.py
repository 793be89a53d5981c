"""The notebook of the first hour on a TPU: its cells, in order, on a CPU with the settings of a rehearsal."""

import json
import subprocess
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tpu_first_hour.ipynb"
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
BASH = "%%bash\n"

QUESTIONS = [
    {
        "_id": f"q{number}",
        "question": f"In which city was person {number} born?",
        "answer": f"City {number}",
        "supporting_facts": [[f"Person {number}", 0]],
        "context": [
            [f"Person {number}", [f"Person {number} was born in City {number}."]],
            [f"City {number}", [f"City {number} is a city on a river."]],
        ],
    }
    for number in range(40)
]


def test_every_cell_is_bash_or_python():
    for cell in CELLS:
        if cell.startswith(BASH):
            subprocess.run(["bash", "-n"], input=cell.removeprefix(BASH), text=True, check=True)
        else:
            compile(cell, "cell", "exec")


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    questions = tmp_path / "hotpot_dev.json"
    questions.write_text(json.dumps(QUESTIONS))
    for name, value in {"SMOKE": "1", "WORK": str(tmp_path / "work"), "QUESTIONS": str(questions)}.items():
        monkeypatch.setenv(name, value)
    for name in ("SOURCE", "MODEL", "TRAIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    variables = {}
    for cell in CELLS:
        if cell.startswith(BASH):
            done = subprocess.run(["bash"], input=cell.removeprefix(BASH), text=True, capture_output=True)
            assert done.returncode == 0, f"{cell}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
        else:
            exec(compile(cell, "cell", "exec"), variables)
    assert (tmp_path / "work" / "export" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "work" / "device.json").read_text())["failed"] == 0
