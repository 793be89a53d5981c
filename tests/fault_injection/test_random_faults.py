"""The functions of random_faults.py that need no job: schedule, damage and counts."""

import random
import re

import pytest
import random_faults
from faulty_host import PHASES
from run_job import LOG_LINES

from memsearcher_jax.runtime.health import HealthConfig, HealthMonitor


@pytest.mark.parametrize("seed", range(8))
def test_every_step_except_the_first_has_a_fault(seed):
    faults = random_faults.schedule(seed, 2)
    assert faults == random_faults.schedule(seed, 2)
    assert [(fault.step, fault.number) for fault in faults] == [(step, step - 1) for step in range(1, 6)]
    assert all(fault.phase in PHASES and fault.host in (0, 1) for fault in faults)
    kinds = [fault.kind for fault in faults]
    assert kinds[-1] != "sigterm", "after the last step there is nothing to stop"
    assert 0 < kinds.index("kill") < kinds.index("disk_full"), "a kill would lose the steps since"
    assert set(kinds) == set(random_faults.LOG_LINES) - {"damaged checkpoint", "malformed row"}


@pytest.mark.parametrize("truncate", [True, False])
def test_the_newest_of_several_checkpoints_is_damaged(truncate, tmp_path):
    files = [tmp_path / "checkpoints" / step / "params" / name for step in "12" for name in ("data", "_sharding")]
    for number, file in enumerate(files):  # a run does not read _sharding
        if number == 2:
            assert random_faults.damage(random.Random(0), tmp_path, truncate) == "", "the only one is not damaged"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(5_000))
        (file.parents[1] / "_CHECKPOINT_METADATA").write_text("{}")
    done = random_faults.damage(random.Random(0), tmp_path, truncate)
    assert done == f"checkpoints/2/params/data: {'truncated' if truncate else 'bit flipped'}"
    older, newest = files[0].read_bytes(), files[2].read_bytes()
    assert (older, len(newest)) == (bytes(5_000), 2_500 if truncate else 5_000)
    assert sum(byte.bit_count() for byte in newest) == (0 if truncate else 1)


def test_lost_steps_are_reported_steps_without_a_checkpoint():
    log = "\n".join(f"host 0: train {step}/6  reward 0.100  EM 0.000  left 0:00:09" for step in (2, 3))
    assert [random_faults.lost_steps(log, newest) for newest in (1, 2, 3)] == [2, 1, 0]
    assert random_faults.lost_steps("host 0: train 2/6  write", 4) == 0


def test_the_log_line_of_a_skipped_update_is_recognised():
    lines = []
    HealthMonitor(HealthConfig(), lines.append).check(5, {"skipped_updates": 1, "updates": 1})
    assert re.search(random_faults.LOG_LINES["nan"], lines[0]) and LOG_LINES.search(lines[0])
