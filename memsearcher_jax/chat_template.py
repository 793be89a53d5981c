"""Conversations of any form as token ids, by the model's own chat template, and tool calls out of its replies.

A template mixes markup with what people, pages and tools wrote. Only the markup may become control tokens. So a
conversation is rendered with a mark in the place of every text, and the texts between the marks are encoded apart:
those of the template as markup, those of the messages as outside text, whose `<|im_start|>` stays plain text.

So what the template writes depends on the shape of a conversation alone: on its roles, numbers of texts and tool calls.
The conversations of a rollout share few shapes, and each is rendered once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer

from memsearcher_jax.model.hf_config import transformers
from memsearcher_jax.tokenizer import FIXED_DATE, ChatTokenizer

_MARK = re.compile("\ue000([0-9]+)\ue001")  # private characters, in the place of a text with this number
KEPT_SHAPES = 1_024  # rendered conversations that a template keeps
KEPT_MARKUP = 4_096  # texts of the template whose ids it keeps

DEFAULT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Functions that you may call, as JSON:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
    {{- 'Call one with <tool_call>{"name": its name, "arguments": an object}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""The template of a tokenizer that has none: ChatML."""


@dataclass(frozen=True)
class ToolCall:
    """A call that a reply makes. `arguments` is JSON, as the reply has it."""

    name: str
    arguments: str

    @property
    def arguments_object(self) -> Any:
        """The arguments as an object, as templates write them; the text where they are none."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation.

    `parts` are the texts of its content, which are encoded apart and follow each other without a separator.
    """

    role: str  # system, user, assistant or tool
    parts: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True)
class _MessageShape:
    """What a template sees of a message, in which the texts are marks."""

    role: str
    texts: int
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, message: ChatMessage) -> _MessageShape:
        return cls(message.role, len(message.parts), message.tool_calls)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, which renders system, user, assistant and tool messages, and tools."""

    tokenizer: ChatTokenizer

    @cached_property
    def _library(self) -> Any:
        fast = transformers().PreTrainedTokenizerFast
        if self.tokenizer.folder:
            return fast.from_pretrained(self.tokenizer.folder, local_files_only=True)
        return fast(tokenizer_object=Tokenizer.from_str(self.tokenizer.definition))

    @cached_property
    def _template(self) -> str:
        has_own = self._library.chat_template is not None
        return FIXED_DATE + (self._library.get_chat_template() if has_own else DEFAULT_TEMPLATE)

    def prompt_ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (), prefill: str = ""
    ) -> tuple[int, ...]:
        """The ids of a conversation that the model continues with a reply, which begins with `prefill`.

        Raises ValueError in one line if the template refuses the messages.
        """
        rendered = self._rendered(tuple(map(_MessageShape.of, messages)), json.dumps(tools))
        return self._encode(rendered, _texts_of(messages), prefill)

    def continuation_ids(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        new: int,
        *,
        ended: bool,
        prefill: str = "",
    ) -> tuple[int, ...]:
        """The ids that follow the last reply, before its `new` last messages, in a context that holds its ids already.

        `ended`: whether the ids of the reply end with its end token. Raises ValueError as `prompt_ids`.
        """
        earlier = messages[: -new - 1]
        # The tool calls of the reply are part of its ids: it is one text.
        reply = ChatMessage("assistant", ("",))
        conversation = (*earlier, reply, *messages[-new:])
        rendered = self._rendered(tuple(map(_MessageShape.of, conversation)), json.dumps(tools))
        _, found, rendered = rendered.rpartition(_mark(len(_texts_of(earlier))))
        if not found:
            raise ValueError("the chat template drops an earlier reply: start a new conversation")
        if ended:
            rendered = rendered.removeprefix(self.tokenizer.end_tokens[0])
        return self._encode(rendered, _texts_of(conversation), prefill)

    @cached_property
    def _rendered(self) -> Callable[[tuple[_MessageShape, ...], str], str]:
        return lru_cache(KEPT_SHAPES)(self._render)

    @cached_property
    def _markup_ids(self) -> Callable[[str], tuple[int, ...]]:
        return lru_cache(KEPT_MARKUP)(self.tokenizer.encode_markup)

    def _render(self, shapes: Sequence[_MessageShape], tools: str) -> str:
        """A conversation with a mark for each of its texts. `tools`: JSON."""
        messages = []
        texts = 0
        for shape in shapes:
            content = "".join(map(_mark, range(texts, texts + shape.texts)))
            texts += shape.texts
            fields: dict[str, Any] = {"role": shape.role, "content": content}
            if shape.tool_calls:
                calls = [{"name": call.name, "arguments": call.arguments_object} for call in shape.tool_calls]
                functions = [{"type": "function", "function": call} for call in calls]
                fields["tool_calls"] = _without_markup(functions, self.tokenizer)
            messages.append(fields)
        try:
            return self._library.apply_chat_template(
                messages,
                tools=_without_markup(json.loads(tools), self.tokenizer) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # of jinja, or of the template itself
            raise ValueError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from error

    def _encode(self, rendered: str, texts: Sequence[str], prefill: str) -> tuple[int, ...]:
        """The ids of a rendered conversation, whose marks stand for `texts`."""
        has_markup = any(token in prefill for token in self.tokenizer.special_tokens)
        if not has_markup:  # encoded with the generation prompt, as the templates of agents are
            rendered += prefill
        ids: list[int] = []
        for text, number in _split_marks(rendered):
            ids += self._markup_ids(text)
            if number is not None:
                ids += self.tokenizer.encode_untrusted(texts[number])
        if has_markup:
            ids += self.tokenizer.encode_untrusted(prefill)
        return tuple(ids)


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"


def _texts_of(messages: Sequence[ChatMessage]) -> list[str]:
    return [text for message in messages for text in message.parts]


def _split_marks(rendered: str) -> Iterator[tuple[str, int | None]]:
    """(text of the template, number of the text that follows it); the last one has none."""
    start = 0
    for mark in _MARK.finditer(rendered):
        yield rendered[start : mark.start()], int(mark[1])
        start = mark.end()
    yield rendered[start:], None


def _without_markup(value: Any, tokenizer: ChatTokenizer) -> Any:
    """JSON whose texts hold no control token and no mark, because a template prints it as its own text."""
    if isinstance(value, str):
        value = value.replace("\ue000", "").replace("\ue001", "")
        for token in tokenizer.special_tokens:
            value = value.replace(token, f"{token[:1]} {token[1:]}")
        return value
    if isinstance(value, Mapping):
        return {name: _without_markup(inner, tokenizer) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_markup(inner, tokenizer) for inner in value]
    return value


_QWEN_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def parse_tool_calls(reply: str) -> tuple[str, tuple[ToolCall, ...]]:
    """(text outside the calls, calls) of a reply, in the format of Qwen and Hermes, or in that of Llama 3.

    Qwen: `<tool_call>{"name", "arguments"}</tool_call>`, any number of them. Llama: the whole reply is
    `{"name", "parameters"}`, after an optional `<|python_tag|>`. What cannot be parsed stays text. Total.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    end = 0
    for found in _QWEN_CALL.finditer(reply):
        call = _call(found[1], "arguments")
        if call is not None:
            kept.append(reply[end : found.start()])
            calls.append(call)
            end = found.end()
    if calls:
        return "".join([*kept, reply[end:]]).strip(), tuple(calls)
    call = _call(reply.strip().removeprefix("<|python_tag|>").strip(), "parameters")
    return (reply, ()) if call is None else ("", (call,))


def _call(text: str, arguments: str) -> ToolCall | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return None
    given = fields.get(arguments, {})
    if not isinstance(given, dict):
        return None
    return ToolCall(fields["name"], json.dumps(given, ensure_ascii=False))
