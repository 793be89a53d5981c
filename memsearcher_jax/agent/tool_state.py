"""Tools with a state: a class of a user's that is made once for each trajectory, such as an environment of TRL."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

from memsearcher_jax.agent.tool_functions import OwnTools, Tool, file_tools, function_tool, gathered, unbound
from memsearcher_jax.python_files import CodeName, load_named
from memsearcher_jax.types import Problem

LIFECYCLE = ("reset", "reward", "get_reward", "close")  # public methods that are no tools


def named_tools(value: str) -> list[Tool]:
    """The tools that FILE.py or FILE.py:CLASS names. Raises ValueError or OSError in one line."""
    return class_tools(value) if CodeName.of(value).member else file_tools(value)


def class_tools(value: str) -> list[Tool]:
    """The public methods with docstrings of the class that FILE.py:NAME names.

    Raises ValueError or OSError in one line with the file and, for a method, its line.
    """
    code = CodeName.of(value)
    made_by = load_named(code.file, "agent.tools", code.member)
    if not isinstance(made_by, type):
        raise ValueError(f"agent.tools {value}: must be a class; FILE.py alone names functions")
    methods = {}
    for name, method in inspect.getmembers(made_by, inspect.isfunction):
        if not name.startswith("_") and name not in LIFECYCLE and inspect.getdoc(method):
            methods[name] = function_tool(MethodType(method, object())).schema  # without `self`
    if not methods:
        raise ValueError(f"agent.tools {value}: has no public method with a docstring, which the policy reads")
    factory = ClassFactory(made_by, methods)
    return [Tool(schema, unbound, owner=factory) for schema in methods.values()]


@dataclass(frozen=True, eq=False)
class ClassFactory:
    """Makes the objects of a class."""

    made_by: type
    schemas: Mapping[str, dict[str, Any]]
    has_lifecycle: bool = True

    @property
    def name(self) -> str:
        return self.made_by.__name__

    def make(self, problem: Problem) -> OwnTools:
        return ClassTools(self.made_by, self.schemas, problem)


@dataclass
class ClassTools(OwnTools):
    """The object of one trajectory: `Class(problem)`, or, with a method `reset`, `Class()` as TRL makes it."""

    made_by: type
    schemas: Mapping[str, dict[str, Any]]
    problem: Problem
    made: Any = field(default=None, init=False)

    @property
    def tools(self) -> dict[str, Tool]:
        return {name: Tool(schema, partial(self._answer, name)) for name, schema in self.schemas.items()}

    def _answer(self, name: str, calls: Sequence[dict[str, Any]], timeout: float) -> Sequence[Any]:
        return function_tool(getattr(self.made, name)).answer(calls, timeout)

    def start(self, timeout: float) -> str:
        """Makes the object. Returns what the policy reads after the question: the text that `reset` returns."""
        if not hasattr(self.made_by, "reset"):
            self.made = self.made_by(self.problem)
            return ""
        self.made = self.made_by()
        instruction = _result(self.made.reset(**_accepted(self.made.reset, row_of(self.problem))), timeout)
        if instruction is not None and not isinstance(instruction, str):
            raise TypeError(f"{self.made_by.__name__}.reset returned {instruction!r:.200}: it must be a text or None")
        return instruction or ""

    def reward(self, timeout: float) -> float | None:
        methods = [getattr(self.made, name, None) for name in ("reward", "get_reward")]
        method = next(filter(callable, methods), None)  # TRL's `reward` may be a number
        reward = _result(method(), timeout) if method else None
        return None if reward is None else float(reward)

    def close(self, timeout: float) -> None:
        if callable(method := getattr(self.made, "close", None)):
            _result(method(), timeout)


def row_of(problem: Problem) -> dict[str, Any]:
    """The problem as the row of a dataset, as TRL passes one to `reset`."""
    prompt = [{"role": "user", "content": problem.question}]
    answers = list(problem.golden_answers)
    row = {"id": problem.id, "question": problem.question, "golden_answers": answers, "prompt": prompt}
    return row | problem.metadata


def _accepted(method: Any, row: dict[str, Any]) -> dict[str, Any]:
    """The columns that a method takes: all of them with `**row`."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return row
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}


def _result(value: Any, timeout: float) -> Any:
    """The value, which may be awaitable."""
    (result,) = gathered([value], timeout)
    if isinstance(result, BaseException):
        raise result
    return result
