"""Functions as tools: what a policy reads of them comes from their names, docstrings and types."""

from __future__ import annotations

import abc
import asyncio
import inspect
import json
import math
import threading
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union

from memsearcher_jax.python_files import described, load
from memsearcher_jax.types import Call, Problem

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ServerDied(ConnectionError):
    """The connection to a tool's server was lost during a call, which may be the reason."""


@dataclass(frozen=True)
class Tool:
    """A tool of a run's own.

    `answer` gets the arguments of some calls, and the seconds after which nobody waits for their results. It returns
    one result for each call, in order: a `ToolResult`, a value for `as_text`, or the error of this call.
    """

    schema: dict[str, Any]  # name, description and parameters, as JSON schema
    answer: Callable[[Sequence[dict[str, Any]], float], Sequence[Any]]
    batches: bool = False  # whether one call of `answer` may take several calls
    server: str = ""  # whose death ends the calls of all its tools; "" for a function
    owner: ToolFactory | None = None  # what makes it for each trajectory; None: all trajectories share it

    @property
    def name(self) -> str:
        return self.schema["name"]


class OwnTools(abc.ABC):
    """Tools with a state that belongs to one trajectory."""

    @property
    @abc.abstractmethod
    def tools(self) -> dict[str, Tool]:
        """Each tool under its name."""

    def start(self, timeout: float) -> str:
        """Does what precedes the first call. Returns what the policy reads after the question."""
        return ""

    def reward(self, timeout: float) -> float | None:
        """What is added to the reward of the trajectory, after its last call; None: nothing."""
        return None

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Releases what the tools hold, at the end of the trajectory."""


class ToolFactory(Protocol):
    """Makes the tools that each trajectory has of its own. `make` does no I/O."""

    @property
    def name(self) -> str: ...

    @property
    def has_lifecycle(self) -> bool:
        """Whether `start` and `reward` of what it makes do anything."""
        ...

    def make(self, problem: Problem) -> OwnTools: ...


def unbound(calls: Sequence[dict[str, Any]], timeout: float) -> Sequence[Any]:
    """Answers calls of a tool that each trajectory has of its own, where they do not say whose."""
    raise RuntimeError("the call is of no trajectory, and the tool has a state for each")


@dataclass(frozen=True)
class OwnedCall(Call):
    """A call of a tool that a trajectory has of its own."""

    own: Tool = field(compare=False, repr=False)


def file_tools(file: str) -> list[Tool]:
    """The functions in the list TOOLS of a file, or its public ones, which may be coroutine functions.

    `function.batch`, if it is set, is a function that takes the arguments of all calls that wait, as a list of
    dictionaries, and returns their results. Raises ValueError or OSError in one line with the file and the line.
    """
    if not file.endswith(".py"):
        raise ValueError(f"agent.tools {file}: is no Python file; put what is none of its values before --agent.tools")
    module = load(file, "agent.tools")
    if hasattr(module, "TOOLS"):
        functions = module.TOOLS
    else:
        public = [value for name, value in vars(module).items() if not name.startswith("_") and _is_function(value)]
        functions = [function for function in public if function.__module__ == module.__name__]
    if not isinstance(functions, list | tuple) or not all(map(_is_function, functions)):
        raise ValueError(f"agent.tools {file}: TOOLS must be a list of functions, found {functions!r:.200}")
    batches = [getattr(function, "batch", None) for function in functions]
    tools = []
    for function, batch in zip(functions, batches, strict=True):
        if function not in batches:
            tools.append(function_tool(function, batch))
    if not tools:
        raise ValueError(f"agent.tools {file}: defines no function")
    return tools


def as_text(value: Any) -> str:
    """A tool's result as the policy reads it: a text as it is, anything else as JSON, as MCP's servers write it."""
    return value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """The value in the types of JSON, which has no number that is not finite: these are null."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {member.name: _plain(getattr(value, member.name)) for member in fields(value)}
    for method in ("model_dump", "tolist"):  # of pydantic; of NumPy and JAX
        convert = getattr(value, method, None)
        if callable(convert):
            return _plain(convert())
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain(member) for key, member in value.items()}
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    if isinstance(value, Iterable) and not isinstance(value, type):
        return [_plain(member) for member in value]
    return str(value)


def _plain_key(key: Any) -> Any:
    plain = _plain(key)
    return plain if plain is None or isinstance(plain, str | int | float) else str(key)


def _is_function(value: Any) -> bool:
    return hasattr(inspect.unwrap(value), "__code__")  # also one that a cache wraps


def function_tool(function: Callable[..., Any], batch: Callable[..., Any] | None = None) -> Tool:
    """A function as a tool. Raises ValueError in one line with its file and line."""
    signature = inspect.signature(function)
    code = inspect.unwrap(function).__code__
    where = f"{code.co_filename}, line {code.co_firstlineno}: {function.__name__}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"agent.tools {where} is a generator and returns no text: name the tools in a list TOOLS")
    description = inspect.getdoc(function)
    if not description:
        raise ValueError(f"agent.tools {where} has no docstring: the policy reads it")
    properties: dict[str, Any] = {}
    required = []
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in signature.parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"{parameter} has no name in a call")
            properties[name] = _schema(hints[name])
            if parameter.default is parameter.empty:
                required.append(name)
            elif parameter.default is not None:
                properties[name]["default"] = parameter.default
        json.dumps(properties, allow_nan=False)
    except (KeyError, NameError, TypeError, ValueError) as error:
        raise ValueError(f"agent.tools {where} has a parameter without a type that JSON has: {error}") from error
    parameters = {"type": "object", "properties": properties, "required": required}

    def answer(calls: Sequence[dict[str, Any]], timeout: float) -> Sequence[Any]:
        results: list[Any] = [_wrong_arguments(signature, arguments) for arguments in calls]
        right = [index for index, error in enumerate(results) if error is None]
        if not right:
            return results
        # Copies: a call is recorded as it was made, whatever a function does with its arguments.
        copies = [deepcopy(calls[index]) for index in right]
        values = batch(copies) if batch else [function(**arguments) for arguments in copies]
        values = gathered(values, timeout)
        if len(values) != len(right):
            raise ValueError(f"{len(values)} results for {len(right)} calls")
        for index, value in zip(right, values, strict=True):
            results[index] = value
        return results

    return Tool({"name": function.__name__, "description": description, "parameters": parameters}, answer, bool(batch))


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop, in a thread, for all coroutines: a client that several calls share works in the loop of the first."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _wrong_arguments(signature: inspect.Signature, arguments: dict[str, Any]) -> TypeError | None:
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return error
    return None


def gathered(values: Any, timeout: float) -> list[Any]:
    """As `_gathered`, for a thread without an event loop."""
    if not inspect.isawaitable(values):
        values = list(values)
        if not any(map(inspect.isawaitable, values)):
            return values
    return asyncio.run_coroutine_threadsafe(_gathered(values, timeout), _event_loop()).result()


async def _gathered(values: Any, timeout: float) -> list[Any]:
    """The values, of which any, or all together, may be awaitable; the error of one that fails.

    After `timeout` seconds, when nobody waits for them, what is left is cancelled.
    """
    try:
        async with asyncio.timeout(timeout):
            if inspect.isawaitable(values):
                values = await _awaited(values)
                if isinstance(values, BaseException):
                    raise values
            return await asyncio.gather(*map(_awaited, values))
    except TimeoutError:
        raise TimeoutError(f"no answer in {timeout:g} s") from None


async def _awaited(value: Any) -> Any:
    try:
        return await value if inspect.isawaitable(value) else value
    except Exception as error:
        return error
    except (KeyboardInterrupt, SystemExit) as error:  # which would end the loop
        return RuntimeError(described(error))


def _schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises TypeError for one that JSON has not."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        schema = _schema(arguments[0])
        descriptions = [annotation for annotation in arguments[1:] if isinstance(annotation, str)]
        return schema | {"description": descriptions[0]} if descriptions else schema
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        members = [_schema(argument) for argument in arguments if argument is not NoneType]
        return members[0] if len(members) == 1 else {"anyOf": members}
    kind = origin or hint
    if kind not in JSON_TYPES:
        raise TypeError(f"{hint}")
    if kind is list and arguments:
        return {"type": "array", "items": _schema(arguments[0])}
    return {"type": JSON_TYPES[kind]}
