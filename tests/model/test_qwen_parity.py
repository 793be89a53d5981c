"""Every part of the model agrees with transformers in float32."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import qwen, weights
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.rope import apply_rope, rope_rotation

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
theirs = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}

GOLDEN = Path(__file__).with_name("golden_logits.npz")
HALF_B = ModelConfig(151_936, 896, 4_864, 24, 14, 2, 64, tie_embeddings=True, compute_dtype="float32")


@pytest.fixture
def hf_model(hf_config_json, hf_tensors):
    """(config) -> the model of transformers with the weights of `hf_tensors`."""

    def make(config):
        their_settings, their_class = FAMILIES[config.family]
        their = their_settings.from_dict(hf_config_json(config))
        their._attn_implementation = "eager"
        model = their_class(their).eval()
        state = {name: torch.from_numpy(x) for name, x in hf_tensors(config).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"] if config.tie_embeddings else [], [])
        return model

    return make


def close(ours, expected):
    np.testing.assert_allclose(ours, expected.detach().numpy(), atol=1e-4, rtol=0)


def tensor(x):
    return torch.from_numpy(np.array(x))


def hidden(rows, tokens, size):
    return np.random.RandomState(1).standard_normal((rows, tokens, size)).astype(np.float32)


def test_rotary_positions(variant, hf_model):
    _, config = variant
    q_BNTH = hidden(2, config.heads * 6, config.head_size).reshape(2, config.heads, 6, config.head_size)
    position_BT = np.array([[0, 1, 2, 3, 4, 5], [7, 8, 100, 300, 500, 511]])
    cos, sin = hf_model(config).model.rotary_emb(tensor(q_BNTH), tensor(position_BT))
    expected, _ = theirs.apply_rotary_pos_emb(tensor(q_BNTH), tensor(q_BNTH), cos, sin)
    rotation = rope_rotation(position_BT, config.head_size, config.rope_theta, config.rope_scaling)
    close(apply_rope(jnp.asarray(q_BNTH), rotation), expected)


def test_logits(variant, hf_model, make_folder, make_rows, forward):
    _, config = variant
    ids_BT, position_BT, segment_BT = make_rows(config, 3, 40, seed=5)
    _, params = weights.load(make_folder(config))
    with torch.no_grad():
        expected = hf_model(config)(tensor(ids_BT).long()).logits
    close(forward(params, config, ids_BT, position_BT, segment_BT)[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family, base, hf_model, make_folder, make_rows):
    config = replace(base, family=family)
    ids_BT, position_BT, segment_BT = make_rows(config, 2, 9)
    model = hf_model(config)
    model(tensor(ids_BT).long()).logits.square().mean().backward()
    _, params = weights.load(make_folder(config))
    actual = jax.grad(lambda p: jnp.mean(jnp.square(qwen.forward(p, config, ids_BT, position_BT, segment_BT)[0])))(
        params
    )
    close(actual["embed"], model.model.embed_tokens.weight.grad)
    for layer, block in enumerate(model.model.layers):
        N, D = config.heads * config.head_size, config.embed_size
        close(actual["layers"]["wq"][layer].reshape(N, D), block.self_attn.q_proj.weight.grad)
        if family == "qwen2":
            close(actual["layers"]["bk"][layer].reshape(-1), block.self_attn.k_proj.bias.grad)
        elif family == "qwen3":
            close(actual["layers"]["q_norm"][layer], block.self_attn.q_norm.weight.grad)
            close(actual["layers"]["k_norm"][layer], block.self_attn.k_norm.weight.grad)
        close(actual["layers"]["down"][layer], block.mlp.down_proj.weight.grad)


def test_the_golden_file_equals_transformers(variants, hf_model):
    """Delete the file and run this test to record it again."""
    ids_BT = np.random.RandomState(3).randint(0, 96, (2, 12))
    with torch.no_grad():
        logits = {name: hf_model(config)(tensor(ids_BT)).logits.numpy() for name, config in variants.items()}
    if not GOLDEN.exists():
        np.savez_compressed(GOLDEN, ids=ids_BT.astype(np.int32), **logits)
        pytest.fail(f"made {GOLDEN}: look at the change and commit it")
    with np.load(GOLDEN) as golden:
        assert set(golden) == {"ids", *logits}
        np.testing.assert_array_equal(golden["ids"], ids_BT)
        for name, logits_BTV in logits.items():
            np.testing.assert_allclose(golden[name], logits_BTV, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [10_000, 5_000_000_000])
def test_transformers_reads_saved_folders(dtype, shard_bytes, variant, make_params, tmp_path):
    _, config = variant
    config = replace(config, param_dtype=dtype)
    params = make_params(config)
    weights.save(tmp_path / "ours", config, params, None, max_shard_bytes=shard_bytes)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.dtype == getattr(torch, dtype)
    rope = model.config.rope_parameters
    assert rope["rope_theta"] == config.rope_theta
    assert rope.get("factor", 1) == config.rope_scaling.factor
    embed, down = model.model.embed_tokens.weight, model.model.layers[2].mlp.down_proj.weight
    np.testing.assert_array_equal(embed.detach().float().numpy(), params["embed"].astype(jnp.float32))
    np.testing.assert_array_equal(down.detach().float().numpy(), params["layers"]["down"][2].astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folders_saved_by_transformers_are_read(dtype, variant, hf_model, make_rows, tmp_path, forward):
    _, config = variant
    model = hf_model(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    actual, params = weights.load(tmp_path / "theirs")
    expected_dtype = "bfloat16" if dtype == "bfloat16" else "float32"  # float32 holds float16 exactly
    assert replace(actual, compute_dtype="float32") == replace(config, param_dtype=expected_dtype)
    ids_BT, position_BT, segment_BT = make_rows(config, 2, 10)
    with torch.no_grad():
        expected = model.float()(tensor(ids_BT).long()).logits
    close(forward(params, replace(actual, compute_dtype="float32"), ids_BT, position_BT, segment_BT)[0], expected)


@pytest.mark.slow
def test_the_shape_of_qwen_0_5b(make_rows, tmp_path, forward):
    """494 million random weights, biases and norms included; about 5 GB of memory and 2 GB of disk."""
    params = jax.jit(lambda key: _shaken(qwen.init(key, HALF_B), key))(jax.random.key(0))
    weights.save(tmp_path / "ours", HALF_B, params, None, max_shard_bytes=1_000_000_000)
    assert len(json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())["weight_map"]) == 290
    ids_BT, position_BT, segment_BT = make_rows(HALF_B, 1, 12)
    ours_BTV, _ = forward(params, HALF_B, ids_BT, position_BT, segment_BT)
    ours_BTV = np.asarray(ours_BTV)
    del params
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="float32")
    with torch.no_grad():
        close(ours_BTV, model(tensor(ids_BT).long()).logits)


def _shaken(params, key):
    """The params with noise on biases and norms, which are zeros and ones in `init`."""
    small = {"bq", "bk", "bv", "attention_norm", "ffn_norm", "final_norm"}
    return jax.tree.map_with_path(
        lambda path, x: x + 0.1 * jax.random.normal(key, x.shape) if path[-1].key in small else x, params
    )
