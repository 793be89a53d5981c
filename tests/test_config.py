"""The config of a run: ranges, checks across sections, and JSON."""

import ast
import inspect
import json
import math
from dataclasses import is_dataclass
from itertools import pairwise

import pytest
from annotated_types import Interval
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.checks import check
from memsearcher_jax.config import RunConfig, differences, from_dict, intervals, settings, to_dict, with_settings
from memsearcher_jax.ranges import contains, describe


def changed(*, seed=0, **values) -> RunConfig:
    """The default config with settings changed, written as section__field."""
    return with_settings(RunConfig(seed=seed), {name.replace("__", "."): value for name, value in values.items()})


EMPTY_BY_DEFAULT = {"sampling.decode_batch_sizes"}  # tuples of numbers that are empty by default


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_every_number_has_a_range():
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in settings(RunConfig()).items()}
    numbers = {name for name, members in values.items() if any(map(is_number, members))}
    assert numbers | EMPTY_BY_DEFAULT == set(intervals())
    for name, interval in intervals().items():
        below = -math.inf if name == "sft.min_reward" else -2  # only rewards may be negative
        assert not any(contains(interval, value) for value in (math.nan, math.inf, -math.inf, below))


def test_every_setting_has_a_docstring():
    """A string literal below the field, which --help shows."""
    kinds: list[type] = [RunConfig]
    for kind in kinds:
        (tree,), values = ast.parse(inspect.getsource(kind)).body, vars(kind())
        kinds += [type(value) for value in values.values() if is_dataclass(value)]
        for node, below in pairwise([*tree.body, None]):
            if isinstance(node, ast.AnnAssign) and not is_dataclass(values[node.target.id]):
                assert isinstance(below, ast.Expr), (kind, node.target.id)


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "description"),
    [
        (Interval(ge=1, le=10), (1, 10), (0, 11), "at least 1 and at most 10"),
        (Interval(gt=0, le=1), (0.1, 1), (0, 1.1), "above 0 and at most 1"),
        (Interval(ge=0, lt=1), (0, 0.9), (-0.1, 1), "at least 0 and below 1"),
        (Interval(ge=0, lt=math.inf), (0, 1e300), (-1e-9, math.inf), "at least 0 and finite"),
        (Interval(ge=1, le=10_000_000), (1,), (10_000_001,), "at least 1 and at most 10,000,000"),
    ],
)
def test_a_range_contains_its_bounds_and_describes_itself(interval, inside, outside, description):
    assert all(contains(interval, value) for value in inside)
    assert not any(contains(interval, value) for value in (*outside, math.nan))
    assert describe(interval) == description


def test_the_longest_turn_must_fit_the_context():
    """695 + 1024 + 512 + 1280 + 4096 = 7607 tokens, plus the templates."""
    check(changed(sampling__context_tokens=7_608))
    with pytest.raises(ValueError, match=r"a context may need 7608 tokens \(templates at least 1"):
        check(changed(sampling__context_tokens=7_607))
    check(changed(sampling__context_tokens=7_607, agent__workflow="react"))  # has no memory


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "^seed is -1: it must be at least 0"),
        ({"rl__group_size": 10**12}, "^rl.group_size is 1000000000000: it must be at least 1 and at most 10,000,000"),
        ({"training__seq_len": 4_096}, "sampling.context_tokens 8192 is more than training.seq_len 4096"),
        ({"model__max_positions": 4_096}, "sampling.context_tokens 8192 is more than model.max_positions 4096"),
        (
            {"training__grad_accum_steps": 3},
            "training.minibatch_rows 256 is no multiple of training.grad_accum_steps 3",
        ),
        ({"training__logit_chunk": 1_000}, "training.seq_len 8192 is no multiple of training.logit_chunk 1000"),
        ({"sampling__prefill_buckets": ()}, "sampling.prefill_buckets is empty"),
        ({"sampling__prefill_buckets": (256, 64)}, "sampling.prefill_buckets is 256 64: .* ascending"),
        ({"sampling__prefill_buckets": (64, 100)}, "is 64 100: give multiples of sampling.prefill_chunk 64"),
        ({"sampling__prefill_chunk": 16_384}, "prefill_chunk 16384 is more than sampling.context_tokens 8192"),
        ({"model__heads": 27}, "model.heads 27 is no multiple of model.kv_heads 4"),
        ({"agent__default_top_n": 30}, "agent.default_top_n 30 is more than agent.max_top_n 20"),
        ({"health__on_collapse": "rollback"}, "health.on_collapse rollback .* rl.evaluate_every 0 makes none: set it"),
        ({"rl__group_size": 1}, "rl.group_size 1 leaves .* every advantage is 0: raise it"),
        ({"rl__advantage_scope": "pooled"}, "rl.advantage_scope pooled needs a reward for each context"),
        ({"rl__refill": 1, "rl__carry_over": 1}, "rl.refill 1 replaces groups .* set rl.carry_over to 0"),
        ({"rl__refill": 1, "rl__epochs": 1}, "rl.refill 1 takes more problems than a step counts.* and rl.steps"),
        ({"training__tis_cap": 2.0}, "training.tis_cap is 2.0.* choose trainer"),
        (
            {"training__norm_tokens": 64},
            "training.norm_tokens 64 has no effect under training.aggregate token-mean: omit it, or set the aggregate",
        ),
        (
            {"training__offload_reference": True, "training__kl_coefficient": 0.0},
            "training.offload_reference has no effect without a reference: omit it, or set training.kl_coefficient",
        ),
        (
            {"rl__carry_over": 1, "agent__workflow": "react", "agent__prompts": "react"},
            "rl.carry_over 1 swaps weights between contexts",
        ),
        (
            {"rl__carry_over": 1, "training__old_logprobs": "trainer"},
            "set training.old_logprobs to sampler",
        ),
        (
            {"model__path": "dir", "model__adapter": "dir", "model__lora_rank": 8},
            "without the adapters in model.adapter .* set it to 0",
        ),
        (
            {"model__lora_rank": 8},
            "model.lora_rank and model.adapter need the weights that the adapters belong to: set",
        ),
    ],
)
def test_incompatible_settings_are_errors(values, message):
    with pytest.raises(ValueError, match=message):
        check(changed(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"training__norm_tokens": 64, "training__aggregate": "seq-mean-token-sum-norm"},
        {"training__offload_reference": True},
        {"training__offload_reference": True, "training__kl_coefficient": 0.0, "training__objective": "distill"}
        | {"teacher__path": "dir", "rl__keep_constant_reward_groups": True},
    ],
)
def test_settings_that_have_their_counterpart_are_accepted(values):
    check(changed(**values))


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, ("trainer", 2.0)),
        ({"training__tis_cap": 5.0}, ("trainer", 5.0)),
        ({"training__old_logprobs": "sampler"}, ("sampler", 0.0)),
    ],
)
def test_a_sampler_in_int8_is_corrected_unless_the_settings_say_otherwise(training, expected):
    given = changed(sampling__weights="int8", **training)
    config = given.resolved()
    assert (config.training.old_logprobs, config.training.tis_cap) == expected
    assert check(given) == given  # what is stored: a resumed run compares it with what is given again
    assert changed(**training | {"training__tis_cap": 0.0}).resolved().training.tis_cap == 0


@given(
    seed=st.integers(0, 2**32 - 1),
    buckets=st.lists(st.integers(1, 8_192), min_size=1, unique=True).map(sorted).map(tuple),
    rate=st.floats(1e-9, 1, allow_nan=False),
    files=st.lists(st.text()).map(tuple),
    save_trajectories=st.booleans(),
)
def test_a_config_round_trips_through_json(seed, buckets, rate, files, save_trajectories):
    config = changed(
        seed=seed,
        sampling__prefill_buckets=buckets,
        training__learning_rate=rate,
        data__train=files,
        rl__save_trajectories=save_trajectories,
    )
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config and not differences(again, config)


def test_models_from_different_files_share_their_compiled_programs():
    moved = changed(model__path="run", model__adapter="adapter", model__tokenizer="run/tokenizer")
    assert len({RunConfig().model, moved.model}) == 1 and len(differences(RunConfig(), moved)) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"the config is \[\]: it must be a section"),
        ({"rll": {}}, "there is no setting rll: the file is of another version"),
        ({"data": {"encyclopedia": {"x": 1}}}, "there is no setting data.encyclopedia.x"),
        ({"seed": "1"}, "seed is '1': it must be of type int"),
        ({"seed": True}, "seed is True: it must be of type int"),
        ({"rl": {"save_trajectories": 1}}, "rl.save_trajectories is 1: it must be of type bool"),
        ({"data": {"train": "x"}}, "data.train is 'x': it must be a list"),
        ({"sampling": {"prefill_buckets": [1, "2"]}}, "sampling.prefill_buckets is '2': it must be of type int"),
        ({"reward": {"metric": "bleu"}}, "reward.metric is 'bleu': it must be one of f1, exact_match"),
        ({"reward": {"metric": ["f1"]}}, r"reward.metric is \['f1'\]: it must be one of"),
    ],
)
def test_invalid_json_values_are_errors(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(values)
