"""Counts what a compiled program does, from its optimised HLO text: loop bodies times their trip counts."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

ITEM_BITS = {"pred": 8, "bf16": 16, **{f"{kind}{bits}": bits for kind in "sufc" for bits in (8, 16, 32, 64)}}
_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
# Later parts of an asynchronous collective; its bytes are counted where it starts.
_CONTINUATION = re.compile(r" async-(done|update)\(|^ *(ROOT )?%async-collective-done|calls=%async_collective_fusion")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
# A tpu7x runs collectives on its sparse cores; the end of such a computation names the thread.
_END = re.compile(r'\}(, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%\S+ = .*? (?P<opcode>[a-z][\w-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"copy-start", "slice-start"}
_ALLOCATION = re.compile(r'custom_call_target="(AllocateBuffer|ZeroCrop)"')
_CONSTANT = re.compile(r"constant\((\d+)\)")


@dataclass
class Schedule:
    """The work of one device in a call of a program."""

    operations: float = 0.0
    """Operations that run one after the other: fusions, kernels, copies, collectives; an asynchronous collective counts
    once, and an asynchronous copy not at all."""
    cycles: float = 0.0
    """The compiler's estimate. It has none for kernels and collectives."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes sent to other devices, by kind of collective."""

    def add(self, other: Schedule, times: float = 1) -> None:
        self.operations += times * other.operations
        self.cycles += times * other.cycles
        for kind, count in other.sent_bytes.items():
            self.sent_bytes[kind] += times * count  # pyright: ignore[reportArgumentType]  # bytes may be fractional


def schedule(program: str, *, unknown_trips: int) -> Schedule:
    """The operations, cycles and bytes of all computations that a call runs.

    Of N participating devices each sends (N - 1) / N of the result of an all-gather or all-to-all and of the operand
    of a reduce-scatter, and twice that for an all-reduce (ring algorithms). Of a conditional the branch with most
    operations counts. `unknown_trips`: the trip count of loops whose text has none, such as those over a batch that may
    not be full.
    """
    computations = dict(_computations(program))

    @functools.cache
    def work_of(name: str) -> Schedule:
        total = Schedule()
        for line in computations.get(name, ()):
            instruction = _INSTRUCTION.match(line)
            opcode = instruction["opcode"] if instruction else ""
            if opcode == "while":
                condition = _attribute(line, "condition")
                trips = _trip_count(computations[condition], unknown_trips)
                total.add(work_of(_attribute(line, "body")), trips)
                total.add(work_of(condition), trips)
            elif branches := _BRANCHES.search(line):
                works = [work_of(branch.strip().lstrip("%")) for branch in branches[1].split(",")]
                total.add(max(works, key=lambda work: (work.operations, sum(work.sent_bytes.values()))))
            elif opcode == "call":
                total.add(work_of(_attribute(line, "to_apply")))
            elif _is_operation(opcode, line):
                cycles = _CYCLES.search(line)
                sent_bytes = Counter(_sent_bytes(line, computations))
                total.add(Schedule(1, float(cycles[1]) if cycles else 0.0, sent_bytes))
        return total

    (entry,) = (name for name in computations if name.startswith("ENTRY "))
    return work_of(entry)


def _computations(program: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each computation; the name of the entry computation begins with ENTRY."""
    name, lines = None, []
    for line in program.splitlines():
        if header := _HEADER.match(line):
            name, lines = (header[1] or "") + header[2], []
        elif _END.match(line) and name:
            yield name, lines
        else:
            lines.append(line)


def _is_operation(opcode: str, line: str) -> bool:
    """Whether the instruction takes time of its own: it does more than name or reserve memory, or end another one."""
    done = not opcode or opcode in _FREE or opcode.endswith(("-done", "-update"))
    return not done and not _ALLOCATION.search(line)


def _sent_bytes(line: str, computations: dict[str, list[str]]) -> dict[str, float]:
    """Bytes that an operation sends, by kind of collective; collectives may be fused into it."""
    if collective := _COLLECTIVE.search(line):
        return {collective["kind"]: _collective_bytes(collective, line)}
    if "calls=" not in line or _CONTINUATION.search(line):
        return {}
    called, sent = _attribute(line, "calls"), dict[str, float]()
    for inner in computations.get(called, ()):
        for kind, count in _sent_bytes(inner, computations).items():
            sent[kind] = sent.get(kind, 0) + count
    if called.startswith("all-reduce-scatter"):  # a fusion of an all-reduce with the slice of its result
        return {"reduce-scatter": sum(sent.values()) / 2}
    return sent


def _attribute(line: str, name: str) -> str:
    """The computation that an attribute of an instruction names."""
    match = re.search(rf"\b{name}=%([^\s,)]+)", line)
    if match is None:
        raise ValueError(f"no attribute {name} in the HLO instruction {line.strip()!r}")
    return match[1]


def _trip_count(condition: list[str], unknown_trips: int) -> int:
    """The trip count of a loop that counts up from 0 by 1 to a constant."""
    limits = [int(limit) for line in condition for limit in _CONSTANT.findall(line)]
    return limits[0] if len(limits) == 1 else unknown_trips


def _collective_bytes(collective: re.Match, line: str) -> float:
    sizes = [_array_bytes(*array) for array in _ARRAY.findall(collective["shape"])]
    # The shape of an asynchronous start also lists its operands and hardware counters.
    size, devices = (max(sizes) if collective["start"] else sum(sizes)), _group_size(line)
    if collective["kind"] == "collective-permute":
        return size
    if collective["kind"] == "reduce-scatter":
        return size * (devices - 1)
    return size * (devices - 1) / devices * (2 if collective["kind"] == "all-reduce" else 1)


def _array_bytes(kind: str, shape: str) -> float:
    return math.prod(int(size) for size in shape.split(",") if size) * ITEM_BITS.get(kind, 0) / 8


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
