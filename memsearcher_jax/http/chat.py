"""OpenAI's chat completions on the wire: requests, responses, chunks of a stream, errors.

The service of a trained agent and the endpoint of a rollout share it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from memsearcher_jax.http.server import Count

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error", 504: "timeout_error"}

UNSUPPORTED = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "echo",
    "frequency_penalty",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "logit_bias",
    "logits_processors",
    "logprobs",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "prompt_logprobs",
    "reasoning_effort",
    "stop_token_ids",
    "structured_outputs",
    "top_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
    "verbosity",
)
"""Parameters of OpenAI's and vLLM's that would change the reply. Values like 0, false and "" are accepted."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "n": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "top_k": (-1,),
}
"""Further such parameters, with the values that are accepted too, because they change nothing."""


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _parts(content: Any) -> Any:
    """The content of a message as a list of parts, in which OpenAI's API also accepts a string or null."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        return []
    return content


class CalledFunction(BaseModel):
    name: str
    arguments: str = "{}"


class MessageToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)] = []
    tool_calls: list[MessageToolCall] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)  # as vLLM and llama.cpp join them


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """What both endpoints read; other fields are in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def unsupported_parameter(
    parameters: Mapping[str, Any],
    refused: Sequence[str] = UNSUPPORTED,
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES,
) -> str:
    """The name of a parameter that would change the reply; "" if there is none."""
    for name in (*refused, *neutral):
        value = parameters.get(name)
        if value and value not in neutral.get(name, ()):
            return name
    return ""


def error_body(status: int, reason: str, param: str | None = None, code: str = "") -> dict[str, Any]:
    """An error in OpenAI's format."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": reason, "type": kind, "param": param, "code": code or str(status)}}


def usage_body(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def head_of(model: str) -> dict[str, Any]:
    """What a response and all its chunks begin with."""
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}


def completion_body(
    head: Mapping[str, Any], message: Mapping[str, Any], finish_reason: str, usage: Mapping[str, int]
) -> dict[str, Any]:
    """A whole response."""
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}


def chunk_event(head: Mapping[str, Any], delta: Mapping[str, Any], finish_reason: str | None = None) -> str:
    """A chunk of a stream, as a server-sent event."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return server_sent_event({**head, "object": "chat.completion.chunk", "choices": [choice]})


def usage_event(head: Mapping[str, Any], usage: Mapping[str, int]) -> str:
    """The chunk of a stream that has the usage."""
    return server_sent_event({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})


def server_sent_event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


STREAM_END = "data: [DONE]\n\n"
