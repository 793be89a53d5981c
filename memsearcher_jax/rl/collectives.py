"""How many bytes a compiled program sends over the links between chips, counted in its text.

The text is XLA's, after all optimisations: what the compiler really does, not what was asked of it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

ITEM_BITS = {"pred": 8, "bf16": 16, **{f"{kind}{bits}": bits for kind in "sufc" for bits in (8, 16, 32, 64)}}
_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
# What a collective that was begun elsewhere, and counted there, does beside a product or ends with.
_GOES_ON = re.compile(r" async-(done|update)\(|^ *(ROOT )?%async-collective-done|calls=%async_collective_fusion")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
# What runs beside the program, as collectives do on the sparse cores of a tpu7x, ends with where it runs.
_END = re.compile(r'\}(, execution_thread="\w+")?$')
_LIMIT = re.compile(r"constant\((\d+)\)")


def link_bytes(program: str, *, loops: int) -> dict[str, float]:
    """Bytes that one device sends in one call, by kind of collective, over rings of the devices that take part.

    Of N devices, each sends (N - 1) / N of what a gather or an exchange gives and of what a scattered sum is given,
    and of a sum that all get twice that. `loops`: trips of loops whose number the text does not say, as where a batch
    may be less than full. Of a choice the larger branch counts.
    """
    bodies = dict(_computations(program))
    (entry,) = (name for name in bodies if name.startswith("ENTRY "))
    return dict(_sent(entry, bodies, loops, {}))


def _computations(program: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each computation; the first one's name begins with ENTRY."""
    name, lines = None, []
    for line in program.splitlines():
        if header := _HEADER.match(line):
            name, lines = (header[1] or "") + header[2], []
        elif _END.match(line) and name:
            yield name, lines
        else:
            lines.append(line)


def _sent(name: str, bodies: dict[str, list[str]], loops: int, known: dict[str, Counter]) -> Counter:
    if name in known:
        return known[name]
    sent: Counter = Counter()
    for line in bodies.get(name, ()):
        if own := _COLLECTIVE.search(line):
            sent[own["kind"]] += _own_bytes(own, line)
        elif " while(" in line:
            inner = _sent(_reference(line, "body"), bodies, loops, known)
            trips = _trips(bodies[_reference(line, "condition")], loops)
            sent += Counter({kind: trips * count for kind, count in inner.items()})
        elif branches := _BRANCHES.search(line):
            inner = [_sent(branch.strip().lstrip("%"), bodies, loops, known) for branch in branches[1].split(",")]
            sent += max(inner, key=Counter.total)
        elif "calls=" in line and not _GOES_ON.search(line):
            called = _reference(line, "calls")
            sent += _scattered(_sent(called, bodies, loops, known), called)
        elif " call(" in line:
            sent += _sent(_reference(line, "to_apply"), bodies, loops, known)
    known[name] = sent
    return sent


def _scattered(sent: Counter, called: str) -> Counter:
    """A sum that all get, of which each cuts its part at once, in one kernel: a scattered one."""
    if not called.startswith("all-reduce-scatter"):
        return sent
    return Counter({"reduce-scatter": sent.total() / 2})


def _reference(line: str, kind: str) -> str:
    return re.search(rf"\b{kind}=%([^\s,)]+)", line)[1]


def _trips(condition: list[str], loops: int) -> int:
    """Of a loop that counts up from 0 in ones to a constant."""
    limits = [int(limit) for line in condition for limit in _LIMIT.findall(line)]
    return limits[0] if len(limits) == 1 else loops


def _own_bytes(collective: re.Match, line: str) -> float:
    arrays = [_array_bytes(*array) for array in _ARRAY.findall(collective["shape"])]
    # What is begun has its operands in its shape too, and counters of the hardware.
    size, devices = (max(arrays) if collective["start"] else sum(arrays)), _group_size(line)
    if collective["kind"] == "collective-permute":
        return size
    if collective["kind"] == "reduce-scatter":
        return size * (devices - 1)
    return size * (devices - 1) / devices * (2 if collective["kind"] == "all-reduce" else 1)


def _array_bytes(kind: str, shape: str) -> float:
    return math.prod(int(size) for size in shape.split(",") if size) * ITEM_BITS.get(kind, 0) / 8


def _group_size(line: str) -> int:
    """Devices that take part together."""
    if lists := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return lists[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    return 1
