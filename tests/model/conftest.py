"""Small models of every kind. Biases and norm weights are random, because the zeros and ones of `init` hide bugs."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig, RopeScaling

BASE = ModelConfig(
    vocab_size=96,
    embed_size=32,
    ffn_size=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_size=8,
    max_positions=512,
    compute_dtype="float32",
)
VARIANTS = {
    "grouped_untied": BASE,
    "grouped_tied": replace(BASE, tie_embeddings=True),
    "multi_head_untied": replace(BASE, kv_heads=4, rope_theta=10_000.0),
    "multi_query_tied": replace(BASE, kv_heads=1, tie_embeddings=True, norm_eps=1e-5),
    "wide_heads_untied": replace(BASE, head_size=16),
    "qwen3_tied": replace(BASE, family="qwen3", head_size=16, tie_embeddings=True),
    "qwen3_untied": replace(BASE, family="qwen3", kv_heads=1, norm_eps=1e-5),
    "llama_tied": replace(BASE, family="llama", tie_embeddings=True, rope_theta=1e5),
    # In tokens, the wavelengths are 6, 39, 245 and 1,541: two stay, one is interpolated, and one grows by the factor.
    "llama3_untied": replace(
        BASE, family="llama", kv_heads=1, rope_theta=1_540.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 256)
    ),
}


@pytest.fixture(scope="session")
def base() -> ModelConfig:
    return BASE


@pytest.fixture(scope="session")
def variants() -> dict[str, ModelConfig]:
    return VARIANTS


@pytest.fixture(params=VARIANTS)
def variant(request) -> tuple[str, ModelConfig]:
    return request.param, VARIANTS[request.param]


@pytest.fixture(scope="session")
def forward():
    """`qwen.forward`, compiled: operation by operation it takes seconds."""
    return jax.jit(qwen.forward, static_argnames=("config", "output"))


@pytest.fixture(scope="session")
def make_params():
    """(config, seed=0) -> params without zeros and ones."""

    def make(config: ModelConfig, seed: int = 0) -> dict:
        rng = np.random.RandomState(seed)
        shapes = jax.eval_shape(lambda key: qwen.init(key, config), jax.random.key(0))
        centre = dict.fromkeys(("attention_norm", "ffn_norm", "final_norm", "q_norm", "k_norm"), 1.0)
        return jax.tree.map_with_path(
            lambda path, x: jnp.asarray(
                (centre.get(path[-1].key, 0) + 0.2 * rng.standard_normal(x.shape)).astype(x.dtype)
            ),
            shapes,
        )

    return make


@pytest.fixture(scope="session")
def make_rows():
    """(config, rows, tokens, seed=0) -> (ids_BT, position_BT, segment_BT): unpacked rows without padding."""

    def make(config: ModelConfig, rows: int, tokens: int, seed: int = 0):
        ids_BT = np.random.RandomState(seed).randint(0, config.vocab_size, (rows, tokens)).astype(np.int32)
        position_BT = np.tile(np.arange(tokens, dtype=np.int32), (rows, 1))
        return ids_BT, position_BT, np.ones_like(ids_BT)

    return make


@pytest.fixture(scope="session")
def hf_tensors():
    """(config, seed=0) -> the tensors of a Hugging Face folder, by name; written without the tables of the package."""

    def make(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
        D, F, N = config.embed_size, config.ffn_size, config.heads * config.head_size
        K = config.kv_heads * config.head_size
        shapes = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
        for layer in range(config.layers):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            shapes |= {
                f"model.layers.{layer}.input_layernorm.weight": (D,),
                f"model.layers.{layer}.post_attention_layernorm.weight": (D,),
            }
            for name, size in (("q", N), ("k", K), ("v", K)):
                shapes[f"{attention}.{name}_proj.weight"] = (size, D)
                if config.family == "qwen2":
                    shapes[f"{attention}.{name}_proj.bias"] = (size,)
                elif config.family == "qwen3" and name != "v":
                    shapes[f"{attention}.{name}_norm.weight"] = (config.head_size,)
            shapes |= {
                f"{attention}.o_proj.weight": (D, N),
                f"{mlp}.gate_proj.weight": (F, D),
                f"{mlp}.up_proj.weight": (F, D),
                f"{mlp}.down_proj.weight": (D, F),
            }
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, D)
        rng = np.random.RandomState(seed)
        return {name: (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}

    return make


@pytest.fixture(scope="session")
def hf_config_json():
    """(config) -> config.json of a Hugging Face folder, as transformers 4 writes it."""

    def make(config: ModelConfig) -> dict:
        scaling, rope_scaling = config.rope_scaling, None
        if scaling.factor != 1:
            rope_scaling = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
        return {
            "architectures": [f"{config.family.capitalize()}ForCausalLM"],
            "model_type": config.family,
            "vocab_size": config.vocab_size,
            "hidden_size": config.embed_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": rope_scaling,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": config.tie_embeddings,
            "torch_dtype": "float32",
        }

    return make


@pytest.fixture
def make_folder(tmp_path, hf_config_json, hf_tensors):
    """(config, tensors=None, **settings) -> a Hugging Face folder written without `weights.save`."""

    def make(config: ModelConfig, tensors: dict[str, np.ndarray] | None = None, **settings):
        folder = tmp_path / "theirs"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf_config_json(config) | settings))
        save_file(tensors or hf_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make
