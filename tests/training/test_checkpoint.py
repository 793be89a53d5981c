"""What is saved comes back bit for bit, on any mesh; what is damaged is named in one line."""

import hashlib
import json
import random
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import tensorstore

from memsearcher_jax.training import checkpoint
from memsearcher_jax.training.checkpoint import Checkpoints, latest_step, open_params, restore_params
from memsearcher_jax.training.update import abstract_params, abstract_state, init_state, make_optimizer

# When the read of a damaged array fails orbax leaves others running, which complain whenever they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

META = {"position": 640, "seed": 7, "key": [1, 2], "config": {"rl": {"problems": 2}}}


def host(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, host(one), host(other))


def restore_latest(directory, model, target, step=2):
    """State and meta of a folder whose newest step is sound."""
    found, state, meta = checkpoint.restore_latest(directory, model, target, pytest.fail)
    assert found == step
    return state, meta


@pytest.fixture(scope="module")
def optimizer(nano):
    return make_optimizer(nano.training)


@pytest.fixture(scope="module")
def run(nano, optimizer):
    """`run(state, updates)` on eight devices; state None starts afresh."""
    mesh = nano.mesh(2, 2, 2)
    update = nano.update(optimizer, mesh)

    def go(state, updates):
        with jax.set_mesh(mesh):
            state = state or init_state(nano.params(), nano.model, optimizer, mesh)
            for _ in range(updates):
                state, _ = update(state, nano.batch)
        return state

    return go


@pytest.fixture(scope="module")
def saved(nano, run, tmp_path_factory):
    """A folder with steps 1 and 2 of a run, and the host copy of the state at step 2. Not to be written to."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpoints(directory, keep=2) as checkpoints:
        state = run(None, 1)
        checkpoints.save(1, state, nano.model, META | {"position": 320})
        state = run(state, 1)
        checkpoints.save(2, state, nano.model, META)
        state_on_host = host(state)
        # The write may still be under way: donated memory that is used again must not reach the disk.
        run(state, 2)
    return directory, state_on_host


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the saved folder that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "copy")


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 1), (1, 1, 1)])
def test_a_state_comes_back_bit_for_bit_on_any_mesh(nano, optimizer, saved, shape):
    directory, state_on_host = saved
    target = abstract_state(nano.model, optimizer, nano.mesh(*shape))
    state, meta = restore_latest(directory, nano.model, target)
    assert_equal(state, state_on_host)
    assert meta == META
    jax.tree.map(lambda x, t: x.sharding.is_equivalent_to(t.sharding, x.ndim) or pytest.fail(str(t)), state, target)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(nano, optimizer, run, saved):
    directory, _ = saved
    restored, _ = restore_latest(directory, nano.model, abstract_state(nano.model, optimizer, nano.mesh(2, 2, 2)))
    assert_equal(run(restored, 2), run(None, 4))


def test_weights_are_read_without_the_optimiser(nano, saved, copy):
    for file in (copy / "2" / "optimizer").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    params = restore_params(copy, nano.model, abstract_params(nano.model, nano.mesh()))
    assert_equal(params, saved[1].params)


def test_only_the_newest_are_kept(nano, run, tmp_path):
    state = run(None, 0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (3, 5, 9):
            checkpoints.save(step, state, nano.model, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5", "9"]
    assert latest_step(tmp_path) == 9


def test_half_written_steps_are_ignored_and_do_not_block(nano, optimizer, run, copy):
    (copy / "3.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (copy / "4" / "params").mkdir(parents=True)
    shutil.copytree(copy / "2", copy / "5")
    shutil.rmtree(copy / "5" / "optimizer")
    assert latest_step(copy) == 2
    target = abstract_state(nano.model, optimizer, nano.mesh(2, 2, 2))
    state, meta = restore_latest(copy, nano.model, target)
    assert meta == META
    with Checkpoints(copy, keep=2) as checkpoints:
        checkpoints.save(3, state, nano.model, {"position": 960})
    assert latest_step(copy) == 3
    assert_equal(restore_latest(copy, nano.model, target, step=3)[0], state)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file, seed=0):
    content, rng = bytearray(file.read_bytes()), random.Random(f"{file.name} {seed}")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def arrays_of(step, item):
    files = [file for file in (step / item).rglob("d/*") if file.stat().st_size > 1_000]
    assert files
    return files


@pytest.mark.parametrize("item", ["params", "optimizer"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(nano, optimizer, run, copy, damage, item):
    for file in arrays_of(copy / "2", item):
        damage(file)
    told = []
    target = abstract_state(nano.model, optimizer, nano.mesh(2, 2, 2))
    step, state, meta = checkpoint.restore_latest(copy, nano.model, target, told.append)
    assert (step, meta) == (1, META | {"position": 320})
    assert_equal(state, run(None, 1))
    (line,) = told
    assert "copy/2" in line
    assert line.endswith("it is kept as 2.damaged")
    assert "\n" not in line
    assert (copy / "2.damaged").is_dir()
    assert latest_step(copy) == 1
    with Checkpoints(copy, keep=2) as checkpoints:  # and the step can be taken again
        checkpoints.save(2, state, nano.model, META)
    assert latest_step(copy) == 2


def test_a_position_that_was_changed_is_no_position(nano, optimizer, copy):
    meta = copy / "2" / "meta" / "metadata"
    changed = meta.read_text().replace('"position": 640', '"position": 641')
    assert changed != meta.read_text()
    meta.write_text(changed)
    told = []
    target = abstract_state(nano.model, optimizer, nano.mesh(2, 2, 2))
    assert checkpoint.restore_latest(copy, nano.model, target, told.append)[0] == 1
    assert "meta is not what was saved" in told[0]


def test_where_nothing_is_sound_nothing_starts(nano, optimizer, copy):
    for step in ("1", "2"):
        (copy / step / "meta" / "metadata").write_text("{")
    target = abstract_state(nano.model, optimizer, nano.mesh())
    with pytest.raises(ValueError, match=r"no checkpoint in .*copy can be read: all are kept there as STEP.damaged"):
        checkpoint.restore_latest(copy, nano.model, target, lambda line: None)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_who_asks_for_the_newest_weights_gets_no_others(nano, copy, damage):
    for file in arrays_of(copy / "2", "params"):
        damage(file)
    with pytest.raises(ValueError, match=r"copy/2 .*go on from step 1") as caught:
        restore_params(copy, nano.model, abstract_params(nano.model, nano.mesh()))
    assert "\n" not in str(caught.value)


def test_a_damaged_meta_names_itself(nano, copy):
    (copy / "2" / "meta" / "metadata").write_text('{"model": {')
    with pytest.raises(ValueError, match=r"copy/2 cannot be read"):
        restore_params(copy, nano.model, abstract_params(nano.model, nano.mesh()))


def test_weights_are_cast_after_they_were_compared(nano, saved):
    model = replace(nano.model, param_dtype="bfloat16")
    params = restore_params(saved[0], model, abstract_params(model, nano.mesh(2, 2, 2)))
    assert_equal(params, jax.tree.map(lambda x: x.astype("bfloat16"), saved[1].params))


def test_weights_are_read_piece_by_piece(nano, saved):
    params = saved[1].params
    read = open_params(saved[0], nano.model)
    np.testing.assert_array_equal(read.read("embed", None), params["embed"])
    with pytest.raises(ValueError, match="is damaged: final_norm is not what was saved"):
        read.check()  # for it was not read
    read.read("final_norm", None)
    read.read("unembed", None)
    for name, stacked in params["layers"].items():
        for layer in range(nano.model.layers):
            np.testing.assert_array_equal(read.read(f"layers.{name}", layer), stacked[layer])
    read.check()


@pytest.mark.parametrize(("weight", "by_entry"), [("layers.wq", True), ("embed", False)])
def test_stacked_weights_are_cut_by_layer_and_tables_are_not_cut_by_token(saved, weight, by_entry):
    """With a piece for each of 150,000 tokens a small checkpoint takes minutes to read."""
    base = f"file://{saved[0]}/2/params"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{weight}/"}}
    stored = tensorstore.open(spec, open=True, read=True).result()
    assert (stored.chunk_layout.read_chunk.shape[0] == 1) is by_entry


def test_damage_shows_when_pieces_are_read(nano, copy):
    for file in arrays_of(copy / "2", "params"):
        flip_a_bit(file)
    read = open_params(copy, nano.model)
    with pytest.raises(ValueError, match=r"copy/2/params (is damaged|cannot be read)"):
        for path in jax.tree.leaves_with_path(saved_shapes(nano)):
            read_whole(read, path, nano.model.layers)
        read.check()


def saved_shapes(nano):
    return abstract_params(nano.model, nano.mesh())


def read_whole(read, path, layers):
    name = jax.tree_util.keystr(path[0], simple=True, separator=".")
    for layer in range(layers) if name.startswith("layers.") else (None,):
        read.read(name, layer)


def test_a_checkpoint_of_another_model_names_the_difference(nano, saved):
    other = replace(nano.model, layers=3, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"holds another model: layers is 2 there and 3 here$"):
        restore_params(saved[0], other, abstract_params(other, nano.mesh()))


def test_a_checkpoint_from_before_a_setting_was_there_has_its_default(nano, copy):
    meta = copy / "2" / "meta" / "metadata"
    stored = json.loads(meta.read_text())
    assert stored["model"].pop("family") == "qwen2"
    del stored["digest"]
    stored["digest"] = hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
    meta.write_text(json.dumps(stored))
    restore_params(copy, nano.model, abstract_params(nano.model, nano.mesh()))
    other = replace(nano.model, family="qwen3")
    with pytest.raises(ValueError, match=r"holds another model: family is qwen2 there and qwen3 here$"):
        restore_params(copy, other, abstract_params(other, nano.mesh()))


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_checkpoint_is_one_line(nano, tmp_path, name):
    (tmp_path / "empty").mkdir()
    assert latest_step(tmp_path / name) is None
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in .*{name}"):
        restore_params(tmp_path / name, nano.model, abstract_params(nano.model, nano.mesh()))
    assert not (tmp_path / "missing").exists()


def test_a_step_is_never_written_over(nano, optimizer, run, copy):
    state = run(None, 0)
    with Checkpoints(copy, keep=3) as checkpoints, pytest.raises(ValueError, match="already holds step 2"):
        checkpoints.save(2, state, nano.model, {})
    assert restore_latest(copy, nano.model, abstract_state(nano.model, optimizer, nano.mesh()))[1] == META
