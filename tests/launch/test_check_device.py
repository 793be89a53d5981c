"""The device check, rehearsed on a CPU. The notebook's test runs it with the right kernels."""

import json

import pytest

from memsearcher_jax.device_check.kernels import Kernels
from memsearcher_jax.launch import check_device
from memsearcher_jax.ops import paged_attention as paged


def wrong_attention(q_AKQWH, pools, layer, page_table_AI, length_A):
    return paged.paged_attention(q_AKQWH, pools, layer, page_table_AI, length_A - 1)


@pytest.mark.slow
def test_the_whole_check_finds_a_wrong_kernel_and_passes_everything_else(tmp_path):
    with pytest.raises(SystemExit) as exit_:
        check_device.main(["--json", str(tmp_path / "x.json")], Kernels(paged_attention=wrong_attention))
    assert exit_.value.code == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "x.json").read_text())["rows"]}
    failed = {name for name, row in rows.items() if row["passed"] is False}
    assert failed == {f"paged attention, {dtype}" for dtype in ("float32", "bfloat16", "int8")}
    assert "nats" in rows["sampler against trainer"]["found"]
    assert all("tokens/s" in rows[name]["found"] for name in ("decode", "prefill", "update"))
    assert "two steps of nano" in rows
