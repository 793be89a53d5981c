"""What a run was given: hashes, copies that a resumed run reads, and the program."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from memsearcher_jax.config import RunConfig, differences, with_settings
from memsearcher_jax.launch import cli
from memsearcher_jax.runs import inputs
from memsearcher_jax.runs.inputs import (
    fingerprint,
    input_hashes,
    keep_inputs,
    read_inputs,
    require_same_code,
    with_own_inputs,
)
from memsearcher_jax.runs.run_dir import write_run_config


@pytest.fixture
def given(tmp_path):
    """A config with files of every kind, all in one folder."""
    for name in ("templates/system.txt", "nq/train.jsonl", "test.jsonl", "corpus.jsonl", "weights/model.safetensors"):
        file = tmp_path / "given" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    config, folder = RunConfig(), str(tmp_path / "given")
    return replace(
        config,
        agent=replace(config.agent, prompts=f"{folder}/templates"),
        data=replace(config.data, test=(f"{folder}/test.jsonl",), root=folder, train=("nq",)),
        retrieval=replace(config.retrieval, corpus=f"{folder}/corpus.jsonl"),
        model=replace(config.model, path=f"{folder}/weights", adapter=f"{folder}/weights"),
    )


@pytest.fixture
def run(given, tmp_path):
    """The folder of a run that has built its index."""
    folder = tmp_path / "run"
    (folder / "index").mkdir(parents=True)
    (folder / "index" / "manifest.json").write_text("{}")
    keep_inputs(folder, given, None)
    write_run_config(folder, given)
    return folder


@pytest.mark.parametrize("change", ["edit", "remove"])
def test_a_run_goes_on_with_its_own_copies_and_says_so(change, given, run, tmp_path):
    """Also when it is resumed again, and in another place."""
    for file in [file for file in (tmp_path / "given").rglob("*.*") if file.suffix != ".safetensors"]:
        file.unlink() if change == "remove" else file.write_text("edited")
    for _ in range(2):
        assert len(keep_inputs(run, given, None)[1]) == 4
    run = run.rename(tmp_path / "moved")
    own = with_own_inputs(run, given)
    root = Path(own.data.root)
    assert (root / "nq" / "train.jsonl").read_text() == "nq/train.jsonl"
    assert Path(own.agent.prompts, "system.txt").read_text() == "templates/system.txt"
    assert Path(own.data.test[0]).read_text() == "test.jsonl"
    assert (own.retrieval.corpus, own.retrieval.index) == ("", str(run / "index"))
    assert (own.data.train, own.model) == (("nq",), given.model)


def test_a_run_without_its_index_reads_its_corpus_which_must_be_the_same(given, run):
    (run / "index" / "manifest.json").unlink()
    assert with_own_inputs(run, given).retrieval == given.retrieval
    assert keep_inputs(run, given, None)[1] == []
    Path(given.retrieval.corpus).write_text("edited")
    with pytest.raises(ValueError, match=r"corpus\.jsonl has changed since the run in"):
        keep_inputs(run, given, None)


def test_a_start_that_was_killed_leaves_no_inputs_to_the_next(given, run):
    (run / "run.json").unlink()
    Path(given.data.test[0]).write_text("edited")
    assert keep_inputs(run, given, None)[1] == []
    assert Path(with_own_inputs(run, given).data.test[0]).read_text() == "edited"


def test_nothing_is_said_of_what_has_not_changed(given, run):
    """Also of a benchmark that is not read any more, or not until then."""
    for name in ("hotpotqa", "nq"):
        (file := Path(given.data.root, name, "train.jsonl")).parent.mkdir(exist_ok=True)
        file.write_text(f"{name}/train.jsonl")
        other = with_settings(given, {"data.train": (name,)})
        assert Path(with_own_inputs(run, other).data.root, name).is_dir()
        assert keep_inputs(run, other, None)[1] == []
    assert with_own_inputs(run.parent, given) == given, "a folder without inputs.json"


@pytest.mark.parametrize("code", ["mcp:python /home/me/server.py", __file__])
def test_each_setting_names_its_code_again_also_that_of_one_file(code, given, run):
    config = with_settings(given, {"agent.tools": (code,), "reward.function": __file__})
    require_same_code(run, config, config, ["--agent.tools", "--reward.function"])
    for one, other in (("agent.tools", "reward.function"), ("reward.function", "agent.tools")):
        with pytest.raises(ValueError, match=f"give --{other} again"):
            require_same_code(run, config, config, [f"--{one}"])


def test_changed_weights_and_changed_copies_are_errors(given, run, tmp_path):
    weights = tmp_path / "given" / "weights" / "model.safetensors"
    weights.write_text("others")
    assert keep_inputs(run, given, None, weights=False)[1] == [], "they are not read"
    with pytest.raises(ValueError, match=r"model\.path has changed since the run in .* restore it, or start a new run"):
        keep_inputs(run, given, None)
    next((run / "inputs").rglob("system.txt")).write_text("edited")
    with pytest.raises(ValueError, match=r"run/inputs/\w+/system\.txt was changed: restore it"):
        keep_inputs(run, given, None, weights=False)


def test_hashes_name_every_input(given, tmp_path):
    folder = str(tmp_path / "given")
    names = ("templates/system.txt", "nq/train.jsonl", "test.jsonl", "corpus.jsonl")
    data = {f"{folder}/{name}" for name in names}
    hashes = input_hashes(given)
    assert set(hashes) == data | {"model.path", "model.adapter"}
    assert all(len(one) == 64 for one in hashes.values())
    assert set(input_hashes(given, weights=False)) == data
    (tmp_path / "manifest.json").write_text("{}")
    indexed = with_settings(given, {"retrieval.corpus": "", "retrieval.index": str(tmp_path)})
    assert set(input_hashes(indexed, weights=False)) == data - {given.retrieval.corpus} | {f"{tmp_path}/manifest.json"}
    assert input_hashes(cli.load_preset("tiny")).keys() == {"model.path"}, (
        "packaged templates have the program's commit"
    )


def test_a_resumed_run_keeps_earlier_programs(tmp_path, monkeypatch):
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()  # "" outside a checkout
    assert inputs._commit(tmp_path) == "", "an installed program has a version alone"
    write_run_config(tmp_path, RunConfig())
    keep_inputs(tmp_path, RunConfig(), None)
    assert [one["commit"].removesuffix("+changes") for one in inputs.read_inputs(tmp_path).program] == [commit]
    monkeypatch.setattr(inputs, "_program", lambda: {"version": "9", "commit": "c"})
    for _ in range(2):
        keep_inputs(tmp_path, RunConfig(), None)
        assert [one["commit"] for one in inputs.read_inputs(tmp_path).program][1:] == ["c"]
    (tmp_path / "inputs.json").write_text("{")
    with pytest.raises(ValueError, match=r"inputs\.json"):
        inputs.read_inputs(tmp_path)


def test_a_fingerprint_depends_on_every_file_and_on_blocks_of_large_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(inputs, "_BLOCKS_OF_A_LARGE_FILE", 3)
    small, large = tmp_path / "a", tmp_path / "b"
    small.write_bytes(b"0123456789")
    large.write_bytes(bytes(range(100)))
    before = fingerprint([small, large])
    assert before == fingerprint([large, small])
    for file, position, changes in ((small, 9, True), (large, 0, True), (large, 99, True), (large, 30, False)):
        content = file.read_bytes()
        file.write_bytes(content[:position] + b"!" + content[position + 1 :])
        assert (fingerprint([small, large]) != before) == changes
        file.write_bytes(content)
    large.write_bytes(bytes(range(101)))
    assert fingerprint([small, large]) != before
    assert fingerprint([]) == ""


@pytest.fixture
def shops(tmp_path):
    """Two files of one name, each with a file that it imports, and a run that was made with them."""
    for folder in ("agents", "tools"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shop.py").write_text(f"import helpers\nWHAT = '{folder}'\n")
        (tmp_path / folder / "helpers.py").write_text(f"OF = '{folder}'\n")
    named = {"agent.workflow": f"{tmp_path}/agents/shop.py", "agent.tools": (f"{tmp_path}/tools/shop.py:Shop",)}
    config = with_settings(RunConfig(), named)
    folder = tmp_path / "run"
    folder.mkdir()
    keep_inputs(folder, config, None)
    write_run_config(folder, config)
    return folder, config


def test_files_of_one_name_in_two_folders_are_told_apart(shops, tmp_path):
    run, config = shops
    words = ("--agent.workflow", "--agent.tools")
    require_same_code(run, config, config, words)
    moved = (tmp_path / "agents").rename(tmp_path / "moved")
    elsewhere = with_settings(config, {"agent.workflow": f"{moved}/shop.py"})
    assert differences(config, elsewhere) == []
    require_same_code(run, config, elsewhere, words)
    exchanged = with_settings(config, {"agent.tools": (f"{moved}/shop.py:Shop",)})
    with pytest.raises(ValueError, match=r"--agent\.tools .*moved/shop\.py:Shop differs from the file that .*run was"):
        require_same_code(run, config, exchanged, words)


def test_what_a_file_imports_is_a_part_of_it(shops, tmp_path):
    run, config = shops
    copies = {Path(copy).name for copy in read_inputs(run).copies.values()}
    assert copies == {"shop.py", "helpers.py"} and len(read_inputs(run).hashes) == 4
    (tmp_path / "tools" / "helpers.py").write_text("OF = 'edited'\n")
    with pytest.raises(ValueError, match=r"--agent\.tools .*shop\.py:Shop: .*tools/helpers\.py differs"):
        require_same_code(run, config, config, ("--agent.workflow", "--agent.tools"))
    with pytest.raises(ValueError, match=r"tools/helpers\.py has changed since the run in"):
        keep_inputs(run, config, None)


def test_a_copy_of_code_is_never_what_a_run_names(shops, tmp_path):
    run, config = shops
    for file in (tmp_path / "tools").iterdir():
        file.unlink()
    assert with_own_inputs(run, config).agent == config.agent
