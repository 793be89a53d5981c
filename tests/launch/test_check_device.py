"""The device check, rehearsed on a CPU."""

import json

import pytest

from memsearcher_jax.device_check.kernels import Kernels
from memsearcher_jax.device_check.rows import Row
from memsearcher_jax.launch import check_device
from memsearcher_jax.ops import paged_attention as paged


def wrong_attention(q_AKQWH, pools, layer, page_table_AI, length_A):
    return paged.paged_attention(q_AKQWH, pools, layer, page_table_AI, length_A - 1)


def test_a_failed_row_is_repeated_at_the_end_and_is_the_exit_status(monkeypatch, tmp_path, capsys):
    wrong = Row("paged attention, int8", "3.0e-01", "at most 1e-04", False, "sample with --sampling.attention xla")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)  # plan_tpu sets it for the process that it runs in
    monkeypatch.setattr(check_device, "_before_jax", lambda: [])
    monkeypatch.setattr(check_device, "_kernel_rows", lambda *_: [wrong, Row("draw", "same")])
    monkeypatch.setattr(check_device, "_speed_rows", lambda *_: [Row("decode", "9 tokens/s", passed=None)])
    monkeypatch.setattr(check_device, "_nano_row", lambda: Row("two steps of nano", "done in 1 s"))
    with pytest.raises(SystemExit) as exit_:
        check_device.main(["--json", str(tmp_path / "x.json")])
    assert exit_.value.code == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "paged attention, int8: 3.0e-01; sample with --sampling.attention xla"
    written = json.loads((tmp_path / "x.json").read_text())
    assert [row["name"] for row in written["rows"] if row["passed"] is False] == ["paged attention, int8"]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [None, Kernels(paged_attention=wrong_attention)], ids=["right", "wrong"])
def test_the_whole_check_on_a_cpu(kernels, tmp_path, capsys):
    """A wrong kernel is found, and named in the exit's line; everything else passes."""
    arguments = ["--json", str(tmp_path / "x.json")]
    if kernels is None:
        check_device.main(arguments)
    else:
        with pytest.raises(SystemExit) as exit_:
            check_device.main(arguments, kernels)
        assert exit_.value.code == 1
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    failed = {row["name"] for row in rows if row["passed"] is False}
    assert failed == (set() if kernels is None else {f"paged attention, {d}" for d in ("float32", "bfloat16", "int8")})
    assert {"sampler against trainer", "decode", "prefill", "update", "two steps of nano"} <= {x["name"] for x in rows}
