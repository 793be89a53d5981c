"""Checkpoints are restored bit for bit on any mesh, and damage is reported in one line."""

import errno
import random
import shutil
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import tensorstore

from memsearcher_jax.model import qwen
from memsearcher_jax.model.sharding import abstract_params
from memsearcher_jax.training import checkpoint
from memsearcher_jax.training.checkpoint import Checkpoints, latest_step, restore_params
from memsearcher_jax.training.params_reader import ParamsReader
from memsearcher_jax.training.update import abstract_state, init_state

# When a read of a damaged array fails, orbax leaves other reads running, whose errors surface at garbage collection.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

META = {"position": 640, "seed": 7, "key": [1, 2], "config": {"rl": {"problems": 2}}}


def host(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, host(one), host(other))


def restore_latest(directory, model, target, step=2):
    """State and meta of a directory whose newest step is undamaged."""
    found, state, meta = checkpoint.restore_latest(directory, model, target, pytest.fail)
    assert found == step
    return state, meta


@pytest.fixture(scope="module")
def run(nano):
    """`run(state, updates)` on eight devices; None: the initial state."""
    mesh = nano.mesh(2, 2, 2)
    update = nano.update(nano.adam, mesh)

    def go(state, updates):
        with jax.set_mesh(mesh):
            state = state or init_state(nano.params(), nano.model, nano.adam, mesh)
            for _ in range(updates):
                state, _ = update(state, nano.batch)
        return state

    return go


@pytest.fixture(scope="module")
def saved(nano, run, tmp_path_factory):
    """A directory with steps 1 and 2 of a run, and the host copy of the state at step 2. Read-only."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpoints(directory, keep=2) as checkpoints:
        state = run(None, 1)
        checkpoints.save(1, state, nano.model, META | {"position": 320})
        state = run(state, 1)
        checkpoints.save(2, state, nano.model, META)
        state_on_host = host(state)
        # The write may still be running: donated memory that is reused must not reach the disk.
        run(state, 2)
    return directory, state_on_host


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the saved folder that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "copy")


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 1), (1, 1, 1)])
def test_a_state_is_restored_bit_for_bit_on_any_mesh(nano, saved, shape):
    directory, state_on_host = saved
    target = abstract_state(nano.model, nano.adam, nano.mesh(*shape))
    state, meta = restore_latest(directory, nano.model, target)
    assert_equal(state, state_on_host)
    assert meta == META
    jax.tree.map(lambda x, t: x.sharding.is_equivalent_to(t.sharding, x.ndim) or pytest.fail(str(t)), state, target)


def test_steps_of_an_interrupted_copy_are_renamed_and_do_not_block_saving(nano, run, copy):
    (copy / "3.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (copy / "4" / "params").mkdir(parents=True)
    shutil.copytree(copy / "2", copy / "5")
    shutil.rmtree(copy / "5" / "optimizer")
    messages, target = [], abstract_state(nano.model, nano.adam, nano.mesh(2, 2, 2))
    step, state, _ = checkpoint.restore_latest(copy, nano.model, target, messages.append)
    assert (step, len(messages), latest_step(copy)) == (2, 2, 2)
    with Checkpoints(copy, keep=2) as checkpoints:
        checkpoints.save(3, state, nano.model, {"position": 960})
    assert_equal(restore_latest(copy, nano.model, target, step=3)[0], state)


def test_a_step_is_saved_again_while_its_failed_write_still_writes(nano, run, tmp_path, monkeypatch):
    """Its temporary directory is never empty for long, so nobody can delete it."""

    def never_empty(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    state, target = run(None, 0), abstract_state(nano.model, nano.adam, nano.mesh(2, 2, 2))
    with Checkpoints(tmp_path, keep=2) as checkpoints, monkeypatch.context() as patch:
        checkpoints.save(6, state, nano.model, META)
        failure = mock.patch.object(checkpoints._manager, "wait_until_finished", side_effect=OSError("disk full"))
        with failure, pytest.raises(OSError, match=r"cannot write a checkpoint in .*disk full"):
            checkpoints.wait()
        checkpoints.wait()
        (tmp_path / "7.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
        patch.setattr(shutil, "rmtree", never_empty)
        checkpoints.save(7, state, nano.model, META)
        checkpoints.wait()
    assert_equal(restore_latest(tmp_path, nano.model, target, step=7)[0], state)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(8, state, nano.model, META)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "8"], "the next start deletes what is left"


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    rng = random.Random(len(content))  # file names are random, and so is the number of intermediate files
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def arrays_of(step, item):
    files = [file for file in (step / item).rglob("d/*") if file.stat().st_size > 1_000]
    assert files
    return files


def damage_arrays(item, damage):
    def go(step):
        for file in arrays_of(step, item):
            damage(file)

    return go


def change_the_position(step):
    meta = step / "meta" / "metadata"
    changed = meta.read_text().replace('"position": 640', '"position": 641')
    assert changed != meta.read_text()
    meta.write_text(changed)


@pytest.mark.parametrize(
    "damage",
    [
        *(damage_arrays(item, damage) for item in ("params", "optimizer") for damage in (truncate, flip_a_bit)),
        change_the_position,
    ],
)
def test_a_damaged_newest_checkpoint_is_renamed_and_the_one_before_restored(nano, run, copy, damage):
    damage(copy / "2")
    messages = []
    target = abstract_state(nano.model, nano.adam, nano.mesh(2, 2, 2))
    step, state, meta = checkpoint.restore_latest(copy, nano.model, target, messages.append)
    assert (step, meta) == (1, META | {"position": 320})
    assert_equal(state, run(None, 1))
    (message,) = messages
    assert "copy/2" in message and message.endswith("renamed to 2.damaged") and "\n" not in message
    assert (copy / "2.damaged").is_dir() and latest_step(copy) == 1
    with Checkpoints(copy, keep=2) as checkpoints:  # the step can be saved again, but once
        checkpoints.save(2, state, nano.model, META)
        with pytest.raises(OSError, match="step 2 already exists"):
            checkpoints.save(2, state, nano.model, {})
    assert latest_step(copy) == 2


def test_where_no_step_can_be_read_none_is_renamed(nano, copy, monkeypatch):
    """The fault may be of the machine: renamed steps would let the next start begin at step 0."""
    target = abstract_state(nano.model, nano.adam, nano.mesh())
    with monkeypatch.context() as faulty:
        faulty.setattr(checkpoint.ocp.CheckpointManager, "restore", out_of_memory)
        with pytest.raises(ValueError, match=r"no checkpoint in .*copy can be read: .*copy/2 .*\(MemoryError: \)$"):
            checkpoint.restore_latest(copy, nano.model, target, pytest.fail)
    assert latest_step(copy) == 2
    for step in ("1", "2"):
        (copy / step / "meta" / "metadata").write_text("{")
    with pytest.raises(ValueError, match=r"no checkpoint in .*copy can be read: .*copy/2 cannot be read"):
        checkpoint.restore_latest(copy, nano.model, target, pytest.fail)
    assert latest_step(copy) == 2


def out_of_memory(*_, **__):
    raise MemoryError


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_reading_weights_never_falls_back_to_an_older_step(nano, copy, damage):
    damage_arrays("params", damage)(copy / "2")
    with pytest.raises(ValueError, match=r"copy/2 .*continue from step 1") as caught:
        restore_params(copy, nano.model, abstract_params(nano.model, nano.mesh()))
    assert "\n" not in str(caught.value)
    reader = ParamsReader(copy, nano.model)
    with pytest.raises(ValueError, match=r"copy/2/params (is damaged|cannot be read)"):
        read_all(reader, nano.params())
        reader.check()


def test_a_state_is_restored_in_another_type(nano, saved):
    """Cast after the checksums were compared: no sound checkpoint counts as damaged."""
    model = replace(nano.model, param_dtype="bfloat16")
    target = abstract_state(model, nano.adam, nano.mesh(2, 2, 2))
    state, meta = restore_latest(saved[0], model, target)
    expected = jax.tree.map(lambda x, like: x.astype(like.dtype), saved[1], target)
    assert_equal(state, expected)
    jax.tree.map(lambda x, like: x.dtype == like.dtype or pytest.fail(str(like)), state, target)
    assert meta == META


def test_a_state_with_other_arrays_is_refused_but_not_renamed(nano, copy):
    target = abstract_state(nano.model, optax.sgd(0.1, momentum=0.9), nano.mesh())
    with pytest.raises(ValueError, match=r"copy/2 was written by another version.*: its optimizer and that .* differ"):
        checkpoint.restore_latest(copy, nano.model, target, pytest.fail)
    assert latest_step(copy) == 2


def test_weights_are_restored_without_the_optimiser_also_of_an_older_step(nano, run, saved, copy):
    for step in ("1", "2"):
        shutil.rmtree(copy / step / "optimizer")
    target = abstract_params(nano.model, nano.mesh(2, 2, 2))
    assert_equal(restore_params(copy, nano.model, target), saved[1].params)
    assert_equal(restore_params(copy, nano.model, target, step=1), run(None, 1).params)
    assert checkpoint.run_meta(copy, nano.model, 1) == META | {"position": 320}
    assert checkpoint.run_meta(copy, nano.model) == META
    with pytest.raises(FileNotFoundError, match=r"no longer holds step 7, only 2, 1: raise rl.keep_checkpoints"):
        restore_params(copy, nano.model, target, step=7)


def read_all(reader, params):
    """Every weight, those of layers read one by one."""
    weights = []
    for path, weight in jax.tree.leaves_with_path(params):
        name = qwen.param_path(path)
        layers = range(len(weight)) if name.startswith("layers.") else ()
        weights.append(np.stack([reader.read(name, i) for i in layers]) if layers else reader.read(name, None))
    return weights


@pytest.mark.parametrize("name", ["exp#1", "a?b", "x%20y", "ü[1]"])
def test_weights_are_read_one_tensor_at_a_time_also_from_folders_that_a_url_would_escape(nano, saved, tmp_path, name):
    params = saved[1].params
    shutil.copytree(saved[0], tmp_path / name)
    reader = ParamsReader(tmp_path / name, nano.model)
    np.testing.assert_array_equal(reader.read("embed", None), params["embed"])
    with pytest.raises(ValueError, match="is damaged: the checksum of final_norm differs"):
        reader.check()  # it was not read
    reader = ParamsReader(tmp_path / name, nano.model)
    assert_equal(read_all(reader, params), jax.tree.leaves(params))
    reader.check()


@pytest.mark.parametrize(("weight", "by_entry"), [("layers.wq", True), ("embed", False)])
def test_stacked_weights_are_chunked_by_layer_and_tables_not_by_token(saved, weight, by_entry):
    """With a chunk for each of 150,000 tokens, a small checkpoint takes minutes to read."""
    base = f"file://{saved[0]}/2/params"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{weight}/"}}
    stored = tensorstore.open(spec, open=True, read=True).result()
    assert (stored.chunk_layout.read_chunk.shape[0] == 1) is by_entry


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(nano, saved):
    other = replace(nano.model, layers=3, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"holds another model: layers is 2 there and 3 here$"):
        restore_params(saved[0], other, abstract_params(other, nano.mesh()))


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_checkpoint_is_an_error_of_one_line(nano, tmp_path, name):
    (tmp_path / "empty").mkdir()
    assert latest_step(tmp_path / name) is None
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in .*{name}"):
        restore_params(tmp_path / name, nano.model, abstract_params(nano.model, nano.mesh()))
    assert not (tmp_path / "missing").exists()


def test_the_best_step_is_kept_beside_the_newest(nano, run, tmp_path):
    state, best = run(None, 1), {1: 1, 2: 1, 3: 3, 4: 3, 5: 3}
    with Checkpoints(tmp_path, keep=1, best=lambda: best[number]) as checkpoints:
        for number in best:
            checkpoints.save(number, state, nano.model, META)
        mesh = nano.mesh(2, 2, 2)
        with jax.set_mesh(mesh):
            restored = checkpoints.restore(3, nano.model, abstract_state(nano.model, nano.adam, mesh))
    assert_equal(restored, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5"]


def test_a_step_that_is_set_aside_is_restored_by_nothing(nano, run, copy):
    state = run(None, 1)
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.set_aside(2) and not checkpoints.set_aside(7)
        assert checkpoints.newest == 1 and checkpoints.steps() == [1]
        for number in (3, 4):
            checkpoints.save(number, state, nano.model, META)
    assert sorted(path.name for path in copy.iterdir()) == ["2.broken", "3", "4"] and latest_step(copy) == 4
