"""Functions as tools: what a policy reads of them comes from their names, docstrings and types."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import typing
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from memsearcher_jax.python_files import described, load

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class Tool:
    """A tool of a run's own. `answer` gets the arguments of some calls and returns one result for each, in order."""

    schema: dict[str, Any]  # name, description and parameters, as JSON schema
    answer: Callable[[Sequence[dict[str, Any]]], Sequence[Any]]
    batches: bool = False  # whether one call of `answer` may take several calls

    @property
    def name(self) -> str:
        return self.schema["name"]


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
            tools.append(_tool(function, batch))
    if not tools:
        raise ValueError(f"agent.tools {file}: defines no function")
    return tools


def _is_function(value: Any) -> bool:
    return hasattr(inspect.unwrap(value), "__code__")  # also one that a cache wraps


def _tool(function: Callable[..., Any], batch: Callable[..., Any] | None) -> Tool:
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

    def answer(calls: Sequence[dict[str, Any]]) -> Sequence[Any]:
        for arguments in calls:
            signature.bind(**arguments)  # raises TypeError for wrong ones
        calls = deepcopy(list(calls))  # which are recorded, whatever a function does with its arguments
        results = batch(calls) if batch else [function(**arguments) for arguments in calls]
        if not inspect.isawaitable(results):
            results = list(results)
            if not any(map(inspect.isawaitable, results)):
                return results
        return asyncio.run_coroutine_threadsafe(_gathered(results), _event_loop()).result()

    return Tool({"name": function.__name__, "description": description, "parameters": parameters}, answer, bool(batch))


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop, in a thread, for all coroutines: a client that several calls share works in the loop of the first."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _gathered(results: Any) -> list[Any]:
    """The results, of which any, or all together, may be awaitable."""
    try:
        results = await results if inspect.isawaitable(results) else results
        return [await result if inspect.isawaitable(result) else result for result in results]
    except (KeyboardInterrupt, SystemExit) as error:  # which would end the loop
        raise RuntimeError(described(error)) from error


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
