"""The programs of a GPU, lowered without one: which kernels they call, and what they never hold in memory.

The kernels are compared with dense attention in tests/model; nothing here runs.
"""

import re
from functools import partial

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.kv_cache import Cache
from memsearcher_jax.ops.axes import MESH_AXES
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.decode import decode
from memsearcher_jax.sampling.prefill import prefill
from memsearcher_jax.sampling.scheduler import Scheduler
from memsearcher_jax.training import packing, update
from memsearcher_jax.training.config import TrainingConfig

GPU = AbstractDevice("NVIDIA H100", None, "gpu")
MESH = AbstractMesh((1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=GPU)
# Pallas on Triton is deprecated from JAX 0.12 on, which it says whenever it lowers a kernel.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


def lowered(function, *arguments):
    """The text of a jitted function's program for CUDA, on one GPU; arguments are arrays or their shapes."""
    # An exported program may call only what JAX promises to keep stable, to which kernels of Triton do not belong.
    kernel = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with jax.sharding.use_abstract_mesh(MESH):
        return export.export(function, platforms=["cuda"], disabled_checks=[kernel])(*arguments).mlir_module()


def kernels(text):
    return re.findall(r'name = "(\w+_kernel)"', text)


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def sampler(request):
    """(model, abstract weights, cache, the first step and the last of an engine's warm-up)."""
    model = ModelConfig(512, 256, 512, layers=3, heads=4, kv_heads=2, head_size=64, param_dtype="bfloat16")
    specs = qwen.publish(qwen.param_specs(model), model, "gpu", request.param)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    settings = SamplingConfig(slots=16, context_tokens=512, prefill_buckets=(256,))
    with jax.sharding.use_abstract_mesh(MESH):
        empty = partial(Cache.empty, model, 64, settings.page_tokens, int8=request.param == "int8")
        cache = jax.eval_shape(empty)
    return model, params, cache, Scheduler(settings, 1).warm_up_steps()


def test_decoding_reads_pages_in_place_and_each_layer_by_itself(sampler):
    """One kernel per layer over the pools of all layers; no array has the weights of all layers, or a layer's pool."""
    model, params, cache, steps = sampler
    program = jax.jit(partial(decode, model, 8, (0,)), donate_argnums=0)
    text = lowered(program, cache, params, jax.eval_shape(lambda: jax.random.key(0)), steps[-1].decode)
    assert kernels(text) == ["paged_kernel"] * model.layers
    assert not re.search("tensor<3x(512x256|256x512)x", text)
    L, P, K, H, E = cache.k_LPKHE.shape
    dtype = {"bfloat16": "bf16", "int8": "i8"}[cache.k_LPKHE.dtype.name]
    assert f"tensor<{L}x{P}x{K}x{H}x{E}x{dtype}>" in text
    assert not re.search(rf"tensor<(1x)?{P}x{K}x({H}x{E}|{E}x{H})x", text)


def test_prefill_attends_by_kernels_to_new_and_to_cached_tokens(sampler):
    """But for the last layer, of which only keys and values are needed."""
    model, params, cache, steps = sampler
    (call,) = steps[0].calls[1:]
    text = lowered(jax.jit(partial(prefill, model), donate_argnums=0), cache, params, call)
    assert kernels(text) == ["forward_kernel", "paged_kernel"] * (model.layers - 1)


def test_a_training_step_of_long_rows_has_no_scores_in_memory():
    """Nor a mask: no array has an entry for each query and key of a row."""
    T = 8_192
    model = ModelConfig(512, 256, 512, layers=2, heads=4, kv_heads=2, head_size=64, attention="triton")
    config = TrainingConfig(seq_len=T, minibatch_rows=2, grad_accum_steps=2, kl_coefficient=0.0)
    optimizer = update.make_optimizer(config)
    program = update.make_update(model, config, optimizer, MESH, temperature=1.0)
    example = packing.TrainingExample(list(range(100)), [0.0] * 100, [False] * 50 + [True] * 50, 1.0)
    batch = packing.pack([example], T, 2, np.random.default_rng(0))
    text = lowered(program, update.abstract_state(model, optimizer, MESH), batch)
    assert kernels(text) == ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]
    assert f"{T}x{T}" not in text
