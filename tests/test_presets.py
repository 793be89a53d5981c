"""Every preset in configs/: the real shapes, the paper's settings, its devices, and room for the longest turn."""

import math
import re
from dataclasses import replace

import cli
import jax
import pytest

from memsearcher_jax.agent import memalpha_prompts, prompts
from memsearcher_jax.config import RunConfig, check, differences, from_dict, to_dict
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import build, reading
from memsearcher_jax.rl.tokens import ChatTokenizer

PRESETS = sorted(path.stem for path in cli.PRESETS.glob("*.py"))
STREAMS = [name for name in PRESETS if "memalpha" in name]
QWEN = [name for name in PRESETS if name.startswith("qwen")]

# Qwen/Qwen2.5-0.5B, -3B and -7B, and Qwen3-4B: config.json, and their numbers of parameters.
PUBLISHED = {
    "qwen05b": (("qwen2", 24, 896, 14, 2, 64, 4_864, 151_936, True, 32_768), 494_032_768),
    "qwen3b": (("qwen2", 36, 2_048, 16, 2, 128, 11_008, 151_936, True, 32_768), 3_085_938_688),
    "qwen7b": (("qwen2", 28, 3_584, 28, 4, 128, 18_944, 152_064, False, 32_768), 7_615_616_512),
    "qwen3_4b": (("qwen3", 36, 2_560, 32, 8, 128, 9_728, 151_936, True, 40_960), 4_022_468_096),
}
# What each docstring names: devices of the training mesh, and the local devices of a host that samples.
DEVICES = {
    "nano": [(1, 1), (8, 8)],
    "tiny": [(1, 1), (8, 8)],
    "tiny_warmstart": [(1, 1), (8, 8)],
    "tiny_react": [(1, 1), (1, 8)],
    "tiny_memalpha": [(1, 1), (8, 8)],
    "tiny_memalpha_warmstart": [(1, 1), (8, 8)],
    "qwen05b": [(4, 4), (8, 8)],
    "qwen3b": [(16, 4), (16, 8)],
    "qwen7b": [(32, 4), (32, 8)],
    "qwen3_4b": [(16, 4), (16, 8)],
    "memalpha_4b": [(16, 4), (16, 8)],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_passes_and_survives_a_round_trip(name):
    preset = cli.load_preset(name)
    assert check(preset) == preset
    assert from_dict(to_dict(preset)) == preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_opens_with_the_command_that_runs_it(name):
    source = (cli.PRESETS / f"{name}.py").read_text(encoding="utf-8")
    assert f"\npython launch/tpu_train.py --config {name}" in source.split('"""')[1]


def test_every_size_is_checked_here():
    assert set(QWEN) == set(PUBLISHED)
    assert set(PRESETS) == set(DEVICES)


def test_the_small_presets_share_what_their_comparison_rests_on():
    """Each is written out, to be read alone; the start, the world, the reward and the budget are the same."""
    tiny, react, warmstart = map(cli.load_preset, ("tiny", "tiny_react", "tiny_warmstart"))
    assert {name for name, *_ in differences(tiny, react)} == {
        *("agent.workflow", "agent.prompts", "agent.memory_tokens", "sampling.context_tokens"),
        *(f"training.{name}" for name in ("row_tokens", "rows_per_update", "accumulate", "logit_chunk")),
    }
    assert (tiny.model, tiny.agent) == (replace(warmstart.model, path=tiny.model.path), warmstart.agent)


@pytest.mark.parametrize("name", QWEN)
def test_a_model_has_the_published_shape(name):
    model = cli.load_preset(name).model
    shape = (
        *(model.family, model.layers, model.embed_size, model.heads, model.kv_heads, model.head_size),
        *(model.ffn_size, model.vocab_size, model.tied, model.max_positions),
    )
    assert shape == PUBLISHED[name][0]
    assert (model.rope_theta, model.norm_eps) == (1e6, 1e-6)


@pytest.mark.parametrize("name", QWEN)
def test_a_model_has_the_published_number_of_parameters(name):
    model = cli.load_preset(name).model
    params = jax.eval_shape(lambda key: qwen.init(key, model), jax.random.key(0))
    assert sum(math.prod(weight.shape) for weight in jax.tree.leaves(params)) == PUBLISHED[name][1]


@pytest.mark.parametrize("name", QWEN)
def test_the_papers_settings(name):
    """MemSearcher, section 4 and its released training script."""
    preset = cli.load_preset(name)
    agent, sampling, training = preset.agent, preset.sampling, preset.training
    assert (agent.workflow, agent.prompts) == ("memsearcher", "memsearcher")
    assert (agent.max_turns, agent.reply_tokens, agent.memory_tokens) == (5, 512, 1_024)
    assert sampling.context_tokens == training.row_tokens == 8_192
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.99, 10_000)
    assert (preset.rl.problems, preset.rl.rollouts) == (256, 5)
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (training.clip_low, training.clip_high, training.clip_c) == (0.2, 0.2, 3.0)
    assert (training.kl_coefficient, training.entropy_coefficient) == (0.001, 0.001)
    assert training.aggregate == "token-mean"
    assert (preset.evaluation.max_turns, preset.evaluation.temperature) == (20, 0.0)


def test_the_settings_of_mem_alphas_paper(shared):
    """Its released training script; one context of it is a row there, and about half of one here."""
    preset = cli.load_preset("memalpha_4b")
    agent, sampling, training = preset.agent, preset.sampling, preset.training
    assert preset.model == cli.load_preset("qwen3_4b").model
    assert (agent.workflow, agent.reply_tokens, sampling.context_tokens) == ("memalpha", 2_048, 8_192)
    assert (preset.memalpha.core_tokens, preset.memalpha.retrieved_items) == (512, 20)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (preset.rl.problems, preset.rl.rollouts, preset.rl.baseline) == (32, 8, "pooled")
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (training.clip_low, training.clip_high, training.clip_c) == (0.2, 0.2, 3.0)
    assert (training.kl_coefficient, training.entropy_coefficient) == (0.001, 0.0)
    assert training.aggregate == "seq-mean-token-mean"
    reward = preset.memalpha.reward
    weights = (reward.answers_weight, reward.compression_weight, reward.calls_weight, reward.content_weight)
    assert weights == (1.0, 0.05, 1.0, 0.1)
    tokenizer = ChatTokenizer.load(shared / "tokenizer" / "qwen2.5")
    reading.check_contexts(preset, memalpha_prompts.load(agent), tokenizer)


@pytest.mark.parametrize(("name", "devices", "local"), [(name, *pair) for name in PRESETS for pair in DEVICES[name]])
def test_a_preset_fits_the_devices_that_it_names(name, devices, local):
    """Every weight is cut evenly by both meshes; slots and rows are spread evenly over their devices."""
    preset = cli.load_preset(name)
    train, sampler = mesh_shape(preset.mesh, devices), mesh_shape(sampler_mesh(preset), local)
    sharding.check_divides(preset.model, train)
    sharding.check_divides(preset.model, sampler)
    assert preset.training.rows_per_update % (train["data"] * train["fsdp"]) == 0
    assert preset.sampling.slots % sampler["data"] == 0


def sampler_mesh(preset: RunConfig) -> MeshConfig:
    """As `build.open_meshes` lays it out."""
    return MeshConfig(data=-1, fsdp=1, tensor=preset.sampling.tensor)


def mesh_shape(mesh: MeshConfig, devices: int) -> dict[str, int]:
    """Sizes of the axes over so many devices, which need not be there."""
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    known = math.prod(size for size in sizes.values() if size != -1)
    assert devices % known == 0
    return {axis: devices // known if size == -1 else size for axis, size in sizes.items()}


@pytest.mark.parametrize("name", ["nano", "tiny", "qwen05b"])
def test_a_preset_opens_on_eight_devices(name):
    """Those that are meant for so few, through the door that a run goes through."""
    preset = cli.load_preset(name)
    meshes = build.open_meshes(preset)
    build.check_shares(preset, meshes.train)
    assert dict(meshes.train.shape) == mesh_shape(preset.mesh, 8)
    assert dict(meshes.local.shape) == mesh_shape(sampler_mesh(preset), 8)


# What reads streams has other contexts (tests/rl/test_reading.py), and a history grows as long as there is room.
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {*QWEN, *STREAMS, "tiny_react"}))
def test_the_longest_turn_fits_the_small_presets(name):
    preset = cli.load_preset(name)
    fits_exactly(preset, build.open_tokenizer(preset.model))


@pytest.mark.parametrize("name", QWEN)
def test_the_longest_turn_fits_with_the_real_tokenizer(name, shared):
    tokenizer = ChatTokenizer.load(shared / "tokenizer" / "qwen2.5")
    preset = cli.load_preset(name)
    assert tokenizer.vocab_size <= preset.model.vocab_size
    fits_exactly(preset, tokenizer)


def fits_exactly(preset: RunConfig, tokenizer: ChatTokenizer) -> None:
    """The check accepts the preset, and refuses a context of one token less than it says that a turn may need."""
    templates = prompts.load(preset.agent)
    build.check_context(preset, templates, tokenizer)

    def with_context(tokens: int) -> RunConfig:
        sampling = {**to_dict(preset)["sampling"], "context_tokens": tokens}
        return from_dict({**to_dict(preset), "sampling": sampling})

    with pytest.raises(ValueError, match="a turn may need") as refusal:
        build.check_context(with_context(1), templates, tokenizer)
    needed = int(re.search(r"need (\d+) tokens", str(refusal.value))[1])
    build.check_context(with_context(needed), templates, tokenizer)
    with pytest.raises(ValueError, match="raise it or lower one of these"):
        build.check_context(with_context(needed - 1), templates, tokenizer)
    assert longest_turn(preset, templates, tokenizer) <= needed <= preset.sampling.context_tokens


def longest_turn(preset: RunConfig, templates: prompts.Prompts, tokenizer: ChatTokenizer) -> int:
    """Tokens of a turn that spends every budget, encoded as a rollout encodes it."""
    agent = preset.agent

    def text(tokens: int) -> str:
        return tokenizer.clip("seven " * tokens, tokens)

    opening = tokenizer.prompt(templates.opening(text(agent.question_tokens), text(agent.memory_tokens)))
    share = agent.observation_tokens // (2 * agent.max_calls)
    message = templates.message([(text(share), text(share))] * agent.max_calls)
    extension = tokenizer.pieces(templates.extension(message, think=False))
    return len(opening) + len(extension) + 2 * agent.reply_tokens
