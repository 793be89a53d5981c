"""What commands need before they start: weights, questions, passages, libraries, an accelerator. No JAX here."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib import metadata
from pathlib import Path

from memsearcher_jax.config import RunConfig, agent_of, differences
from memsearcher_jax.data.problems import ProblemSplits
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.runs.run_dir import INDEX, is_run, read_run_config

TPU_VM_VARIABLES = {"TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"}
_LIBTPU = re.compile(r"libtpu\s*\(?(==|>=|~=)([\d.]+)")  # in the metadata of jax, for its extra `tpu`
ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg", "kfd")  # devices of TPUs, of newer TPUs, and of GPUs


def reusable_index(config: RunConfig) -> Path | None:
    """The index in the run directory that the weights come from, if the search settings are unchanged."""
    folder = Path(config.model.path)
    if not config.model.path or not is_run(folder) or not (folder / INDEX).exists():
        return None
    changed = [name for name, _, _ in differences(read_run_config(folder), config)]
    return None if any(name.startswith(("retrieval.", "data.encyclopedia.")) for name in changed) else folder / INDEX


def load_encoder(config: RetrievalConfig) -> TextEncoder:
    """The encoder in `config.encoder`. JAX takes seconds to import; --help, errors and hashed words do not need it."""
    from memsearcher_jax.encoders import text_encoder

    return text_encoder.load(config)


def require_32_bits() -> None:
    """Raises ValueError where the environment makes JAX compute in 64 bits, which no program here is written for."""
    if os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "on", "t", "true", "y", "yes"):
        raise ValueError("JAX_ENABLE_X64 is set, and everything here computes in at most 32 bits: unset it")


def require_checkpoint(config: RunConfig, alternative: str = "") -> None:
    """For commands that are pointless with random weights. Raises ValueError."""
    if not config.model.path:
        raise ValueError(f"--checkpoint is missing: give a run directory or a Hugging Face directory{alternative}")


def require_inputs(config: RunConfig, *, questions: str = "", accelerator: bool = False) -> None:
    """Raises ValueError that names everything that the preset of a published model still needs.

    `questions`: the setting that names them, if the command needs any. `accelerator`: whether it needs one here.
    """
    retrieval = config.retrieval
    searches = agent_of(config).searches
    has_passages = retrieval.index or retrieval.corpus or retrieval.url
    encodes = searches and not retrieval.url and retrieval.method != "bm25"
    needs = {
        "--model.path DIR (its weights)": not config.model.path,
        f"--{questions} FILE (questions)": questions and config.data.is_synthetic,
        "--retrieval.index DIR or --retrieval.corpus FILE (passages)": searches and not has_passages,
        f"--retrieval.encoder DIR (of E5, or {HASHING})": encodes and not retrieval.encoder,
        "an accelerator (a TPU or a GPU)": accelerator and not has_accelerator(),
    }
    missing = [name for name, is_missing in needs.items() if is_missing]
    if config.published_model and missing:
        raise ValueError(
            f"a preset of a published model needs {', '.join(missing)}; --smoke_test starts with random weights, "
            "synthetic data and hashed words instead, on any device"
        )


def require_planned_completers(config: RunConfig) -> None:
    """Raises ValueError for a run with frozen answerers or judges on its devices, which plans do not count."""
    if agent_of(config).needs_completers and "initial_policy" in (config.answerer.backend, config.judge.backend):
        raise ValueError("frozen answerers and judges are not planned: set their backend to openai or none")


def require_extra(extra: str, *libraries: str, needed_by: str = "") -> None:
    """Raises ValueError if a library of this extra is not installed. The message starts with `needed_by`."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{needed_by}{missing[0]} is not installed: pip install 'memsearcher_jax[{extra}]'")


def has_accelerator() -> bool:
    """Without JAX, which can look for a TPU only after all hosts have joined. A platform chosen by name is believed."""
    if platform := os.environ.get("JAX_PLATFORMS", "").partition(",")[0]:
        return platform != "cpu"
    return any(any(Path("/dev").glob(device)) for device in ACCELERATORS)


def libtpu_fault() -> str:
    """A line about a libtpu that is older than JAX requires, or that TPU_LIBRARY_PATH names; "" for none.

    The images of notebooks bring libraries of their own, with which kernels fail while they are compiled.
    """
    matches = [_LIBTPU.match(line) for line in metadata.requires("jax") or ()]
    required = next(filter(None, matches), None)
    package = importlib.util.find_spec("libtpu")
    if required is None or package is None:
        return ""
    wanted = f"jax {metadata.version('jax')} requires libtpu {required[1]}{required[2]}"
    library = os.environ.get("TPU_LIBRARY_PATH", "")
    if library and str(Path(library).parent) not in (package.submodule_search_locations or []):
        return f"TPU_LIBRARY_PATH is {library}, and {wanted}: unset it, so that the installed libtpu is used"
    installed = metadata.version("libtpu")
    least = _numbers(required[2])
    if _numbers(installed)[: len(least)] < least:
        return f"libtpu {installed} is too old, {wanted}: pip install -U 'jax[tpu]' in a fresh virtual environment"
    return ""


def has_tpu() -> bool:
    """Whether this machine is a TPU VM, or has a device of a TPU, without JAX."""
    devices = (device for device in ACCELERATORS if device.startswith(("accel", "vfio")))
    return bool(TPU_VM_VARIABLES & os.environ.keys()) or any(any(Path("/dev").glob(device)) for device in devices)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def print_skipped(problems: ProblemSplits) -> None:
    """Prints to stderr how many rows of the question files were skipped or left out, and why."""
    if problems.skipped:
        print(f"skipped {len(problems.skipped)} malformed rows; the first: {problems.skipped[0]}", file=sys.stderr)
    for message in problems.left_out:
        print(message, file=sys.stderr)
