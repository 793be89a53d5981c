import pytest

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.data import builder

ROWS = [Problem(f"q{row}", f"Qué {row}?", ("a", "b")[: 1 + row % 2], {"hops": row}) for row in range(25)]


def test_rows_keep_their_order_and_content(tmp_path):
    stored = builder.store({"train": ROWS, "test": ROWS[:3], "dev": []}, tmp_path)
    assert set(stored) == {"train", "test"}
    assert list(stored["train"]) == ROWS
    assert list(stored["test"]) == ROWS[:3]


def test_a_sequence_like_any_other(tmp_path):
    stored = builder.store({"train": ROWS}, tmp_path)["train"]
    assert len(stored) == 25
    assert stored[-1] == ROWS[-1]
    assert stored[20:40] == tuple(ROWS[20:])
    assert ROWS[7] in stored
    with pytest.raises(IndexError):
        stored[25]


def test_the_same_rows_are_written_once(tmp_path):
    builder.store({"train": ROWS}, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.array_record*")}
    assert len(before) == 1
    assert list(builder.store({"train": list(ROWS)}, tmp_path)["train"]) == ROWS
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.array_record*")} == before
    builder.store({"test": ROWS}, tmp_path)
    assert len(list(tmp_path.rglob("*.array_record*"))) == 2, "the split is part of what the rows are"


def test_a_write_that_stops_half_way_is_not_taken_for_the_data(tmp_path, monkeypatch):
    class Interrupted(list):
        def __iter__(self):
            yield from ROWS[:10]
            raise KeyboardInterrupt

    monkeypatch.setattr(builder, "fingerprint", lambda splits: "fixed")
    with pytest.raises(KeyboardInterrupt):
        builder.store({"train": Interrupted(ROWS)}, tmp_path)
    assert list(builder.store({"train": ROWS}, tmp_path)["train"]) == ROWS
