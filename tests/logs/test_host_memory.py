"""The peak of a process's memory, recorded anew."""

import sys

import numpy as np
import pytest

from memsearcher_jax.logs import host_memory

BLOCK = 200_000_000  # bytes


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not record it")
def test_the_peak_is_that_since_it_was_recorded_anew():
    if not host_memory.record_peak_anew():
        pytest.skip("this system does not allow it")
    before = host_memory.peak_gb()
    block = np.ones(BLOCK, np.uint8)
    with_block = host_memory.peak_gb()
    assert with_block > before + 0.15
    del block
    assert host_memory.peak_gb() == pytest.approx(with_block, abs=0.02), "a peak outlives what made it"
    host_memory.record_peak_anew()
    assert host_memory.peak_gb() < with_block - 0.15


def test_a_system_that_does_not_say_it_has_no_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "STATUS", tmp_path / "no")
    monkeypatch.setattr(host_memory, "CLEAR_REFS", tmp_path / "no" / "file")
    assert host_memory.peak_gb() is None
    assert not host_memory.record_peak_anew()
