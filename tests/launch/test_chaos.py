"""The parts of benchmarks/chaos.py that need no job: its schedule, what it breaks, what it counts."""

import http.server
import json
import random
import threading
from pathlib import Path

import pytest
from pod import rehearse, rehearsed
from pod.retriever import TORN, Nonsense, write_questions

from benchmarks import chaos
from memsearcher_jax.data.problems import DataConfig, load
from memsearcher_jax.retrieval.client import SearchService, SearchUnavailable


@pytest.mark.parametrize("seed", range(40))
def test_every_step_but_the_first_has_a_fault_that_is_known_and_told(seed):
    faults = chaos.schedule(seed, 6, 2)
    assert [fault["step"] for fault in faults] == [1, 2, 3, 4, 5]
    assert [fault["number"] for fault in faults] == [0, 1, 2, 3, 4]
    for fault in faults:
        assert fault["phase"] in rehearse.PHASES
        assert fault["host"] in (0, 1)
        assert fault["kind"] in chaos.LINES
        assert rehearsed.named(fault).startswith(f"{fault['kind']} {fault['host']}@step{fault['step']}:")
    assert faults[-1]["kind"] != "term", "a job that has nothing left to do is not stopped"
    kinds = [fault["kind"] for fault in faults]
    assert kinds.index("kill") > 0
    assert kinds[kinds.index("kill") - 1] != "full", "a full disk is told of when the write has failed"
    assert faults == chaos.schedule(seed, 6, 2)


@pytest.mark.parametrize("first", range(8))
def test_a_few_jobs_show_every_kind_and_kill_in_every_phase(first):
    two = [fault for seed in (first, first + 1) for fault in chaos.schedule(seed, 6, 1)]
    assert {fault["kind"] for fault in two} == set(chaos.LINES) - {"damage", "row"}
    four = [fault for seed in range(first, first + 4) for fault in chaos.schedule(seed, 6, 1)]
    assert {fault["phase"] for fault in four if fault["kind"] == "kill"} == {"rollout", "share", "update", "write"}


def test_a_search_service_out_of_its_mind_is_waited_for():
    """Its answers come with status 200; taken for answers, they would change what is learnt."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        service = SearchService(f"http://127.0.0.1:{server.server_port}", attempts=3, sleep=lambda seconds: None)
        with pytest.raises(SearchUnavailable, match=r"something else than JSON.*\(attempt 3 of 3\)"):
            service.find(["Who?"], 1)
        server.shutdown()


def checkpoint(out: Path, step: int) -> None:
    folder = out / "checkpoints" / str(step)
    (folder / "params").mkdir(parents=True)
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    for name in ("data", "_sharding"):  # the second is not read by a run
        (folder / "params" / name).write_bytes(bytes(5_000))


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_newest_of_several_checkpoints_is_damaged(seed, cuts, tmp_path):
    checkpoint(tmp_path, 1)
    assert chaos.damage(random.Random(seed), tmp_path, cuts) == ""  # the only one stays
    checkpoint(tmp_path, 2)
    done = chaos.damage(random.Random(seed), tmp_path, cuts)
    assert done == f"checkpoints/2/params/data: {'cut off' if cuts else 'a bit flipped'}"
    older, newest = ((tmp_path / "checkpoints" / str(step) / "params" / "data").read_bytes() for step in (1, 2))
    assert older == bytes(5_000)
    assert len(newest) == (2_500 if cuts else 5_000)
    assert sum(byte.bit_count() for byte in newest) == (0 if cuts else 1)


def test_lost_steps_are_counted_from_what_was_told():
    line = "host 0: train {}/6  reward 0.100  EM 0.000  rollout 1.0s  update 1.0s  left 0:00:09"
    said = "\n".join([line.format(2), "host 0: train 2/6  write", line.format(3)])
    assert [chaos.lost_steps(said, newest) for newest in (1, 2, 3)] == [2, 1, 0]
    assert chaos.lost_steps("", 4) == 0


def test_rows_that_are_none_are_left_out_and_change_nothing_else(tmp_path):
    """The questions, their order included, are those of the file without them."""
    loaded = []
    for torn in (False, True):
        flags = write_questions("nano", tmp_path / f"{torn}.jsonl", torn=torn)
        assert flags == ["--data.train", str(tmp_path / f"{torn}.jsonl"), "--data.malformed", ["refuse", "skip"][torn]]
        loaded.append(load(DataConfig(train=(flags[1],), malformed=flags[3]), tmp_path / f"data_{torn}"))
    whole, cut = loaded
    assert cut.skipped_count == len(TORN)
    assert json.dumps([one.id for one in cut.train]) == json.dumps([one.id for one in whole.train])
