"""Every preset: published shapes, settings of the papers, numbers of devices, and the longest turn."""

import json
import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.agent import prompts
from memsearcher_jax.checks import check
from memsearcher_jax.config import RunConfig, agent_of, differences, from_dict, to_dict
from memsearcher_jax.launch import cli
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.ranges import Duration
from memsearcher_jax.rl import setup
from memsearcher_jax.runs import load_weights
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training.config import learning_rate_plan

PRESETS = sorted(cli.presets())
STREAMS = [name for name in PRESETS if "memalpha" in name or "memagent" in name]
HISTORIES = [name for name in PRESETS if cli.load_preset(name).agent.workflow in ("react", "search_r1", "mem1")]

# Qwen/Qwen2.5-0.5B, -3B and -7B, and Qwen3-4B: config.json, and their numbers of parameters.
PUBLISHED = {
    "qwen05b": (("qwen2", 24, 896, 14, 2, 64, 4_864, 151_936, True, 32_768), 494_032_768),
    "qwen3b": (("qwen2", 36, 2_048, 16, 2, 128, 11_008, 151_936, True, 32_768), 3_085_938_688),
    "qwen7b": (("qwen2", 28, 3_584, 28, 4, 128, 18_944, 152_064, False, 32_768), 7_615_616_512),
    "qwen3_0b6": (("qwen3", 28, 1_024, 16, 8, 128, 3_072, 151_936, True, 40_960), 596_049_920),
    "qwen3_1b7": (("qwen3", 28, 2_048, 16, 8, 128, 6_144, 151_936, True, 40_960), 1_720_574_976),
    "qwen3_4b": (("qwen3", 36, 2_560, 32, 8, 128, 9_728, 151_936, True, 40_960), 4_022_468_096),
}
QWEN = list(PUBLISHED)
# From the docstrings: devices of the training mesh, and local devices of a host.
LAPTOP, SLICE_16, SLICE_32 = [(1, 1), (8, 8)], [(16, 4), (16, 8)], [(32, 4), (32, 8)]
DEVICES = {
    **dict.fromkeys(("nano", "tiny", "tiny_compact", "tiny_mem1", "tiny_rag", "tiny_direct", "tiny_memagent"), LAPTOP),
    **dict.fromkeys(("tiny_memalpha", "tiny_memalpha_warmstart", "tiny_warmstart"), LAPTOP),
    **dict.fromkeys(("tiny_baselines_warmstart", "tiny_compact_warmstart", "tiny_memagent_warmstart"), LAPTOP),
    "smollm2": LAPTOP,
    "smollm2_warmstart": [(1, 1), (2, 2)],
    "tiny_react": [(1, 1), (1, 8)],
    "tiny_search_r1": [(1, 1), (1, 8)],
    "qwen05b": [(4, 4), (8, 8)],
    "qwen3_0b6": [(1, 1), (4, 4), (8, 8)],
    "qwen3_1b7": [(8, 8)],
    **dict.fromkeys(("qwen3b", "qwen3_4b", "memalpha_4b"), SLICE_16),
    **dict.fromkeys(("search_r1_3b", "memsearcher_3b", "search_r1_3b_it", "memalpha_4b_original"), SLICE_16),
    **dict.fromkeys(("qwen7b", "mem1_7b", "memagent_7b"), SLICE_32),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_round_trips(name):
    preset = cli.load_preset(name)
    assert check(preset) == preset
    assert from_dict(to_dict(preset)) == preset


def test_a_file_of_presets_starts_with_a_command():
    for name, file in cli.presets().items():
        docstring = file.read_text(encoding="utf-8").split('"""')[1]
        commands = re.findall(r"^python launch/\w+.py --config (\w+)", docstring, re.MULTILINE)
        assert any(cli.presets()[command] == file for command in commands), name


def test_every_preset_is_in_the_tables_of_this_file():
    assert set(PRESETS) == set(DEVICES)
    with pytest.raises(ValueError, match=f"no preset 'memsearcher': choose one of {', '.join(PRESETS)}, or give"):
        cli.load_preset("memsearcher")  # a function of configs/qwen.py with parameters


def test_a_user_preset_may_import_a_packaged_preset(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom memsearcher_jax.configs.tiny import tiny\n"
        "def mine():\n    return replace(tiny(), seed=7)\n"
    )
    assert cli.load_preset(str(tmp_path / "mine.py")) == replace(cli.load_preset("tiny"), seed=7)


def test_the_small_presets_differ_only_in_the_workflow():
    """Data and budget are the same, initial weights and reward where no protocol asks for others."""
    tiny, react, warmstart = map(cli.load_preset, ("tiny", "tiny_react", "tiny_warmstart"))
    assert {name for name, *_ in differences(tiny, react)} == {
        *("agent.workflow", "agent.memory_tokens", "sampling.context_tokens"),
        *(f"training.{name}" for name in ("seq_len", "minibatch_rows", "grad_accum_steps", "logit_chunk")),
    }
    compact = cli.load_preset("tiny_compact")
    changes = {"model.path", "model.tokenizer", "agent.workflow", "agent.history_tokens", "sampling.context_tokens"}
    assert {name for name, *_ in differences(tiny, compact)} == changes | {"training.seq_len", "training.logit_chunk"}
    assert (tiny.model, tiny.agent) == (replace(warmstart.model, path=tiny.model.path), warmstart.agent)
    search_r1, rag, direct = map(cli.load_preset, ("tiny_search_r1", "tiny_rag", "tiny_direct"))
    changes = {"model.path", "model.tokenizer", "agent.workflow"}
    assert {name for name, *_ in differences(tiny, rag)} == changes
    assert {name for name, *_ in differences(tiny, direct)} == changes
    assert {name for name, *_ in differences(react, search_r1) if not name.startswith("reward.")} == changes
    assert search_r1.reward == cli.load_preset("search_r1_3b").reward


@pytest.mark.parametrize("name", QWEN)
def test_a_model_has_the_published_shape(name):
    model = cli.load_preset(name).model
    shape = (
        *(model.family, model.layers, model.embed_size, model.heads, model.kv_heads, model.head_size),
        *(model.ffn_size, model.vocab_size, model.tie_embeddings, model.max_positions),
    )
    params = jax.eval_shape(lambda key: qwen.init(key, model), jax.random.key(0))
    assert (shape, sum(math.prod(weight.shape) for weight in jax.tree.leaves(params))) == PUBLISHED[name]
    assert (model.rope_theta, model.norm_eps) == (1e6, 1e-6)


@pytest.mark.parametrize("name", [name for name in QWEN if name not in ("qwen3_0b6", "qwen3_1b7")])
def test_settings_equal_those_of_the_memsearcher_paper(name):
    """MemSearcher, section 4 and its released training script."""
    preset = cli.load_preset(name)
    agent, sampling, training = preset.agent, preset.sampling, preset.training
    assert (agent.workflow, agent.prompts) == ("memsearcher", "default")
    assert (agent.max_turns, agent.completion_tokens, agent.memory_tokens) == (5, 512, 1_024)
    assert sampling.context_tokens == training.seq_len == 8_192
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.99, 10_000)
    assert (preset.rl.prompts_per_step, preset.rl.group_size) == (256, 5)
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (training.clip_low, training.clip_high, training.dual_clip) == (0.2, 0.2, 3.0)
    assert (training.kl_coefficient, training.entropy_coefficient) == (0.001, 0.001)
    assert (training.adam_b1, training.adam_b2, training.warmup_steps, training.decay_steps) == (0.9, 0.999, "0", "0")
    assert training.aggregate == "token-mean"
    # 128 of the 256 questions, times 5: 7 updates of the 3.5 contexts of each of 1,280 trajectories.
    assert training.minibatch_contexts == 128 * 5
    assert math.ceil(3.5 * 1_280 / training.minibatch_contexts) == 7
    # One epoch of the 169,615 questions of NQ and HotpotQA; the rest is dropped.
    one_epoch = replace(preset, rl=replace(preset.rl, epochs=1, steps=1))
    assert preset.rl.steps == 169_615 // 256 == setup.with_steps(one_epoch, 169_615).rl.steps
    assert (preset.rl.credit, preset.rl.advantage_scope, preset.rl.norm_by_std) == ("all_contexts", "trajectory", True)
    assert preset.model.param_dtype == "float32"
    retrieval = preset.retrieval
    assert (retrieval.method, retrieval.max_query_tokens, retrieval.encoder_prompts) == ("dense", 128, "auto")
    assert retrieval.encoder == "", "E5 has to be given: hashed words are another retriever"
    assert (agent.default_top_n, agent.question_tokens) == (5, 695)
    assert (preset.evaluation.max_turns, preset.evaluation.temperature) == (20, 0.0)


def test_epochs_decide_the_steps_of_a_run():
    preset = cli.load_preset("memalpha_4b")
    assert setup.with_steps(preset, 562) == preset
    five = replace(preset, rl=replace(preset.rl, epochs=5))
    assert setup.with_steps(five, 562).rl.steps == 85
    with pytest.raises(
        ValueError, match=r"rl.epochs 5: 31 training problems do not fill a step of .* 32: set rl.steps"
    ):
        setup.with_steps(five, 31)


def test_settings_equal_those_of_the_mem_alpha_paper(shared):
    """The released training script of Mem-alpha."""
    preset = cli.load_preset("memalpha_4b")
    agent, sampling, training = preset.agent, preset.sampling, preset.training
    assert preset.model == cli.load_preset("qwen3_4b").model
    assert (agent.workflow, agent.completion_tokens, sampling.context_tokens) == ("memalpha", 2_048, 8_192)
    assert (preset.memalpha.core_tokens, preset.memalpha.retrieved_items) == (512, 20)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (preset.rl.prompts_per_step, preset.rl.group_size, preset.rl.advantage_scope) == (32, 8, "pooled")
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (training.clip_low, training.clip_high, training.dual_clip) == (0.2, 0.2, 3.0)
    assert (training.kl_coefficient, training.entropy_coefficient) == (0.001, 0.0)
    assert (training.adam_b1, training.adam_b2, training.decay_steps) == (0.9, 0.999, "0")
    assert training.aggregate == "seq-mean-token-mean"
    # 5 epochs of 562 streams; a step has 80 updates with the ten chunks of most streams.
    assert preset.rl.steps == 5 * (562 // 32)
    assert 32 * 8 * 10 / training.minibatch_contexts == 80
    assert learning_rate_plan(training, preset.rl.steps).warmup == Duration(int(0.05 * preset.rl.steps), "steps")
    reward = preset.memalpha.reward
    assert (reward.compression_weight, reward.content_weight) == (0.05, 0.1)
    tokenizer = ChatTokenizer.load(shared / "tokenizer" / "qwen2.5")
    setup.check_contexts(preset, agent_of(preset), tokenizer)


@pytest.mark.parametrize("style", ["default", "brief", "terse"])
def test_the_paper_s_preset_has_room_for_compaction(shared, style):
    """Its context holds the budgets of compact, which are those of MemSearcher, with the order to summarise."""
    preset = cli.load_preset("qwen3b")
    preset = check(replace(preset, agent=replace(preset.agent, workflow="compact", prompts=style)))
    setup.check_contexts(preset, agent_of(preset), ChatTokenizer.load(shared / "tokenizer" / "qwen2.5"))


def test_settings_equal_those_of_search_r1(shared):
    """The released GRPO script; its `max_turns` does not count the last reply. Data: NQ and HotpotQA."""
    preset = cli.load_preset("search_r1_3b")
    agent, training, reward = preset.agent, preset.training, preset.reward
    assert preset.model == cli.load_preset("qwen3b").model
    assert (agent.workflow, agent.max_turns, agent.default_top_n) == ("search_r1", 4 + 1, 3)
    assert (agent.completion_tokens, agent.observation_tokens) == (500, 500)
    assert (reward.metric, reward.wrong_answer, reward.require_format) == ("exact_match", 0.0, False)
    assert (preset.rl.prompts_per_step, preset.rl.group_size) == (512, 5)
    assert (training.learning_rate, training.kl_coefficient, training.entropy_coefficient) == (1e-6, 0.001, 0.001)
    setup.check_contexts(preset, agent_of(preset), ChatTokenizer.load(shared / "tokenizer" / "qwen2.5"))


def test_settings_for_published_weights_equal_those_of_their_authors_evaluations():
    """MemSearcher's `eval.sh`, and the server that it starts; Search-R1's Instruct models differ in the system text."""
    preset = cli.load_preset("memsearcher_3b")
    assert {name: value for name, _, value in differences(cli.load_preset("qwen3b"), preset)} == {
        "agent.prompts": "original",
        "agent.memory_tokens": 511,
        "agent.rewrite_tokens": 512,
        "agent.default_top_n": 10,
        "agent.on_search_error": "show",
        "judge.model": "gpt-4o-mini",
        "judge.api_key_env": "OPENAI_API_KEY",
    }
    changed = differences(cli.load_preset("search_r1_3b"), cli.load_preset("search_r1_3b_it"))
    assert changed == [("agent.prompts", "default", "instruct")]


def test_settings_for_the_weights_of_mem_alpha_equal_those_of_its_evaluation(shared):
    """Mem-alpha's `main.py`, the agent's configuration, and the memory server that answers."""
    preset = cli.load_preset("memalpha_4b_original")
    no_thoughts = json.dumps({"chat_template_kwargs": {"enable_thinking": False}})
    services = {f"{name}.model": "Qwen/Qwen3-32B" for name in ("answerer", "judge")}
    services |= {f"{name}.extra_body": no_thoughts for name in ("answerer", "judge")}
    assert {name: value for name, _, value in differences(cli.load_preset("memalpha_4b"), preset)} == services | {
        "agent.prompts": "original",
        "memalpha.chunk_tokens": 8_192,
        "memalpha.answer_memory_tokens": 30_000,
        "memalpha.answer_temperature": 0.7,
        "sampling.context_tokens": 16_384,
        "training.seq_len": 16_384,
    }
    assert (preset.memalpha.shown_items, preset.memalpha.answer_tokens, preset.evaluation.temperature) == (5, 2_048, 0)
    tokenizer = ChatTokenizer.load(shared / "tokenizer" / "qwen2.5")
    served = replace(preset, answerer=replace(preset.answerer, backend="openai"), judge=preset.judge)
    setup.check_contexts(served, agent_of(served), tokenizer)


@pytest.mark.parametrize(("name", "devices", "local"), [(name, *pair) for name in PRESETS for pair in DEVICES[name]])
def test_a_preset_fits_the_devices_of_its_docstring(name, devices, local):
    """Both meshes divide every weight, and their devices divide the slots and rows."""
    preset = cli.load_preset(name)
    train = preset.mesh.shape(devices)
    sampler = MeshConfig(data=-1, fsdp=1, tensor=preset.sampling.tensor).shape(local)  # as in hosts/meshes.py
    sharding.check_divides(preset.model, train)
    sharding.check_divides(preset.model, sampler)
    assert preset.training.minibatch_rows % (train["data"] * train["fsdp"]) == 0
    assert preset.sampling.slots % sampler["data"] == 0


# tests/rl/test_stream_setup.py tests the presets with streams; histories grow until the context is full.
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {*STREAMS, *HISTORIES}))
def test_the_longest_turn_fits(name, request):
    preset = cli.load_preset(name)
    if name in QWEN:
        tokenizer = ChatTokenizer.load(request.getfixturevalue("shared") / "tokenizer" / "qwen2.5")
    else:
        tokenizer = setup.open_tokenizer(replace(preset.model, path=""))  # the weights of smollm2 come from elsewhere
    assert tokenizer.vocab_size <= preset.model.vocab_size
    agent = agent_of(preset)
    setup.check_contexts(preset, agent, tokenizer)
    needed = agent.longest_context(tokenizer)
    assert longest_turn(preset, agent.prompts, tokenizer) <= needed <= preset.sampling.context_tokens


def longest_turn(preset: RunConfig, templates: prompts.Prompts, tokenizer: ChatTokenizer) -> int:
    """Tokens of a turn that uses every budget, encoded as in a rollout."""
    agent = preset.agent

    def text(tokens: int) -> str:
        return tokenizer.clip("seven " * tokens, tokens)

    opening = tokenizer.prompt(templates.initial_prompt(text(agent.question_tokens), text(agent.memory_tokens)))
    share = agent.observation_tokens // (2 * agent.max_calls)
    message = templates.tool_message([(text(share), text(share))] * agent.max_calls)
    extension = tokenizer.encode_spans(templates.continuation(message, think=False))
    return len(opening) + len(extension) + 2 * agent.completion_tokens


def test_the_packaged_adapters_are_those_that_smollm2_trains_further():
    model = cli.load_preset("smollm2").model
    found, adapters = load_weights.load_adapters(model)
    assert found == model
    assert all(np.abs(pair["b"]).max() > 0 for pair in adapters["layers"].values())
