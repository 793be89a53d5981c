"""Hugging Face folders: bit-exact round trips, sliced reads, atomic writes, damaged folders refused."""

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tyro
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from memsearcher_jax.model import qwen, sharding, weights
from memsearcher_jax.model.config import MeshConfig, ModelConfig


def assert_same(actual, expected):
    """Equal bit by bit, including the dtype."""

    def same(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))

    jax.tree.map(same, actual, expected)


def shard_files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", 20_000), ("bfloat16", 5_000_000_000)])
def test_a_round_trip_is_bit_exact(shard_bytes, dtype, variant, make_params, tmp_path):
    _, config = variant
    config = replace(config, param_dtype=dtype)
    params = make_params(config)
    weights.save(tmp_path / "out", config, params, None, max_shard_bytes=shard_bytes)
    loaded_config, loaded = weights.load(tmp_path / "out")
    assert replace(loaded_config, compute_dtype="float32") == config
    assert_same(loaded, params)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (shard_bytes < 1e9)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no partial folder remains


def test_shards_respect_the_limit_and_the_index_lists_every_tensor_once(base, make_params, tmp_path):
    weights.save(tmp_path / "out", base, make_params(base), None, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file: load_file(tmp_path / "out" / file) for file in shard_files(tmp_path / "out")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(x.nbytes for x in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 20_000 and index["metadata"]["total_size"] == sum(sizes)


def test_tensors_have_the_names_shapes_and_values_of_the_format(variant, make_folder, hf_tensors, tmp_path):
    """A folder that `weights.save` did not write has the same tensors after loading and saving."""
    _, config = variant
    loaded_config, params = weights.load(make_folder(config))
    weights.save(tmp_path / "ours", loaded_config, params, None)
    ours, expected = load_file(tmp_path / "ours" / "model.safetensors"), hf_tensors(config)
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_every_source_dtype_is_read_as_every_dtype(source, dtype, base, make_folder, hf_tensors):
    tensors = {name: x.astype(source) for name, x in hf_tensors(base).items()}
    param_specs = np.dtype(source).name
    config, params = weights.load(make_folder(base, tensors, torch_dtype=param_specs), dtype=dtype)
    expected = dtype or ("bfloat16" if param_specs == "bfloat16" else "float32")
    assert config.param_dtype == expected
    embed_VD = tensors["model.embed_tokens.weight"].astype(np.float32).astype(jnp.dtype(expected))
    assert_same(params["embed"], jnp.asarray(embed_VD))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1)])
def test_weights_load_onto_a_mesh(sizes, base, make_folder):
    folder = make_folder(base)
    _, expected = weights.load(folder)
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    _, params = weights.load(folder, mesh=mesh)
    shardings = sharding.param_shardings(base, mesh)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)), params, shardings)
    assert_same(params, expected)


def test_only_the_requested_slice_is_read(base, make_folder, hf_tensors):
    """A device with half of the heads and half of the columns reads no other bytes."""
    asked = []

    class Recorder:
        def __init__(self, handle):
            self.handle = handle

        def get_slice(self, name):
            part = self.handle.get_slice(name)
            return type("Slice", (), {"__getitem__": lambda _, cuts: asked.append((name, cuts)) or part[cuts]})()

    weight = qwen.param_specs(base)["layers"]["wq"]
    with safe_open(make_folder(base) / "model.safetensors", framework="numpy") as handle:
        name = "model.layers.2.self_attn.q_proj.weight"
        index = (slice(2, 3), slice(2, 4), slice(None), slice(0, 16))
        block = weights.read_shard({name: Recorder(handle)}, "layers.wq", weight, index)
    assert asked == [(name, (slice(16, 32), slice(0, 16)))]
    expected = hf_tensors(base)[name][16:32, :16].reshape(1, 2, 8, 16)
    np.testing.assert_array_equal(block, expected)


def test_sharded_weights_are_saved_completely(base, make_params, tmp_path):
    params = make_params(base)
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, sharding.param_shardings(base, mesh))
        weights.save(tmp_path / "out", base, placed, None, max_shard_bytes=30_000)
    assert_same(weights.load(tmp_path / "out")[1], params)


def test_a_saved_tied_output_layer_must_equal_the_embedding(base, make_folder, hf_tensors):
    config = replace(base, tie_embeddings=True)
    tensors = hf_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder = make_folder(config, tensors)
    assert "unembed" not in weights.load(folder)[1]
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs .* set tie_word_embeddings to false"):
        weights.load(folder)


def test_rotary_frequencies_in_old_llama_files_are_ignored(base, make_folder, hf_tensors):
    config = replace(base, family="llama")
    tensors = hf_tensors(config) | {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for layer in range(config.layers)
    }
    _, params = weights.load(make_folder(config, tensors))
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("model.layers.1.self_attn.k_proj.bias"), "lacks the tensor model.layers.1.self_attn.k_proj.bias"),
        (drop("lm_head.weight"), r"lacks the tensor lm_head.weight \(1 missing in all\)"),
        (put("model.layers.3.mlp.up_proj.weight", np.zeros((48, 32), np.float32)), "holds model.layers.3.mlp.up_proj"),
        (put("score.weight", np.zeros(2, np.float32)), r"holds score.weight, .* \(1 such tensors\)"),
        (put("model.norm.weight", np.zeros(31, np.float32)), r"model.norm.weight is \[31\], .* implies \[32\]"),
        (put("lm_head.weight", np.zeros((32, 96), np.float32)), r"lm_head.weight is \[32, 96\]"),
        (put("model.norm.weight", np.full(32, np.nan, np.float32)), "model.norm.weight holds NaN or infinite numbers"),
        (put("model.norm.weight", np.zeros(32, np.int8)), "model.norm.weight is I8, expected one of F32, BF16, F16"),
    ],
)
def test_wrong_tensors_are_refused_by_name(damage, message, base, make_folder, hf_tensors):
    tensors = hf_tensors(base)
    damage(tensors)
    with pytest.raises(ValueError, match=message) as error:
        weights.load(make_folder(base, tensors))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_refused(keep, base, make_folder):
    file = make_folder(base) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is cut off or no safetensors file .*: copy it again"):
        weights.load(file.parent)


@pytest.fixture
def sharded(base, make_params, tmp_path):
    weights.save(tmp_path / "sharded", base, make_params(base), None, max_shard_bytes=20_000)
    return tmp_path / "sharded"


def test_an_index_that_names_the_wrong_file_or_a_missing_one_is_refused(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shard_files(sharded)[0]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"places model.norm.weight in model-00001-.*, which does not hold it"):
        weights.load(sharded)
    (sharded / shard_files(sharded)[1]).unlink()
    with pytest.raises(FileNotFoundError, match=r"index.json names model-00002-of-\d+.safetensors, which is missing"):
        weights.load(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "has no weight_map"), ("{", "not valid JSON"), ('{"weight_map": {"x": 3}}', "has no weight_map")],
)
def test_a_damaged_index_is_refused(text, message, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        weights.load(sharded)


def test_a_folder_with_content_is_never_overwritten(base, make_params, tmp_path):
    (tmp_path / "out").mkdir()
    weights.save(tmp_path / "out", base, make_params(base), None)  # an empty one is fine
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="out exists and is not empty: remove it or choose another folder"):
        weights.save(tmp_path / "out", base, make_params(base, seed=1), None)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file exists"):
        weights.save(tmp_path / "file", base, make_params(base), None)


def test_a_failed_save_leaves_nothing(base, make_params, tmp_path):
    class Broken:
        def save_pretrained(self, directory):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        weights.save(tmp_path / "out", base, make_params(base), Broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p | {"extra": np.zeros(3, np.float32)}, r"extra has shape \(3,\), not None"),
        (lambda p: {name: p[name] for name in p if name != "unembed"}, "unembed has shape None"),
        (lambda p: p | {"embed": p["embed"].T}, r"embed has shape \(32, 96\), not \(96, 32\)"),
        (lambda p: p | {"embed": p["embed"].astype(jnp.bfloat16)}, "type bfloat16 and float32 cannot be saved"),
    ],
)
def test_params_of_another_config_are_refused(change, message, base, make_params, tmp_path):
    with pytest.raises(ValueError, match=message):
        weights.save(tmp_path / "out", base, change(make_params(base)), None)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_copied(base, make_params, tmp_path):
    params = make_params(base)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (source / name).write_text(name)
    weights.save(tmp_path / "copied", base, params, str(source))
    assert (tmp_path / "copied" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "copied" / "tokenizer_config.json").exists()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json: name a tokenizer's folder"):
        weights.save(tmp_path / "none", base, params, tmp_path)
    assert not (tmp_path / "none").exists()


def test_end_ids_are_written_for_transformers(base, make_params, tmp_path):
    weights.save(tmp_path / "ends", base, make_params(base), None, end_ids=(7, 5))
    assert json.loads((tmp_path / "ends" / "config.json").read_text())["eos_token_id"] == 7
    generation = json.loads((tmp_path / "ends" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [7, 5], "pad_token_id": 5}
    weights.save(tmp_path / "unknown", base, make_params(base), None)
    assert not (tmp_path / "unknown" / "generation_config.json").exists()


def test_another_model_is_refused_with_the_flags_that_describe_it(variant):
    _, config = variant
    settings = replace(config, param_dtype="bfloat16", remat="nothing_saveable", path="there", max_positions=2**20)
    weights.check_same_model("old", config, settings)
    with pytest.raises(ValueError, match=r"old does not hold .* set (--model\..*), choose its preset") as error:
        weights.check_same_model("old", ModelConfig(), config)
    flags, _ = str(error.value).partition(" set ")[2].split(", choose")
    words = flags.replace("--model.", "--").split()
    found = tyro.cli(ModelConfig, args=words, config=[tyro.conf.FlagConversionOff])
    weights.check_same_model("old", found, config)
    assert found.max_positions == config.max_positions == 512


def test_what_a_killed_save_left_is_replaced(base, make_params, tmp_path):
    left = tmp_path / f".out.{os.getpid()}.partial"
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"cut off")
    weights.save(tmp_path / "out", base, make_params(base), None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert shard_files(tmp_path / "out") == ["model.safetensors"]
