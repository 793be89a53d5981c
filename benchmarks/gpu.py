"""What a GPU does, as one table, in at most --minutes. Nothing is downloaded.

python benchmarks/gpu.py --smollm2 DIR --train FILE ... --test FILE --corpus FILE
python benchmarks/gpu.py --small                        # a rehearsal at tiny sizes, also on a CPU

numerics   logits, log-probabilities and gradients against the CPU, in float32 without TensorFloat-32; what the engine
           samples against the CPU, against each context alone, and against the full forward pass; compilations
decode     tokens/s of the engine by slots, without the prefill, random weights in bfloat16; and of transformers'
           generate (sdpa, static cache, not compiled)
update     the optimiser step of update.py; with TRL's loss on torch and sdpa, too
train      --config smollm2 with 64 problems x 8 rollouts: seconds of a step by phase, as many steps as there is time
           for, and exact match on held-out questions before and after

`ratio` is ours over torch, `share` that of the peak rates in planning/roofline.py: of the time in which the GPU reads
weights and KV cache, and of its FLOP/s. What cannot run, or has no time left, is left out in one line. A machine with
CUDA and jax[cuda12] needs pip install -e . and, for the columns of torch, pip install torch, whose default wheel on
Linux is for CUDA. Run --small there first.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import tyro
from update import measure

from memsearcher_jax.launch.preconditions import has_accelerator
from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.logs.run_facts import read_results
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.planning.roofline import CHIPS, GPUS, Chip, matmul_param_bytes

PROMPT, NEW, BUCKETS = 256, 128, (256, 8_192)  # tokens of a decoded context; widths of a prefill
PART_SECONDS, TEST_SECONDS = 75, 45  # that a process may take
TRAIN_SECONDS = 150  # of the time are kept for training, if it can run
SMALL = "--config tiny --rl.prompts_per_step 4 --rl.group_size 4 --evaluation.max_questions 8"
LARGE = (  # slots and rows that fill a GPU; the preset has two cores in mind
    "--config smollm2 --rl.prompts_per_step 64 --rl.group_size 8 --sampling.slots 256 --training.minibatch_rows 64 "
    "--training.grad_accum_steps 4 --evaluation.max_questions 200"
)
ROW = "{:10}{:72}{:>12}{:>12}{:>8}{:>8}"


@dataclass(frozen=True)
class Flags:
    smollm2: Path | None = None
    """Folder of SmolLM2-135M, from launch/import_gguf.py."""
    train: tuple[Path, ...] = ()
    """Question files to train on."""
    test: tuple[Path, ...] = ()
    """Question files to test on, before and after."""
    corpus: Path | None = None
    """Passages to search."""
    minutes: float = 8.0
    """Time for everything."""
    small: bool = False
    """Tiny models and one step; also without a GPU."""

    @property
    def trains(self) -> bool:
        return self.small or bool(self.smollm2 and self.corpus and self.train and self.test)


@dataclass
class Report:
    """Prints each row as soon as it is measured, and knows the time that is left."""

    flags: Flags
    folder: Path
    end: float  # of time.monotonic

    def add(self, part: str, what: str, *cells: str) -> None:
        print(ROW.format(part, what, *cells, *[""] * (4 - len(cells))).rstrip(), flush=True)

    def compare(self, part: str, what: str, own: float | None, other: float | None, bound: float | None) -> None:
        if own or other:
            ratio, share = own and other and own / other, own and bound and own / bound
            numbers = (f"{value:,.0f}" if value else "" for value in (own, other))
            self.add(part, what, *numbers, f"{ratio:.2f}" if ratio else "", f"{share:.0%}" if share else "")

    def run(self, part: str, what: str, call: Callable, *arguments: Any, limit=PART_SECONDS, **options: Any) -> Any:
        """What `call` returns of another process; None, and a row that says why, if it fails or has no time."""
        # A process has the GPU alone; later ones find the programs that earlier ones compiled.
        environment = {"JAX_COMPILATION_CACHE_DIR": str(self.folder), "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"}
        left = self.end - time.monotonic() - (TRAIN_SECONDS if self.flags.trains and part != "train" else 0)
        seconds = min(4 * limit if self.flags.small else limit, left)
        try:
            if seconds < 1:
                raise SystemExit("no time is left")
            return call(*arguments, seconds=seconds, **options, **environment)
        except SystemExit as error:
            first, *others = str(error).strip().splitlines()
            self.add(part, f"{what} left out: {first[-60:]} {' '.join(others[-1:])}")
            return None


def main(flags: Flags) -> None:
    files = filter(None, (flags.smollm2, *flags.train, *flags.test, flags.corpus))
    if missing := [str(file) for file in files if not file.exists()]:
        raise SystemExit(f"no such file: {', '.join(missing)}")
    if not flags.small and not has_accelerator():
        raise SystemExit("there is no GPU: --small rehearses on a CPU")
    started, sizes, dtype = time.monotonic(), ("smollm2", "qwen05b", "qwen3b"), "bfloat16"
    if flags.small:
        sizes, dtype = ("tiny",), "float32"
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        report = Report(flags, Path(folder), started + 60 * flags.minutes)
        report.add("part", "", "ours", "torch", "ratio", "share")
        unknown = {"device": "unknown", "rows": {}}
        found = report.run("numerics", "numerics", common.in_process, numerics, sizes[0]) or unknown
        for what, value in found["rows"].items():
            report.add("numerics", what, value)
        device, torch = found["device"], importlib.util.find_spec("torch") is not None
        chip = next((chip for name, chip in (CHIPS | GPUS).items() if name in device.lower()), None)
        if chip is None:
            report.add("", f"shares left out: planning/roofline.py has no rates of {device}")
        if not torch:
            report.add("", "torch left out: it is not installed")
        for size in sizes:
            decode(report, size, dtype, torch, chip)
            update(report, size, dtype, torch, chip)
        train(report)
    print(f"{device}, {time.monotonic() - started:.0f} s")


def numerics(size: common.Size) -> dict[str, Any]:
    """The name of the device, and rows of the table. The CPU computes in the same process."""
    if (platforms := os.environ.get("JAX_PLATFORMS")) and "cpu" not in platforms:
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"
    import jax

    device, model = jax.devices()[0], common.model_of(size, "float32")
    with jax.default_matmul_precision("highest"):  # TensorFloat-32 otherwise
        cpu, own = (on_device(model, one) for one in (jax.devices("cpu")[0], device))
    rows = {}
    for name in ("logits", "log-probabilities", "gradients"):
        largest = max(float(np.abs(a).max()) for a in cpu[name])
        difference = max(float(np.abs(a - b).max()) for a, b in zip(cpu[name], own[name], strict=True))
        rows[f"{name}: difference from the CPU over the largest value"] = f"{difference / largest:.1e}"
    for what, other in (("on the CPU", cpu["sampled"]), ("alone", own["alone"])):
        equal = sum(a == b for a, b in zip(own["sampled"], other, strict=True))
        rows[f"contexts that are sampled as {what}"] = f"{equal} of {len(other)}"
    rows["log-probabilities: engine and full forward pass"] = f"{own['engine']:.1e}"
    rows["programs compiled after the warm-up"] = str(own["compiled"])
    return {"device": device.device_kind, "rows": rows}


def on_device(model: ModelConfig, device: Any) -> dict[str, Any]:
    """What a device computes for the same weights: sampled ids, and lists of arrays."""
    import jax

    from memsearcher_jax.model import qwen, sharding
    from memsearcher_jax.training.logprobs import token_logprobs

    mesh, host = (sharding.make_mesh(MeshConfig(1, 1, 1), [one]) for one in (device, jax.devices("cpu")[0]))
    model = sharding.select_attention(model, mesh, 2 * (PROMPT + NEW))
    params = jax.device_put(common.random_params(model, host), sharding.param_shardings(model, mesh))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, PROMPT - 9 * number).tolist() for number in range(8)]
    program = sharding.publish_program(model, mesh, (device,), model.compute_dtype)
    published = sharding.on_submesh(program(params), mesh)
    engine = common.open_engine(model, mesh, published, (1, 8), PROMPT + NEW, prefill_buckets=BUCKETS, top_k=50)
    events = list[str]()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    contexts = common.generate(engine, published, prompts, NEW // 4)
    alone = [common.generate(engine, published, [one], NEW // 4, first)[0] for first, one in enumerate(prompts)]
    compiled = events.count("/jax/core/compile/backend_compile_duration")
    batch = common.packed(contexts, 2 * (PROMPT + NEW))

    def total(params: Any) -> tuple[Any, Any]:
        logprob_BT, *_ = token_logprobs(params, model, batch, chunk=128, temperature=1.0)
        return logprob_BT.sum(), logprob_BT

    (_, logprob_BT), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    packed = (x[:1] for x in (batch.ids_BT, batch.position_BT, batch.segment_BT))
    logits_BTV, _ = jax.jit(qwen.forward, static_argnums=1)(params, model, *packed)
    return {
        "logits": [np.asarray(logits_BTV)[batch.segment_BT[:1] > 0]],
        "log-probabilities": [np.asarray(logprob_BT)],
        "gradients": list(map(np.asarray, jax.tree.leaves(gradients))),
        "sampled": [one.ids for one in contexts],
        "alone": [one.ids for one in alone],
        "compiled": compiled,
        "engine": float(np.abs(np.asarray(logprob_BT) - batch.old_logprob_BT)[batch.mask_BT].max()),
    }


def decoded_tokens(size: common.Size, dtype: str, slots: Sequence[int], torch: bool) -> list[float]:
    """Tokens/s by slots: what `NEW` tokens take longer than one, in the second of two runs."""
    model, rng, speeds = common.model_of(size, dtype), np.random.default_rng(1), []
    if torch:  # compiling `generate` takes a minute for each number of slots
        static = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
        generate = partial(common.transformers_generate(model), **static)
    else:
        generate = partial(common.generate, *common.random_engine(model, slots, PROMPT + NEW, prefill_buckets=BUCKETS))
    for count in slots:
        prompts = rng.integers(0, model.vocab_size, (count, PROMPT)).tolist()
        _, _, one, all_ = (common.timed(partial(generate, prompts, new))[0] for new in (1, NEW, 1, NEW))
        speeds.append(count * (NEW - 1) / max(all_ - one, 1e-9))
    return speeds


def decode(report: Report, size: str, dtype: str, torch: bool, chip: Chip | None) -> None:
    model, slots = common.model_of(size, dtype), (1, 4) if report.flags.small else (1, 16, 64, 256)
    call = common.in_process, decoded_tokens, size, dtype, slots
    own = report.run("decode", f"{size}, engine", *call, False)
    other = torch and report.run("decode", f"{size}, torch", *call, True)
    cache = 2 * model.layers * model.kv_heads * model.head_size * model.compute_itemsize * (PROMPT + NEW // 2)
    for number, count in enumerate(slots):
        speeds = (found and found[number] for found in (own, other))
        bound = chip and count * chip.hbm_bandwidth / (matmul_param_bytes(model) + count * cache)
        report.compare("decode", f"{size}, {count} slots, tokens/s", *speeds, bound)


def update(report: Report, size: str, dtype: str, torch: bool, chip: Chip | None) -> None:
    contexts, devices, repeats = 4 if report.flags.small else 16, 2, 1
    arguments = size, dtype, contexts, devices, repeats, torch
    if row := report.run("update", size, common.in_process, measure, *arguments):
        own = row["ours tokens/s"]
        bound = chip and own * chip.flops / (1e12 * row["ours TFLOP/s"])
        report.compare("update", f"{size}, tokens/s", own, row.get("torch tokens/s"), bound)


def train(report: Report) -> None:
    """Training ends when the time for it is over."""
    flags, launch, out = report.flags, common.REPOSITORY / "launch", report.folder / "run"
    if not flags.trains:
        report.add("train", "left out: it needs --smollm2, --train, --test and --corpus")
        return
    weights, words, steps = common.WEIGHTS, SMALL.split(), 1
    if not flags.small:
        weights, words, steps = flags.smollm2, LARGE.split(), 1_000
        words += ["--retrieval.corpus", flags.corpus, "--data.train", *flags.train, "--data.test", *flags.test]

    def exact_match(name: str, *checkpoint: object) -> str:
        command = launch / "evaluate.py", *checkpoint, "--out", report.folder / name
        if report.run("train", f"test {name}", common.run_child, *command, limit=TEST_SECONDS) is None:
            return "?"
        return f"{read_results(report.folder / name)['metrics']['exact_match']:.3f}"

    before = exact_match("before", *words, "--checkpoint", weights)
    command = launch / "tpu_train.py", *words, "--model.path", weights, "--rl.steps", steps, "--out", out
    limit = report.end - time.monotonic() - TEST_SECONDS
    report.run("train", "training", common.run_child, *command, limit=limit, stop=True)
    found = read_metrics(out / METRICS_FILE) if (out / METRICS_FILE).is_file() else []
    if not found:
        return
    timed = found[1:] or found  # the first step compiles
    phases = {name: statistics.median(step[name] for step in timed) for name in timed[-1] if name.startswith("time/")}
    report.add("train", "seconds of a step", f"{sum(phases.values()):.1f}")
    for name, seconds in phases.items():
        report.add("train", f"- {name.removeprefix('time/')}", f"{seconds:.1f}")
    after = exact_match("after", "--checkpoint", out)
    report.add("train", f"exact match before and after {len(found)} steps", f"{before} → {after}")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
