"""Counts what a compiled program does, from its optimised HLO text: loop bodies times their trip counts."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import numpy as np

ITEM_BITS = {"pred": 8, "bf16": 16, **{f"{kind}{bits}": bits for kind in "sufc" for bits in (8, 16, 32, 64)}}
_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
# Later parts of an asynchronous collective; its bytes are counted where it starts.
_CONTINUATION = re.compile(r" async-(done|update)\(|^ *(ROOT )?%async-collective-done|calls=%async_collective_fusion")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# A tpu7x runs collectives on its sparse cores; the end of such a computation names the thread.
_COMPUTATION = re.compile(
    r'^(ENTRY )?%(\S+) \([^\n]*\{\n(.*?)^\}(?:, execution_thread="\w+")?$', re.MULTILINE | re.DOTALL
)
_OPCODE = re.compile(r"^ *(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Instructions that only name or reserve memory, or end another one, take no time of their own.
_FREE = re.compile(
    "(parameter|constant|tuple|get-tuple-element|bitcast|after-all|partition-id|replica-id|copy-start|slice-start)"
    r"|.*-(done|update)"
)
_ALLOCATION = re.compile(r'custom_call_target="(AllocateBuffer|ZeroCrop)"')
_CONSTANT = re.compile(r"constant\((\d+)\)")


@dataclass(frozen=True)
class Work:
    """The work of one device in a call of a program."""

    operations: float = 0.0
    """Operations that run one after the other: fusions, kernels, copies, collectives; an asynchronous collective counts
    once, and an asynchronous copy not at all."""
    cycles: float = 0.0
    """The compiler's estimate, without kernels and collectives; 0: unknown."""
    sent_bytes: float = 0.0
    """Bytes sent to other devices by collectives."""


def count_work(program: str, *, unknown_trips: int) -> Work:
    """The operations, cycles and bytes of all computations that a call runs.

    Of N participating devices each sends (N - 1) / N of the result of an all-gather or all-to-all and of the operand
    of a reduce-scatter, and twice that for an all-reduce (ring algorithms). Of a conditional the branch with most
    operations counts. `unknown_trips`: the trip count of loops whose text has none, such as those over a batch that may
    not be full.
    """
    found = _COMPUTATION.findall(program)
    computations = {name: body.splitlines() for _, name, body in found}

    @functools.cache
    def work_of(name: str) -> np.ndarray:
        total = np.zeros(3)
        for line in computations.get(name, ()):
            opcode = match[1] if (match := _OPCODE.match(line)) else ""
            if opcode == "while":
                condition = _attribute(line, "condition")
                limits = [int(limit) for one in computations[condition] for limit in _CONSTANT.findall(one)]
                trips = limits[0] if len(limits) == 1 else unknown_trips  # it counts up from 0 by 1 to a constant
                total = total + trips * (work_of(_attribute(line, "body")) + work_of(condition))
            elif branches := _BRANCHES.search(line):
                works = [work_of(branch.strip().lstrip("%")) for branch in branches[1].split(",")]
                total = total + max(works, key=lambda work: (work[0], work[2]))
            elif opcode == "call":
                total = total + work_of(_attribute(line, "to_apply"))
            elif opcode and not _FREE.fullmatch(opcode) and not _ALLOCATION.search(line):
                cycles = float(match[1]) if (match := _CYCLES.search(line)) else 0.0
                total = total + np.array([1, cycles, _sent_bytes(line, computations)])
        return total

    (entry,) = (name for is_entry, name, _ in found if is_entry)
    return Work(*work_of(entry).tolist())


def _sent_bytes(line: str, computations: dict[str, list[str]]) -> float:
    """Bytes that an operation sends; collectives may be fused into it."""
    if collective := _COLLECTIVE.search(line):
        return _collective_bytes(collective, line)
    if "calls=" not in line or _CONTINUATION.search(line):
        return 0.0
    called = _attribute(line, "calls")
    sent = sum(_sent_bytes(inner, computations) for inner in computations.get(called, ()))
    # A fusion of an all-reduce with the slice of its result is a reduce-scatter.
    return sent / 2 if called.startswith("all-reduce-scatter") else sent


def _attribute(line: str, name: str) -> str:
    """The computation that an attribute of an instruction names."""
    match = re.search(rf"\b{name}=%([^\s,)]+)", line)
    if match is None:
        raise ValueError(f"no attribute {name} in the HLO instruction {line.strip()!r}")
    return match[1]


def _collective_bytes(collective: re.Match, line: str) -> float:
    sizes = [
        math.prod(int(length) for length in shape.split(",") if length) * ITEM_BITS.get(kind, 0) / 8
        for kind, shape in _ARRAY.findall(collective["shape"])
    ]
    # The shape of an asynchronous start also lists its operands and hardware counters.
    size, devices = (max(sizes) if collective["start"] else sum(sizes)), _group_size(line)
    if collective["kind"] == "collective-permute":
        return size
    if collective["kind"] == "reduce-scatter":
        return size * (devices - 1)
    return size * (devices - 1) / devices * (2 if collective["kind"] == "all-reduce" else 1)


def _group_size(line: str) -> int:
    """Devices that take part in a collective, from any of the three notations."""
    if lists := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return lists[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    return 1
