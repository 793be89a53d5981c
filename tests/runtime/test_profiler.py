"""Which step is profiled; tests/launch/test_job_output.py reads the trace of a run."""

import pytest

from memsearcher_jax.runtime.profiler import check_step


def test_a_profiled_step_outside_the_run_is_an_error():
    check_step(None, 3, 3)
    check_step(3, 3, 4)
    for step in (-1, 2, 6):
        with pytest.raises(ValueError, match=f"--profile {step}: this start takes the steps 3 to 5"):
            check_step(step, 3, 6)
