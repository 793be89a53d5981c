"""Text encoders: reading folders, and vectors that do not depend on padding, batch or devices."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.encoders import bert
from memsearcher_jax.encoders.bert import EncoderConfig
from tests.encoders.encoder_files import SMALL, make_params, write_encoder

E5_BASE = {  # as published with e5-base-v2
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
encode = jax.jit(bert.encode, static_argnames="config")


@pytest.fixture
def folder(tmp_path):
    """(changed settings, {file: JSON}) -> a folder with the config of E5 and these files."""

    def make(settings=None, files=None):
        (tmp_path / "config.json").write_text(json.dumps(E5_BASE | (settings or {})))
        for name, value in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return make


def modules(*kinds):
    return [
        {"idx": row, "name": str(row), "path": f"{row}_{kind}" if row else "", "type": f"sentence_transformers.{kind}"}
        for row, kind in enumerate(kinds)
    ]


ST_MODULES = modules("Transformer", "Pooling", "Normalize")


def make_rows(rows, tokens, seed=0):
    rng = np.random.RandomState(seed)
    length_B = rng.randint(1, tokens + 1, rows).astype(np.int32)
    length_B[0] = tokens
    return rng.randint(1, SMALL.vocab_size, (rows, tokens)).astype(np.int32), length_B


def test_the_published_e5_is_the_default_config(folder):
    assert bert.read_config(folder()) == EncoderConfig()


TEXTS = {"query": "q: ", "passage": "p: ", "document": "d: ", "corpus": None}
POOLING, SENTENCE = "1_Pooling/config.json", "config_sentence_transformers.json"
PROMPTS = {SENTENCE: {"prompts": TEXTS}}
OLD_POOLING = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
LIMITS = {"max_seq_length": 256, "do_lower_case": True}
NO_LIMIT = {"model_max_length": 10**30}  # as transformers writes it


@pytest.mark.parametrize(
    ("pooling", "transformer", "tokenizer", "expected"),
    [
        (OLD_POOLING, LIMITS, {}, ("cls", 256, True)),
        # Since 5.4 the pooling is one name or a list, and the length limit is in the tokenizer's file only.
        ({"pooling_mode": "cls", "include_prompt": True}, {}, {"model_max_length": 256}, ("cls", 256, False)),
        ({"pooling_mode": ["mean"]}, {}, NO_LIMIT, ("mean", 512, False)),
    ],
)
def test_sentence_transformers_files_set_pooling_length_and_prompts(folder, pooling, transformer, tokenizer, expected):
    files = {
        "modules.json": [module | {"type": module["type"].replace(".", ".base.modules.")} for module in ST_MODULES],
        POOLING: pooling,
        "sentence_xlm-roberta_config.json": transformer,  # one of the older names
        "tokenizer_config.json": tokenizer,
    }
    config = bert.read_config(folder(files=files | PROMPTS))
    assert (config.pooling, config.max_tokens, config.lower_case) == expected
    assert (config.query_prompt, config.passage_prompt) == ("q: ", "d: ")
    default = {"prompts": {"web": "w: ", "document": ""}, "default_prompt_name": "web"}
    config = bert.read_config(folder(files={SENTENCE: default}))
    assert (config.query_prompt, config.passage_prompt) == ("w: ", "")


def test_roberta_positions_start_after_the_padding_id(folder):
    theirs = {"model_type": "xlm-roberta", "pad_token_id": 1, "max_position_embeddings": 514, "type_vocab_size": 1}
    config = bert.read_config(folder(theirs))
    assert (config.first_position, config.max_tokens, config.types) == (2, 512, 1)


@pytest.mark.parametrize(
    ("settings", "files", "message"),
    [
        ({"model_type": "gpt2"}, {}, "model_type is 'gpt2', expected one of bert, roberta, xlm-roberta"),
        ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type = 'relative_key' is not supported"),
        ({"hidden_act": "silu"}, {}, "hidden_act = 'silu' is not supported, only 'gelu' is"),
        ({"hidden_size": 770}, {}, "hidden_size 770 is not a multiple of num_attention_heads 12"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers is 0, expected at least 1"),
        ({}, {"modules.json": modules("Transformer", "Pooling", "Dense")}, "module Dense is not supported"),
        ({}, {"modules.json": modules("Transformer")}, "lists no Pooling module"),
        ({}, {"modules.json": ST_MODULES, POOLING: {"pooling_mode": ["cls", "mean"]}}, "pools by cls and mean; only"),
        ({}, {"modules.json": ST_MODULES}, "pools by nothing; only mean or only cls"),
        ({}, {"modules.json": ST_MODULES, POOLING: {"include_prompt": False}}, "include_prompt = False is not"),
        ({}, {"modules.json": ST_MODULES[:2], SENTENCE: {"similarity_fn_name": "dot"}}, "'dot' depends on lengths"),
        ({}, {"modules.json": [{"path": ""}]}, "modules.json has an entry without a type"),
        ({"pad_token_id": None}, {}, "pad_token_id is missing: set it to the id of the tokenizer's padding token"),
        ({}, {"modules.json": {}}, "holds a dict, expected a JSON array"),
        ({}, {"sentence_bert_config.json": {"max_seq_length": "512"}}, "is '512', expected a number of tokens"),
        ({}, {SENTENCE: {"truncate_dim": 64}}, "truncate_dim is not supported"),
        ({}, {SENTENCE: {"prompts": {"query": 5}}}, "prompts must be an object of texts"),
    ],
)
def test_unsupported_encoders_are_refused_by_name(folder, settings, files, message):
    with pytest.raises(ValueError, match=message) as caught:
        bert.read_config(folder(settings, files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "bert.", "roberta."])
def test_weights_are_read_under_any_prefix(prefix, tmp_path):
    params = write_encoder(tmp_path, prefix)
    config, loaded = bert.load(tmp_path)
    assert config == SMALL
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_and_other_rows_change_a_vector_by_rounding_only(pooling):
    config, params = replace(SMALL, pooling=pooling), make_params(SMALL)
    ids_BT, length_B = make_rows(5, 20)
    vector_BD = encode(params, config, ids_BT, length_B)
    np.testing.assert_allclose(jnp.linalg.norm(vector_BD, axis=1), 1, atol=1e-6)
    spoilt_BT = np.where(np.arange(20) < length_B[:, None], ids_BT, 63)
    wide_BT = np.pad(spoilt_BT, ((0, 0), (0, 12)), constant_values=7)
    np.testing.assert_allclose(encode(params, config, wide_BT, length_B), vector_BD, atol=1e-6)
    shortest = int(length_B.argmin())
    alone_BD = encode(params, config, ids_BT[[shortest], : length_B[shortest]], length_B[[shortest]])
    np.testing.assert_allclose(alone_BD[0], vector_BD[shortest], atol=1e-6)
