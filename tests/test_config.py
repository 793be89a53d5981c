"""The run's config: its ranges, the checks across rooms, and the trip through JSON."""

import ast
import inspect
import json
import math
from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.config import RANGES, Range, RunConfig, check, differences, from_dict, settings, to_dict


def changed(**values) -> RunConfig:
    """The default config with settings changed, written as section__field."""
    config = RunConfig()
    for name, value in values.items():
        section, _, field = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{field: value}) if field else value})
    return config


EMPTY = {"sampling.decode_rows"}  # numbers of which there are none by default


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_the_defaults_pass():
    assert check(RunConfig()) == RunConfig()


def test_every_number_has_a_range_and_every_range_a_number():
    numbers = {
        name
        for name, value in settings(RunConfig()).items()
        if is_number(value) or (isinstance(value, tuple) and (any(map(is_number, value)) or name in EMPTY))
    }
    assert numbers == set(RANGES)


def test_no_number_may_be_anything():
    for limits in RANGES.values():
        assert not any(value in limits for value in (math.nan, math.inf, -math.inf, -2))


def test_every_setting_is_explained():
    """By the string literal below the field, from which --help is made."""

    def undocumented(kind) -> list[str]:
        (tree,) = ast.parse(inspect.getsource(kind)).body
        lacking = [
            node.target.id
            for node, after in zip(tree.body, [*tree.body[1:], None], strict=True)
            if isinstance(node, ast.AnnAssign)
            and not is_dataclass(getattr(kind(), node.target.id))
            and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
        ]
        nested = [type(getattr(kind(), one.name)) for one in fields(kind) if is_dataclass(getattr(kind(), one.name))]
        return lacking + [name for inner in nested for name in undocumented(inner)]

    assert undocumented(RunConfig) == []


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        (Range(1, 10), (1, 10), (0, 11), "at least 1 and at most 10"),
        (Range(0, 1, open_low=True), (0.1, 1), (0, 1.1), "above 0 and at most 1"),
        (Range(0, 1, open_high=True), (0, 0.9), (-0.1, 1), "at least 0 and below 1"),
        (Range(0, math.inf, open_high=True), (0, 1e300), (-1e-9, math.inf), "at least 0 and finite"),
        (Range(1, 10_000_000), (1,), (10_000_001,), "at least 1 and at most 10,000,000"),
    ],
)
def test_a_range(limits, inside, outside, words):
    assert all(value in limits for value in inside)
    assert not any(value in limits for value in (*outside, math.nan))
    assert str(limits) == words


def test_a_turn_must_fit_the_context_exactly_as_it_is_counted():
    """695 + 1024 + 2 x 512 + 4096 = 6839, and templates come on top."""
    check(changed(sampling__context_tokens=6_840))
    with pytest.raises(ValueError, match="a turn may need 6839 tokens and its templates"):
        check(changed(sampling__context_tokens=6_839))
    check(changed(sampling__context_tokens=6_839, agent__workflow="react"))  # which keeps no memory


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training__row_tokens": 4_096}, "sampling.context_tokens 8192 is more than training.row_tokens 4096"),
        ({"model__max_positions": 4_096}, "sampling.context_tokens 8192 is more than model.max_positions 4096"),
        ({"training__accumulate": 3}, "training.rows_per_update 256 is no multiple of training.accumulate 3"),
        ({"training__logit_chunk": 1_000}, "training.row_tokens 8192 is no multiple of training.logit_chunk 1000"),
        ({"sampling__prefill_buckets": ()}, "sampling.prefill_buckets is empty"),
        ({"sampling__prefill_buckets": (64, 64)}, "sampling.prefill_buckets is 64 64: .* ascending"),
        ({"sampling__prefill_buckets": (64, 100)}, "is 64 100: give multiples of sampling.prefill_piece 64"),
        ({"sampling__prefill_piece": 16_384}, "prefill_piece 16384 is more than sampling.context_tokens 8192"),
        ({"model__heads": 27}, "model.heads 27 is no multiple of model.kv_heads 4"),
        ({"model__head_size": 127}, "model.head_size 127 is odd"),
        ({"agent__default_top_n": 30}, "agent.default_top_n 30 is more than agent.max_top_n 20"),
        ({"training__importance_cap": 2.0}, "training.importance_cap is 2.0.* choose checked or trainer"),
        (
            {"training__old_logprobs": "trainer", "rl__method": "demonstrations"},
            "training.old_logprobs trainer is for rl.method grpo: demonstrations have no sampler",
        ),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
    ],
)
def test_what_does_not_go_together(values, message):
    with pytest.raises(ValueError, match=message):
        check(changed(**values))


def test_settings_have_their_full_names_in_the_order_of_the_fields():
    named = settings(changed(rl__steps=7))
    assert named["rl.steps"] == 7
    assert named["data.world.hops"] == (1, 2, 3)
    assert next(iter(named)) == "seed"


def test_differences_are_named():
    first, second = changed(rl__steps=7), changed(seed=3)
    assert differences(first, second) == [("seed", 0, 3), ("rl.steps", 7, 600)]
    assert differences(first, first) == []


@given(
    seed=st.integers(0, 2**32 - 1),
    buckets=st.lists(st.integers(1, 8_192), min_size=1, unique=True).map(sorted).map(tuple),
    rate=st.floats(1e-9, 1, allow_nan=False),
    files=st.lists(st.text()).map(tuple),
    saves=st.booleans(),
)
def test_a_config_comes_back_from_json(seed, buckets, rate, files, saves):
    config = changed(
        seed=seed,
        sampling__prefill_buckets=buckets,
        training__learning_rate=rate,
        data__train=files,
        rl__save_trajectories=saves,
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_what_a_file_leaves_out_takes_its_default():
    assert from_dict({"rl": {"steps": 7}}) == changed(rl__steps=7)


def test_a_whole_number_serves_as_a_real_one():
    read = from_dict({"sampling": {"temperature": 1}}).sampling.temperature
    assert (read, type(read)) == (1.0, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"the config is \[\]: it must be a section"),
        ({"rl": 3}, "rl is 3: it must be a section"),
        ({"rll": {}}, "there is no setting rll: the file is of another version"),
        ({"data": {"world": {"x": 1}}}, "there is no setting data.world.x"),
        ({"seed": "1"}, "seed is '1': it must be of type int"),
        ({"seed": True}, "seed is True: it must be of type int"),
        ({"rl": {"save_trajectories": 1}}, "rl.save_trajectories is 1: it must be of type bool"),
        ({"model": {"path": None}}, "model.path is None: it must be of type str"),
        ({"data": {"train": "x"}}, "data.train is 'x': it must be a list"),
        ({"sampling": {"prefill_buckets": [1, "2"]}}, "sampling.prefill_buckets is '2': it must be of type int"),
        (
            {"agent": {"workflow": "chat"}},
            "agent.workflow is 'chat': it must be one of memsearcher, react, direct, rag",
        ),
        ({"agent": {"workflow": ["react"]}}, r"agent.workflow is \['react'\]: it must be one of"),
    ],
)
def test_a_file_that_holds_something_else(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(values)
