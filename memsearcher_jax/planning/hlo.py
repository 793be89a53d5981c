"""Counts what a compiled program does, from its optimised HLO text: loop bodies times their trip counts."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

_LOOP = re.compile(r"condition=%([^\s,)]+), body=%([^\s,)]+)")
_CALL = re.compile(r"to_apply=%([^\s,)]+)")
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

    operations: float = 0.0  # one after the other: fusions, kernels, copies, collectives; no asynchronous copies
    cycles: float = 0.0  # the compiler's estimate, without kernels and collectives


def count_work(program: str, *, unknown_trips: int) -> Work:
    """The operations and cycles of all computations that a call runs; of a conditional, those of its longest branch.

    `unknown_trips`: the trip count of loops whose text has none, such as those over a batch that may not be full.
    """
    found = _COMPUTATION.findall(program)
    computations = {name: body.splitlines() for _, name, body in found}

    @functools.cache
    def work_of(name: str) -> np.ndarray:
        total = np.zeros(2)
        for line in computations.get(name, ()):
            opcode = match[1] if (match := _OPCODE.match(line)) else ""
            if opcode == "while":
                ((condition, body),) = _LOOP.findall(line)
                limits = [int(limit) for limit in _CONSTANT.findall("\n".join(computations[condition]))]
                trips = limits[0] if len(limits) == 1 else unknown_trips  # it counts up from 0 by 1 to a constant
                total = total + trips * (work_of(body) + work_of(condition))
            elif branches := _BRANCHES.search(line):
                works = [work_of(branch.strip().lstrip("%")) for branch in branches[1].split(",")]
                total = total + max(works, key=tuple)
            elif opcode == "call":
                total = total + work_of(*_CALL.findall(line))
            elif opcode and not _FREE.fullmatch(opcode) and not _ALLOCATION.search(line):
                cycles = float(match[1]) if (match := _CYCLES.search(line)) else 0.0
                total = total + np.array([1, cycles])
        return total

    (entry,) = (name for is_entry, name, _ in found if is_entry)
    return Work(*work_of(entry).tolist())
