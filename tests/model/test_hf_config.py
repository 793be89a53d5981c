"""config.json: read in both of its dialects, refused by name where it asks for what this model does not do."""

import json
from dataclasses import replace

import pytest

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.hf_config import config_json, read_config

SEVEN_B = {  # as published with Qwen2.5-7B-Instruct
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


QWEN3_4B = {  # as published with Qwen3-4B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture
def read(tmp_path):
    def read(settings) -> ModelConfig:
        (tmp_path / "config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return read_config(tmp_path)

    return read


def without(settings, *names):
    return {name: value for name, value in settings.items() if name not in names}


def test_the_published_7b_is_our_default(read):
    assert read(SEVEN_B) == ModelConfig(param_dtype="bfloat16")


def test_the_published_qwen3_is_read_with_its_own_head_size(read):
    assert read(QWEN3_4B) == ModelConfig(
        *(151_936, 2_560, 9_728, 36, 32, 8, 128),
        tied=True,
        family="qwen3",
        max_positions=40_960,
        param_dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported, only False is"),
        ({"head_dim": None}, "head_dim is None, expected a positive whole number"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', expected 'qwen2' or 'qwen3'"),
    ],
)
def test_another_qwen3_is_refused_by_name(settings, message, read):
    with pytest.raises(ValueError, match=message):
        read(QWEN3_4B | settings)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500_000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_is_found_where_each_version_writes_it(rope, read):
    assert read(without(SEVEN_B, "rope_theta") | rope).rope_theta == 5e5


def test_what_old_files_leave_out_has_the_meaning_of_its_time(read):
    config = read(without(SEVEN_B, "num_key_value_heads", "tie_word_embeddings", "torch_dtype"))
    assert (config.kv_heads, config.head_size, config.tied, config.param_dtype) == (28, 128, False, "float32")


def test_what_we_write_we_read(variant, read):
    _, config = variant
    for dtype in ("float32", "bfloat16"):
        written = replace(config, param_dtype=dtype)
        assert replace(read(config_json(written)), compute_dtype="float32") == written


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'qwen2' or 'qwen3'"),
        ({"model_type": None}, "model_type is None, expected 'qwen2' or 'qwen3'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_scaling = .*"yarn".* is not supported'),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "rope_parameters = .*linear"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "rope_parameters = .*partial_rotary"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu' is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 28 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 127}, "head_dim 127 is odd"),
        ({"rope_theta": None}, "rope_theta is None, expected a positive number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a positive number"),
    ],
)
def test_another_model_is_refused_by_name(settings, message, read):
    with pytest.raises(ValueError, match=message) as error:
        read(SEVEN_B | settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "holds a list, expected a JSON object")]
)
def test_a_damaged_file_is_named(text, message, read):
    with pytest.raises(ValueError, match=f"config.json {message}"):
        read(text)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere: expected a Hugging Face model"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        read_config(tmp_path)
