"""The search for settings that fit, with programs that are not compiled, and ways out where nothing fits."""

from dataclasses import replace

import jax
import pytest

from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.ops.kernel_errors import KernelError
from memsearcher_jax.planning import roofline, tpu_plan
from memsearcher_jax.planning.planner import Planner
from memsearcher_jax.planning.roofline import Workload
from memsearcher_jax.planning.tpu_plan import DoesNotFitError, Program

GB = 1e9


def planner_of(generation, *, trains=True, samples=True, said=None):
    """For a slice of one chip, in whose place the device of the tests is."""
    topology = roofline.Topology.of(generation, (1, 1), jax.devices()[:1], jax.devices()[:1])
    say = [].append if said is None else said.append
    return Planner(topology, Workload(), trains, samples, lambda _: None, lambda _: None, say)


@pytest.fixture(scope="module")
def half_b():
    config = load_preset("qwen05b")
    return replace(config, rl=replace(config.rl, prompts_per_step=16, group_size=8))


def test_the_first_training_whose_programs_fit_is_found(half_b, monkeypatch):
    """A policy fits that saves little; those above it are not compiled once one of them is known to exceed by 3 GB."""
    tried, said = [], []
    planner = planner_of("v5e", said=said)
    limit = planner.topology.chip.hbm_bytes

    def programs(config, meshes, notify):
        least = planner._least_training(config).peaks["update"]
        if least + 4 * GB > limit:
            raise DoesNotFitError("update: Ran out of memory", least + 4 * GB)
        yield Program("update", "update", 1, int(least + 4 * GB), None)

    monkeypatch.setattr(tpu_plan, "training_programs", programs)
    found = planner.fastest_training(half_b, tried.append)
    assert found is not None and found.config == tried[-1] and found.plan.peaks["update"] <= limit
    assert 1 <= len(said) == len(tried) - 1 <= 4
    assert all(line == "does not fit: update: Ran out of memory" for line in said)
    saved = [planner._least_training(config).needed_bytes for config in tried]
    assert saved[-1] == min(saved)


def test_a_sampler_that_exceeds_the_device_by_its_temporary_memory_gets_fewer_slots(half_b, monkeypatch):
    planner = planner_of("v5e")

    def programs(config, meshes, notify, trains):
        assert trains
        yield Program("decode", "rollout", 1, int(planner.memory(config).rollout + 3 * GB), None)

    monkeypatch.setattr(tpu_plan, "sampling_programs", programs)
    tried = []
    found = planner.fastest_sampler(half_b, tried.append)
    assert found is not None and [config.sampling.slots for config in tried] == [256, 192]
    assert found.config.sampling.kv_tokens == 192 * 2_048 and found.config.sampling.tensor == 1


def test_nothing_is_found_where_no_lower_bound_fits(half_b):
    seven_b = load_preset("qwen7b")
    planner = planner_of("v5e")
    assert planner.fastest_training(planner.with_valid_sampler(seven_b), pytest.fail) is None
    assert planner.with_less_memory(seven_b) is None


def test_settings_with_less_memory_name_rows_slots_and_copies_of_the_weights(half_b):
    """32 accumulation steps of 256 rows are eight rows of the one device, and its sampler has the weights alone."""
    typed = replace(
        half_b,
        model=replace(half_b.model, remat="none"),
        sampling=replace(half_b.sampling, tensor=2, kv_tokens=2**20),
    )
    planner = planner_of("v5e")
    with pytest.raises(ValueError, match=r"sampling\.tensor 2 does not divide the 1 devices of a host: set it to 1"):
        planner.plan(typed)
    smaller = planner.with_less_memory(typed)
    assert smaller.model.remat == "nothing_saveable" and smaller.sampling.tensor == 1
    assert smaller.training.grad_accum_steps == 256 and smaller.sampling.slots == 128
    assert planner._least_training(smaller).reason == planner._least_sampling(smaller).reason == ""


def test_a_host_that_only_samples_holds_no_training_state(half_b):
    config = planner_of("v5e").with_valid_sampler(half_b)
    trained = planner_of("v5e").memory(config)
    sampled = planner_of("v5e", trains=False).memory(config)
    assert (sampled.state, sampled.training, sampled.reference) == (0, 0, 0)
    assert sampled.rollout == sampled.sampler_params + sampled.slots == trained.rollout - trained.training


class _Lowered:
    def __init__(self, message):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_kernel_that_does_not_compile_names_its_setting_and_a_full_device_does_not():
    """The compiler lists kernels among what is allocated where a device's memory does not suffice."""
    kernel = _Lowered("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while compiling tpu_custom_call")
    with pytest.raises(KernelError, match=r"set sampling\.attention to xla"):
        tpu_plan._compile("decode", kernel, 0, "sampling.attention")
    line = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory (20.00G) exceeds available HBM (15.75G)"
    with pytest.raises(DoesNotFitError, match=r"update: Ran out of memory .* \(21\.47 GB\) exceeds") as found:
        tpu_plan._compile("update", _Lowered(f"{line}\ntpu_custom_call"), 0, "model.attention")
    assert found.value.needed_bytes == 20 * 2**30
    message = (
        r"^the TPU compiler failed on the program 'update': try another mesh.tensor, .* \(INTERNAL: something else\)$"
    )
    with pytest.raises(tpu_plan.CompilerError, match=message):
        tpu_plan._compile("update", _Lowered("INTERNAL: something else\nat a place"), 0, "model.attention")
