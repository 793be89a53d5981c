"""config.json: old and new formats are read, unsupported settings are refused by name."""

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
QWEN3_4B = SEVEN_B | {  # as published with Qwen3-4B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
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


def test_the_published_7b_is_the_default_config(read):
    assert read(SEVEN_B) == ModelConfig(param_dtype="bfloat16")


LLAMA3_2_1B = without(SEVEN_B, "max_window_layers", "sliding_window", "use_sliding_window") | {  # as published
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
SCALING = LLAMA3_2_1B["rope_scaling"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500_000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_is_read_from_every_version_of_the_file(rope, read):
    assert read(without(SEVEN_B, "rope_theta") | rope).rope_theta == 5e5


def test_keys_that_fine_tuning_and_conversion_leave_behind_change_nothing(read):
    left = {"transformers.js_config": {"kv_cache_dtype": {}}, "_attn_implementation_autoset": True, "use_mrope": False}
    whole = dict.fromkeys(("_commit_hash", "cross_attention_hidden_size", "prefix", "sep_token_id"))  # transformers 4
    kept = {"rope_interleaved": False, "do_sample": True, "pad_token_id": 3, "gradient_checkpointing": False}
    assert read(SEVEN_B | left | whole | kept) == read(SEVEN_B)


def test_settings_missing_from_old_files_have_their_old_defaults(read):
    config = read(without(SEVEN_B, "tie_word_embeddings", "torch_dtype"))
    assert (config.head_size, config.tie_embeddings, config.param_dtype) == (128, False, "float32")


def test_a_written_config_is_read_back(variant, read):
    _, config = variant
    for dtype in ("float32", "bfloat16"):
        written = replace(config, param_dtype=dtype)
        assert replace(read(config_json(written)), compute_dtype="float32") == written


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (QWEN3_4B | {"attention_bias": True}, "attention_bias = True is not supported, only False is"),
        (QWEN3_4B | {"head_dim": None}, "field 'head_dim'.* got NoneType"),
        (LLAMA3_2_1B | {"mlp_bias": True}, "mlp_bias = True is not supported, only False is"),
        (LLAMA3_2_1B | {"rope_scaling": without(SCALING, "factor")}, "Missing required keys .*factor"),
        (LLAMA3_2_1B | {"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "4.0 is not below high_freq_factor 4.0"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected one of qwen2, qwen3, llama"),
        ({"model_type": None}, "model type `None`"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_parameters = .*"yarn".* is not supported'),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "rope_parameters = .*linear"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "rope_parameters = .*partial_rotary"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu' is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
        ({"hidden_size": None}, "field 'hidden_size'.* got NoneType"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected at least 1"),
        ({"vocab_size": "many"}, "field 'vocab_size'.*many"),
        ({"num_key_value_heads": 3}, "num_attention_heads 28 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 127}, "`head_dim`=127"),
        ({"rope_theta": -1e6}, "rope_theta is -1000000.0, expected a positive number"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', expected a positive number"),
        ({"rope_scaling": SCALING | {"factor": -8.0}}, "factor is -8.0, expected a positive number"),
        ({"rms_norm_eps": "small"}, "field 'rms_norm_eps'.*small"),
        ({"is_causal": False}, "is_causal = False is not supported, only True is"),
        ({"attention_sinks": 4}, "attention_sinks is not known, and the model may depend on it"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "auto_map is not known"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000.0 in one place and 10000.0 in another"),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
            "rope_type is yarn in one place and default in another",
        ),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 4.0}}, "rope_parameters = .*factor"),
    ],
)
def test_unsupported_models_are_refused_by_name(settings, message, read):
    with pytest.raises(ValueError, match=message) as error:
        read(SEVEN_B | settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("{", ".*is not a valid JSON file"), ("[]", "Unrecognized model")])
def test_a_damaged_config_is_refused(text, message, read):
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read(text)


def test_a_missing_folder_or_file_is_refused(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no .*config.json: .* is not a Hugging Face model"):
            read_config(folder)
