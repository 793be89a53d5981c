"""Packing: every token of every example exactly once, in order, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.training import microbatches
from memsearcher_jax.training.packing import PACKED_DTYPES, TrainingExample, pack, plan_rows
from memsearcher_jax.training.rows import Beginning, fill_rows

ROW_TOKENS = 24
FIELDS = ("ids_BT", "mask_BT", "advantage_BT", "old_logprob_BT")


def fill(rows):
    """Share of real tokens in the rows that hold any."""
    tokens_B = (rows.segment_BT > 0).sum(axis=1)
    return tokens_B.sum() / (np.count_nonzero(tokens_B) * rows.segment_BT.shape[1])


@st.composite
def examples_strategy(draw):
    """Examples that begin with some tokens of one of three prompts; all other ids are different."""
    lengths = draw(st.lists(st.integers(1, ROW_TOKENS), min_size=1, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompt_length = draw(st.integers(0, ROW_TOKENS))
    examples, next_id = [], 1
    for length in lengths:
        sampled = rng.random(length) < rng.choice([0.1, 0.5])
        sampled[0] = False
        prompt = -100 * int(rng.integers(1, 4)) - np.arange(min(length, prompt_length))
        ids = (*prompt.tolist(), *range(next_id, next_id + length - len(prompt)))
        examples.append(TrainingExample(ids, tuple(-rng.random(length)), tuple(sampled), float(rng.normal())))
        next_id += length
    return examples


@settings(max_examples=60, deadline=None)
@given(examples_strategy(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_every_example_is_packed_exactly_once_unsplit_and_in_order(examples, micro_rows, accum_steps, contexts, seed):
    minibatch_rows, rng = micro_rows * accum_steps, np.random.default_rng(seed)
    rows = pack(examples, ROW_TOKENS, minibatch_rows, rng, microbatches=accum_steps, minibatch_contexts=contexts)
    assert rows.ids_BT.shape[1] == ROW_TOKENS and len(rows.ids_BT) % minibatch_rows == 0

    found = []
    for row in range(len(rows.ids_BT)):
        segment_T = rows.segment_BT[row]
        tokens = int((segment_T > 0).sum())
        assert (segment_T[:tokens] > 0).all() and (np.diff(segment_T[:tokens]) >= 0).all()
        prefixes = set()
        for segment in range(1, segment_T.max() + 1):
            own = np.flatnonzero(segment_T == segment)
            prefix = rows.position_BT[row, own[0]]
            prefixes |= {prefix} if segment > 1 else set()
            assert segment > 1 or prefix == 0
            place = np.append(np.arange(prefix), own)
            assert (rows.position_BT[row, place] == np.arange(len(place))).all()
            assert not rows.mask_BT[row, own[0]], "predicted by the token before it, which may be another context's"
            found.append(tuple(tuple(getattr(rows, name)[row, place].tolist()) for name in FIELDS))
        assert len(prefixes) <= 1 and not rows.mask_BT[row, : max(prefixes, default=0)].any()

    expected = []
    for example in examples:
        end = 1 + max(np.flatnonzero(example.sampled), default=0)  # what comes later is not computed
        sampled_T = np.array(example.sampled[:end])
        values = (np.float32(value) * sampled_T for value in (example.advantage, example.logprobs[:end]))
        expected.append((tuple(example.ids[:end].tolist()), *(tuple(x.tolist()) for x in (sampled_T, *values))))
    assert sorted(found) == sorted(expected)

    padding_BT = rows.segment_BT == 0
    for name in ("position_BT", *FIELDS):
        assert not getattr(rows, name)[padding_BT].any()


@settings(max_examples=60, deadline=None)
@given(examples_strategy(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_mini_batches_hold_what_filling_token_by_token_gives(examples, micro_rows, accum_steps, contexts, seed):
    """Each is made on its own, bit for bit as a plain loop makes it."""
    rows = plan_rows(
        examples,
        ROW_TOKENS,
        micro_rows * accum_steps,
        np.random.default_rng(seed),
        microbatches=accum_steps,
        minibatch_contexts=contexts,
    )
    plain = {name: np.zeros((len(rows.rows), ROW_TOKENS), dtype) for name, dtype in PACKED_DTYPES.items()}
    index_BT = np.zeros((len(rows.rows), ROW_TOKENS), np.int32)
    for place, row in enumerate(rows.rows):
        column = 0
        for segment, index in enumerate(row.members if row else (), start=1):
            example = examples[index]
            for token in range(0 if segment == 1 else row.prefix, rows.lengths[index]):
                plain["ids_BT"][place, column] = example.ids[token]
                plain["position_BT"][place, column] = token
                plain["segment_BT"][place, column] = segment
                plain["mask_BT"][place, column] = example.sampled[token]
                if example.sampled[token]:
                    plain["count_BT"][place, column] = example.count
                    plain["advantage_BT"][place, column] = example.advantage
                    plain["old_logprob_BT"][place, column] = example.logprobs[token]
                index_BT[place, column] = index + 1
                column += 1
    batches = [rows.of_minibatch(number).batch() for number in range(rows.minibatches)]
    for name, expected_BT in plain.items():
        found_BT = np.concatenate([getattr(batch, name) for batch in batches])
        assert found_BT.dtype == expected_BT.dtype and found_BT.tobytes() == expected_BT.tobytes()
    np.testing.assert_array_equal(rows.per_token(1 + np.arange(len(examples)), np.int32), index_BT)


@settings(max_examples=60, deadline=None)
@given(examples_strategy(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_mini_batches_are_even_and_end_with_their_empty_micro_batches(examples, micro_rows, accum_steps, seed):
    minibatch_rows = micro_rows * accum_steps
    rows = pack(examples, ROW_TOKENS, minibatch_rows, np.random.default_rng(seed), microbatches=accum_steps)
    used = np.count_nonzero(rows.segment_BT.any(axis=1))
    assert len(rows.ids_BT) < used + minibatch_rows, "one mini-batch too many"
    filled = []
    for batch in rows.split(minibatch_rows):
        parts_nB = microbatches.split(batch.segment_BT, accum_steps).any(axis=2)
        filled.append(int(parts_nB.any(axis=1).sum()))
        assert parts_nB.any(axis=1)[: filled[-1]].all()
    assert sum(filled) == -(-used // micro_rows)
    assert max(filled) - min(filled) <= 1


def plain(length, prompt=()):
    """An example whose last token is trained, and which shares only `prompt` with others."""
    own = rng_of_ids.integers(0, 2**30, length - len(prompt))
    return TrainingExample((*prompt, *own.tolist()), (0.0,) * length, (*(False,) * (length - 1), True), 0.0)


rng_of_ids = np.random.default_rng(0)


def lengths_of_rollouts(trajectories, rng):
    """(length, sampled tokens, turn) of every context, drawn like the workload of benchmarks/workload.py."""
    contexts = []
    for _ in range(trajectories):
        question, memory, turns = rng.integers(20, 61), 0, rng.integers(1, 7)
        for turn in range(turns):
            think, observation, new_memory = rng.integers(30, 151), rng.integers(300, 901), rng.integers(50, 401)
            length, sampled = 459 + question + memory + think, think
            if turn < turns - 1:
                length, sampled = length + observation + new_memory, sampled + new_memory
            contexts.append((length, sampled, turn))
            memory = new_memory
    return np.array(contexts)


@pytest.fixture(scope="module", params=[(0, 0), (2, 449)], ids=str)
def rollouts(request):
    """(Context lengths, the length of the common prompt, rows) of 600 trajectories.

    The rows have 8,192 tokens, 64 of them are a mini-batch; the advantage is the turn.
    """
    seed, prompt_length = request.param
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 1_000, prompt_length)
    contexts = lengths_of_rollouts(600, rng)
    examples = [
        TrainingExample(
            np.append(prompt, rng.integers(0, 1_000, length - len(prompt))),
            np.zeros(length),
            np.arange(length) >= length - sampled,
            float(turn),
        )
        for length, sampled, turn in contexts.tolist()
    ]
    return contexts, prompt_length, pack(examples, 8_192, 64, rng, microbatches=8)


def test_rows_of_real_lengths_are_nearly_full(rollouts):
    contexts, prompt_length, rows = rollouts
    used = np.count_nonzero(rows.segment_BT.any(axis=1))
    prefix = prompt_length // 32 * 32  # as rows of 8,192 need
    assert (rows.segment_BT > 0).sum() == contexts[:, 0].sum() - prefix * (len(contexts) - used)
    assert fill(rows) >= 0.97


def test_mini_batches_have_all_turns_and_similar_numbers_of_trained_tokens(rollouts):
    contexts, _, rows = rollouts
    sampled_by_turn = np.bincount(contexts[:, 2], weights=contexts[:, 1]) / contexts[:, 1].sum()
    trained = []
    for batch in rows.split(64):
        trained.append(batch.mask_BT.sum() / np.count_nonzero(batch.segment_BT.any(axis=1)))
        shares = np.bincount(batch.advantage_BT[batch.mask_BT].astype(int), minlength=6) / batch.mask_BT.sum()
        # Of some 380 contexts drawn by chance a share of 0.32 is off by 0.024, in standard deviations.
        np.testing.assert_allclose(shares, sampled_by_turn, atol=0.1)
    assert len(trained) >= 4
    assert max(trained) < 1.02 * min(trained)


def test_rows_of_a_micro_batch_have_similar_numbers_of_trained_tokens(rollouts):
    *_, rows = rollouts
    spreads = []
    for batch in rows.split(64):
        for part_BT in microbatches.split(batch.mask_BT, 8):
            trained = part_BT.sum(axis=1)
            spreads += [trained.max() / trained.mean()] if trained.min() else []
    whole = rows.mask_BT.sum(axis=1)
    assert np.mean(spreads) < 1.1 < whole.max() / whole[whole > 0].mean()


def test_contexts_with_the_same_prompt_share_a_row_and_write_it_once():
    """Two prompts of 10 tokens: four contexts of each fill a row, in place of two."""
    prompts = [tuple(range(first, first + 10)) for first in (1, 11)]
    rows = pack([plain(12, prompt) for prompt in prompts * 5], 20, 1, np.random.default_rng(0))
    assert len(rows.ids_BT) == 2 and fill(rows) == 1
    np.testing.assert_array_equal(rows.position_BT, np.tile([*range(12), *[10, 11] * 4], (2, 1)))
    assert sorted(tuple(ids[:10].tolist()) for ids in rows.ids_BT) == prompts


def test_rows_of_one_question_share_it_where_that_saves_tokens():
    """A row holds five contexts of one question, or two of both.

    There are six contexts of each of two questions behind one system prompt of 4 tokens: 8 of a question, 4 of their
    own.
    """
    prompts = [(1, 2, 3, 4, *range(first, first + 8)) for first in (10, 20)]
    rows = pack([plain(16, prompt) for prompt in prompts * 6], 32, 1, np.random.default_rng(0))
    begins = [
        set(p_T[1:][np.diff(s_T) > 0].tolist()) for p_T, s_T in zip(rows.position_BT, rows.segment_BT, strict=True)
    ]
    assert sorted(map(sorted, begins)) == [[4], [12], [12]]


def test_invalid_examples_are_refused_in_one_line():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"25 tokens.*row of 24.*training\.seq_len"):
        pack([plain(25)], ROW_TOKENS, 1, rng)
    with pytest.raises(ValueError, match="at least one example"):
        pack([], ROW_TOKENS, 1, rng)
    with pytest.raises(ValueError, match="first token"):
        TrainingExample((1, 2), (0.0, 0.0), (True, True), 0.0)
    with pytest.raises(ValueError, match="equal lengths"):
        TrainingExample((1, 2), (0.0,), (False, True), 0.0)


@pytest.mark.parametrize(
    ("count", "contexts", "updates"),
    [
        (4_480, 640, 7),  # the paper's mini-batch: the contexts of a step of 256 x 5 trajectories
        (1_120, 10, 6),  # one micro-batch of 32 rows each
    ],
)
def test_mini_batches_hold_about_as_many_contexts_as_the_setting_says(count, contexts, updates):
    """Lengths as in benchmarks/workload.py: 3.5 contexts per trajectory, of 1,340 tokens on average."""
    rng, seq_len, minibatch_rows = np.random.default_rng(0), 8_192, 256
    examples = [
        TrainingExample(rng.integers(0, 1_000, n), np.zeros(n, np.float32), np.arange(n) >= n - 250, 1.0)
        for n in rng.integers(500, 2_180, count)
    ]
    accum_steps = minibatch_rows // 32
    packed = pack(examples, seq_len, minibatch_rows, rng, microbatches=accum_steps, minibatch_contexts=contexts)
    batches = list(packed.split(minibatch_rows))
    assert len(batches) == updates
    in_batch = [sum(len(np.unique(row[row > 0])) for row in batch.segment_BT) for batch in batches]
    assert sum(in_batch) == count
    micro_rows = [microbatches.num_nonempty(microbatches.split(batch.segment_BT, accum_steps)) for batch in batches]
    assert max(micro_rows) - min(micro_rows) <= 1


@pytest.mark.parametrize(("seq_len", "rows"), [(8, [([0, 1], 4), ([2, 3], 4)]), (18, [([0, 1, 2, 3], 2)])])
def test_rows_of_the_example_in_the_docstring(seq_len, rows):
    system = (1, 1)
    beginnings = []
    for example in range(4):
        question = (10 + example // 2, 20 + example // 2)
        ids = np.array([*system, *question, 100 + example, 200 + example], np.int32)
        beginnings.append(Beginning(ids, length=6, shareable=4))
    filled = fill_rows(beginnings, seq_len, np.arange(4))
    assert [(sorted(row.members), row.prefix) for row in filled] == rows
