"""One small run, trained, exported and evaluated once, and what tests of commands say about what they print."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import evaluate
import export_hf
import jsonschema
import pytest
import tpu_train
import yaml

from memsearcher_jax.rl import build, start
from memsearcher_jax.rl.run_folder import CHECKPOINTS
from memsearcher_jax.testing import ScriptedDriver

SMALL = """
    --config nano --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --agent.reply_tokens 8 --agent.max_turns 2
    --sampling.slots 8 --rl.problems 4 --rl.rollouts 2 --rl.checkpoint_every 1 --rl.steps 2 --evaluation.questions 4
"""
SCRIPTED = "--config tiny_warmstart --model.path package:tiny --retrieval.kind exact"


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Flags of a run over eight devices that is over in seconds."""
    return SMALL.split()


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A run of two steps. Nobody may write to it: copy it first."""
    out = tmp_path_factory.mktemp("finished") / "run"
    tpu_train.main([*SMALL.split(), "--out", str(out), "--json", str(out.with_suffix(".json"))])
    return out


@pytest.fixture(scope="session")
def exported(finished, tmp_path_factory) -> Path:
    """The run's weights as a Hugging Face folder. Nobody may write to it: copy it first."""
    out = tmp_path_factory.mktemp("exported") / "hf"
    export_hf.main(["--checkpoint", str(finished), "--out", str(out)])
    return out


@pytest.fixture
def refused(capsys):
    """Runs a program that must end in one line and exit status 2; returns the line."""

    def run(main, argv) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in argv])
        said = capsys.readouterr()
        assert stop.value.code == 2
        assert said.out == ""
        line, *more = said.err.splitlines()
        assert not more, said.err
        assert line.startswith("error: ")
        return line

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, and every empty folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


@pytest.fixture
def untouched():
    """`contents`, to compare a folder before and after."""
    return contents


@pytest.fixture
def damage():
    """Spoils the newest checkpoint of a run, as a full disk or a broken copy would."""

    def spoil(run: Path) -> int:
        newest = max((run / CHECKPOINTS).iterdir(), key=lambda path: int(path.name))
        for path in sorted((newest / "params").rglob("*")):
            if path.is_file():
                path.write_bytes(b"spoilt")
        return int(newest.name)

    return spoil


@pytest.fixture(autouse=True)
def quiet():
    """As `cli.run` does at the edge."""
    logging.getLogger("absl").setLevel(logging.ERROR)


@pytest.fixture
def questions(tmp_path):
    """Writes a JSONL file of questions, each with one answer."""

    def write(name: str, *texts: str) -> Path:
        file = tmp_path / name
        rows = [{"id": f"q{row}", "question": text, "golden_answers": ["Ada"]} for row, text in enumerate(texts)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write


@pytest.fixture
def corpus(tmp_path):
    """A JSONL file of twenty passages."""
    file = tmp_path / "corpus.jsonl"
    rows = [{"id": str(row), "contents": f'"Town {row}"\nTown {row} has {row} mills.'} for row in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Runs launch/evaluate.py with a script for each problem; returns its results, if it has any, and its folder."""

    def run(make_script, *flags, out="out"):
        def make_driver(run, *, evaluation):
            agent = replace(run.config.agent, max_turns=run.config.evaluation.max_turns)
            workflow = build.workflow_maker(agent, run.prompts, run.tokenizer)
            return ScriptedDriver(run.tokenizer, run.searcher, workflow, make_script)

        monkeypatch.setattr(build, "make_driver", make_driver)
        monkeypatch.setattr(start, "starting_params", lambda run: {})
        monkeypatch.setattr(build, "sampler_params", lambda run, params: params)
        folder = tmp_path / out
        settings = [] if "--resume" in flags else SCRIPTED.split()
        evaluate.main([*settings, "--out", str(folder), *map(str, flags)])
        results = folder / "results.json"
        return json.loads(results.read_text()) if results.is_file() else None, folder

    return run


METADATA = {"type": "object", "properties": {}}  # the CRD leaves ObjectMeta to Kubernetes; of it, what we use:
METADATA["properties"] = {"name": {"type": "string"}, "annotations": {"additionalProperties": {"type": "string"}}}


def strict(schema):
    """An OpenAPI v3 structural schema as JSON Schema that refuses what it does not list.

    Kubernetes drops an unknown field without a word. Properties may be called `items` or `properties`, so that only
    the places of schemas are walked.
    """
    schema = dict(schema)
    if schema.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    if "properties" in schema:
        schema["properties"] = {name: strict(one) for name, one in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    for place in ("items", "additionalProperties"):
        if isinstance(schema.get(place), dict):
            schema[place] = strict(schema[place])
    return schema


@pytest.fixture(scope="module")
def validator(shared):
    crd = yaml.load((shared / "reference" / "jobset_crd.yaml").read_text(), Loader=yaml.CSafeLoader)
    (version,) = (one for one in crd["spec"]["versions"] if one["name"] == "v1alpha2")
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = METADATA
    schema["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{version['name']}"}
    schema["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
    jsonschema.Draft202012Validator.check_schema(strict(schema))
    return jsonschema.Draft202012Validator(strict(schema))
