"""LoRA adapters: the weights that they make, their files, and parity with PEFT."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from memsearcher_jax.model import lora, qwen, sharding, weights
from memsearcher_jax.model.config import LORA_TARGETS, MeshConfig
from tests.support import NANO

CONFIG = replace(NANO, lora_rank=4, lora_alpha=8.0, compute_dtype="float32")
new_adapters = jax.jit(lora.init, static_argnums=1)


def adapters_of(config, seed=1):
    """Adapters that change the weights: B is not 0."""
    new = jax.device_get(new_adapters(jax.random.key(seed), config))
    leaves, tree = jax.tree.flatten(new)
    rng = np.random.default_rng(seed)
    return tree.unflatten([x + 0.05 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves])


@pytest.fixture(scope="module")
def params():
    return jax.jit(qwen.init, static_argnums=1)(jax.random.key(0), NANO)


def forward(params, config=CONFIG):
    ids_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    position_BT, segment_BT = np.tile(np.arange(12), (2, 1)), np.ones((2, 12), np.int32)
    logits_BTV, _ = jax.jit(qwen.forward, static_argnums=1)(params, config, ids_BT, position_BT, segment_BT)
    return np.asarray(logits_BTV)


@pytest.mark.parametrize("target", LORA_TARGETS)
def test_an_adapter_adds_a_scaled_product_to_its_projection_alone(params, target):
    config = replace(CONFIG, lora_targets=(target,))
    adapters, name = adapters_of(config), lora.PATHS[target]
    merged, pair = lora.merge(params, adapters, config)["layers"], adapters["layers"][name]
    for layer in range(config.layers):
        a_RI = np.asarray(pair["a"][layer]).reshape(config.lora_rank, -1)
        b_OR = np.asarray(pair["b"][layer]).reshape(-1, config.lora_rank)
        before = np.asarray(params["layers"][name][layer])
        after_OI = before.reshape(len(b_OR), -1) + 2 * b_OR @ a_RI
        np.testing.assert_allclose(merged[name][layer], after_OI.reshape(before.shape), atol=1e-6)
    assert all(merged[other] is params["layers"][other] for other in merged if other != name)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "remat"), [("float32", 1e-5, "save_qkv_attention_up"), ("bfloat16", 0.05, "none")]
)
def test_adapters_get_the_gradient_of_the_weights_that_they_make(params, dtype, tolerance, remat):
    """It is computed without the gradients of the weights themselves; the reference differentiates through `merge`."""
    config, adapters = replace(CONFIG, compute_dtype=dtype, remat=remat), adapters_of(CONFIG)
    ids_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    arguments = config, ids_BT, np.tile(np.arange(12), (2, 1)), np.ones((2, 12), np.int32)
    target_BTV = np.random.default_rng(1).standard_normal((2, 12, config.vocab_size)).astype(np.float32)

    def loss(weights):
        return (qwen.forward(weights, *arguments)[0] * target_BTV).sum()

    @jax.jit
    @jax.grad
    def through_merge(adapters):
        return loss(lora.merge(params, adapters, config))

    @jax.jit
    def of_adapters(adapters):
        merged = lora.merge(params, adapters, config)
        return jax.grad(lambda adapters: loss(merged | {"adapters": adapters["layers"]}))(adapters)

    expected, found = (jax.device_get(gradient(adapters)) for gradient in (through_merge, of_adapters))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)


def test_adapters_are_sharded_like_their_projection():
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2), jax.devices())
    layers = sharding.abstract_arrays(lora.adapter_specs(CONFIG), mesh)["layers"]

    def axes(name, part):
        return [axis for axis in layers[name][part].sharding.spec if axis]

    assert (axes("wq", "a"), axes("wq", "b")) == (["fsdp"], ["tensor"])
    assert (axes("down", "a"), axes("down", "b")) == (["tensor"], ["fsdp"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_hold_the_adapters_exactly(tmp_path, dtype):
    config = replace(CONFIG, lora_targets=("q_proj", "o_proj", "down_proj"))
    adapters = adapters_of(config)
    lora.write_adapters(tmp_path, config, adapters, "owner/base", dtype, "4f2a")
    assert json.loads((tmp_path / lora.CONFIG_FILE).read_text())["revision"] == "4f2a"
    found, read = lora.read_adapters(tmp_path, NANO)
    assert found == replace(NANO, lora_rank=4, lora_alpha=8.0, lora_targets=config.lora_targets)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), adapters)
    jax.tree.map(np.testing.assert_array_equal, read, rounded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is True, only False is supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only 'LORA' is supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', only True is supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is"),
        ({"layers_to_transform": [1]}, r"layers_to_transform is \[1\], only None is supported"),
        ({"gated": True}, "gated is not known: remove it there"),
        ({"r": 8}, "but .* implies"),
        ({"r": 0}, "r is 0 and lora_alpha is 8.0, expected positive numbers"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', expected"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan, expected"),
    ],
)
def test_other_variants_are_refused(tmp_path, changes, message):
    lora.write_adapters(tmp_path, CONFIG, adapters_of(CONFIG), "base", "float32")
    file = tmp_path / lora.CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        lora.read_adapters(tmp_path, NANO)


def test_incomplete_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no adapters .*: launch/export_hf.py --adapter writes"):
        lora.read_adapters(tmp_path, NANO)
    lora.write_adapters(tmp_path, CONFIG, adapters_of(CONFIG), "base", "float32")
    save_file({}, tmp_path / lora.WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors holds no adapters"):
        lora.read_adapters(tmp_path, NANO)


@pytest.mark.parity
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_peft_reads_our_adapters_and_we_read_its(tmp_path, family):
    """Logits, merged weights and files, in both directions."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = replace(CONFIG, family=family)
    params, adapters = qwen.init(jax.random.key(0), replace(NANO, family=family)), adapters_of(config)
    weights.save(tmp_path / "base", config, params, None)
    (tmp_path / "ours").mkdir()
    lora.write_adapters(tmp_path / "ours", config, adapters, str(tmp_path / "base"), "float32")

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    ids_BT = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocab_size, (2, 12)))
    with torch.no_grad():
        theirs = model(ids_BT).logits.numpy()
    merged = lora.merge(params, adapters, config)
    np.testing.assert_allclose(forward(merged, config), theirs, atol=1e-5)
    assert np.abs(theirs - forward(params, config)).max() > 0.1

    model.save_pretrained(tmp_path / "theirs")
    found, read = lora.read_adapters(tmp_path / "theirs", replace(NANO, family=family))
    assert found == replace(config, compute_dtype=NANO.compute_dtype)
    jax.tree.map(np.testing.assert_array_equal, read, adapters)

    exported = model.merge_and_unload().state_dict()
    for path, value in jax.tree.leaves_with_path(merged["layers"]):
        for layer in range(config.layers):
            expected = exported[weights.NAMES[f"layers.{path[0].key}"].format(layer)].numpy()
            np.testing.assert_allclose(np.asarray(value[layer]).reshape(expected.shape), expected, atol=1e-6)
