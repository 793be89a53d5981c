"""What is saved comes back bit for bit, on any mesh; what is damaged is named in one line."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.training.checkpoint import Checkpoints, latest_step, restore_latest, restore_params
from memsearcher_jax.training.update import abstract_params, abstract_state, init_state, make_optimizer

# When the read of a damaged array fails orbax leaves others running, which complain whenever they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

META = {"position": 640, "seed": 7, "key": [1, 2], "config": {"rl": {"problems": 2}}}


def host(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, host(one), host(other))


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
    assert_equal(restore_latest(copy, nano.model, target)[0], state)


def test_a_truncated_newest_checkpoint_names_itself_and_the_way_out(nano, optimizer, copy):
    data = [file for file in (copy / "2" / "params").rglob("d/*") if file.is_file()]
    assert data
    for file in data:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"copy/2 cannot be read .*go on from step 1") as caught:
        restore_latest(copy, nano.model, abstract_state(nano.model, optimizer, nano.mesh()))
    assert "\n" not in str(caught.value)


def test_a_damaged_meta_names_itself(nano, copy):
    (copy / "2" / "meta" / "metadata").write_text('{"model": {')
    with pytest.raises(ValueError, match=r"copy/2 cannot be read .*go on from step 1"):
        restore_params(copy, nano.model, abstract_params(nano.model, nano.mesh()))


def test_a_checkpoint_of_another_model_names_the_difference(nano, saved):
    other = replace(nano.model, layers=3, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"holds another model: layers is 2 there and 3 here$"):
        restore_params(saved[0], other, abstract_params(other, nano.mesh()))


def test_a_checkpoint_from_before_a_setting_was_there_has_its_default(nano, copy):
    meta = copy / "2" / "meta" / "metadata"
    stored = json.loads(meta.read_text())
    assert stored["model"].pop("family") == "qwen2"
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
