"""What is trained of trajectory files: the ids and masks that they hold, filtered and in the order of the settings."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.logs.trajectories import compress_trajectories, step_path
from memsearcher_jax.runs.run_dir import PACKAGED_TOKENIZER
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.sft.recorded import load
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory

TOKENIZER = ChatTokenizer.load(PACKAGED_TOKENIZER)
ALL = SFTConfig(held_out_share=0.0, trajectories_per_step=3)


def context(*ids, sampled=1):
    """A context whose last `sampled` tokens were sampled."""
    return Context(ids, (-0.5,) * len(ids), tuple(place >= len(ids) - sampled for place in range(len(ids))))


SHORT = context(5, 6, 7)


def scored(problem="q", reward=1.0, contexts=(SHORT,), source="nq", transcript=None, question="Who?"):
    problem = Problem(problem, question, ("Ada",), {"source": source})
    if transcript is None:
        transcript = TOKENIZER.transcript(contexts[-1].ids)
    return ScoredTrajectory(Trajectory(problem, 0, Outcome(StopReason.ANSWERED), tuple(contexts), transcript), reward)


@pytest.fixture
def write(tmp_path):
    """Writes trajectories to the file of a step of a run, and returns the run's folder as an entry of a setting."""

    def write(*trajectories, step=0, run="run"):
        path = step_path(tmp_path / run, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compress_trajectories(trajectories))
        return str(tmp_path / run)

    return write


def read(entry, config=ALL, seq_len=100, **changes):
    return load(replace(config, trajectories=(entry,), **changes), 0, TOKENIZER, 2_048, seq_len)


contexts = st.lists(st.tuples(st.integers(0, 2_047), st.booleans()), min_size=2, max_size=12).map(
    lambda tokens: Context(
        tuple(id for id, _ in tokens), (0.0,) * len(tokens), (False, *(flag for _, flag in tokens[1:]))
    )
)


@settings(max_examples=20)
@given(st.lists(st.lists(contexts, min_size=1, max_size=3), min_size=1, max_size=4))
def test_what_is_trained_is_what_was_recorded(tmp_path_factory, trajectories):
    path = tmp_path_factory.mktemp("recorded") / "mine.jsonl.gz"
    kept = [[one for one in contexts if any(one.sampled)] for contexts in trajectories]
    if not any(kept):
        return
    path.write_bytes(compress_trajectories([scored(str(n), contexts=one) for n, one in enumerate(trajectories)]))
    data = read(str(path), trajectories_per_step=0)
    found = [[(one.ids.tolist(), one.sampled.tolist()) for one in recorded.examples] for recorded in data.train]
    expected = [[(one.ids.tolist(), one.sampled.tolist()) for one in contexts] for contexts in kept if contexts]
    assert found == expected
    assert data.left_out["contexts without a sampled token"] == sum(map(len, trajectories)) - sum(map(len, kept))


def test_contexts_that_are_longer_than_a_row_are_left_out_and_counted(write):
    entry = write(scored(contexts=[context(*range(5, 25)), context(5, 6)]), scored(contexts=[context(*range(5, 30))]))
    data = read(entry, seq_len=20)
    assert [len(one.examples) for one in data.train] == [2]
    assert data.left_out["contexts longer than training.seq_len"] == 1
    with pytest.raises(ValueError, match=r"nothing to train on \(3 contexts longer than .*raise training.seq_len"):
        read(entry, seq_len=1)


def test_trajectories_are_chosen_by_their_reward(write):
    entry = write(scored("a", 0.2), scored("a", 0.9), scored("b", 0.4), scored("b", np.nan), scored("c", -1.0))
    write(scored("a", 0.9), scored("c", 0.0), step=1)

    def chosen(**changes):
        return sorted((one.problem[0], one.reward) for one in read(entry, **changes).train)

    assert chosen() == [("a", 0.2), ("a", 0.9), ("a", 0.9), ("b", 0.4), ("c", 0.0)]
    assert chosen(min_reward=0.3) == [("a", 0.9), ("a", 0.9), ("b", 0.4)]
    assert chosen(keep="best") == [("a", 0.9), ("a", 0.9), ("b", 0.4), ("c", 0.0)]
    assert chosen(keep="best", min_reward=-2.0) == chosen(keep="best"), "without a reward is never trained"
    left_out = read(entry, keep="best").left_out
    assert left_out["trajectories without a reward"] == left_out["trajectories below sft.min_reward"] == 1
    with pytest.raises(ValueError, match=r"1 trajectories without a reward, 6 trajectories below sft.min_reward"):
        read(entry, min_reward=2.0)


def test_problems_of_two_datasets_with_one_id_have_a_best_each(write):
    entry = write(scored("train_0", 0.5), scored("train_0", 1.0, question="Where?"))
    assert len(read(entry, keep="best").train) == 2


def test_every_epoch_trains_every_trajectory_once_in_an_order_of_its_own(write):
    data = read(write(*(scored(str(number)) for number in range(8))), epochs=2)
    order = [[one.problem[0] for one in data.step(number)] for number in range(data.steps)]
    assert list(map(len, order)) == [3, 3, 2] * 2
    first, second = ([problem for step in epoch for problem in step] for epoch in (order[:3], order[3:]))
    assert sorted(first) == sorted(second) == list(map(str, range(8))) and first != second
    assert order == [[one.problem[0] for one in data.step(number)] for number in range(6)]


def test_a_step_may_train_one_file_in_the_order_that_it_was_written_in(write):
    for step in (1, 0):
        entry = write(*(scored(f"{step}{number}") for number in range(3 - step)), step=step)
    data = read(entry, trajectories_per_step=0, epochs=2)
    assert [[one.problem[0] for one in data.step(number)] for number in range(data.steps)] == [
        ["00", "01", "02"],
        ["10", "11"],
    ] * 2


def test_the_schedule_changes_with_all_that_changes_what_a_step_trains(write):
    """A run that goes on compares it: with another one, some trajectories are trained twice and others never."""
    trajectories = [scored("a", 0.2), scored("b", 0.9, [context(*range(5, 25)), SHORT]), scored("c", 1.0), scored("c")]
    trajectories.append(scored("d", 0.5, [context(*range(5, 25))]))
    entry = write(*trajectories)
    begun = read(entry).schedule
    assert read(entry, seq_len=20).schedule == begun == read(entry, epochs=5, measure_every=3).schedule
    changes = [{"min_reward": 0.3}, {"trajectories_per_step": 2}, {"held_out_share": 0.6}]
    schedules = [read(entry, **change).schedule for change in changes]
    schedules.append(read(entry, seq_len=19).schedule)
    schedules.append(load(replace(ALL, trajectories=(entry,)), 1, TOKENIZER, 2_048, 100).schedule)
    assert len({begun, *schedules}) == 1 + len(schedules)
    assert read(entry, keep="best").schedule == begun, "both of c are best"


def test_a_file_that_two_entries_name_counts_once(write):
    entry = write(scored("0"))
    assert len(load(replace(ALL, trajectories=(entry, f"{entry}/trajectories")), 0, TOKENIZER, 2_048, 100).train) == 1


def test_held_out_are_whole_problems_or_files_of_their_own(write):
    entry = write(*(scored(str(number % 40)) for number in range(80)))
    data = read(entry, held_out_share=0.3)
    held_out, train = ({one.problem[0] for one in part} for part in (data.held_out, data.train))
    assert not held_out & train and 4 < len(held_out) < 20
    assert len(data.held_out) == 2 * len(held_out)
    other = write(scored("x", 0.0, source="span"), run="other")
    data = read(entry, held_out=(other,), min_reward=1.0)
    assert [(one.problem[0], one.source) for one in data.held_out] == [("x", "span")] and len(data.train) == 80
    assert data.checksum != read(entry).checksum
    with pytest.raises(ValueError, match=r"step_000000.jsonl.gz is in sft.trajectories and in sft.held_out"):
        read(entry, held_out=(entry,))


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (context(5, 2_048), r"run/.*:1: train the model .* 2048 has no token 2048"),
        (context(5, -1), r"has no token"),
        (context(5, sampled=1), r"a context must hold token ids, the first of which was not"),
    ],
)
def test_files_of_another_tokenizer_are_refused_by_their_line(write, recorded, message):
    with pytest.raises(ValueError, match=message):
        read(write(scored(contexts=[recorded], transcript="")))


def test_ids_that_the_tokenizer_reads_otherwise_are_refused(write):
    with pytest.raises(ValueError, match=r":1: train the model .* does not read the recorded text in the recorded ids"):
        read(write(scored(transcript="Something else.")))
    with pytest.raises(ValueError, match=r":2: train the model"):  # also behind a trajectory that was lost
        read(write(scored(contexts=(), transcript=""), scored(transcript="Something else.")))


def test_missing_and_damaged_files_are_errors(tmp_path, write):
    (tmp_path / "run").mkdir()
    for name in ("run.json", "metrics.jsonl"):  # of a run that saves none, whose metrics are none
        (tmp_path / "run" / name).write_text("{}\n")
    with pytest.raises(FileNotFoundError, match=r"run.trajectories holds no trajectories"):
        read(str(tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match=r"none.jsonl: no such file"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"question": "Who?"}\n')
    with pytest.raises(ValueError, match=r"other.jsonl:1: not a trajectory"):
        read(str(tmp_path / "other.jsonl"))
