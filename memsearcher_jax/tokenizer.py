"""Between text and token ids: agents work with ChatML, the sampler and the trainer with ids of the model's own markup.

Two encoders share one vocabulary. Templates may hold chat markup; outside text (questions, memories, passages, tool
calls) is encoded with special tokens disabled, so that a page that contains `<|im_start|>assistant` stays plain text.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, models

from memsearcher_jax.agent.prompts import ASSISTANT, END, SYSTEM, USER
from memsearcher_jax.agent.protocol import THINK
from memsearcher_jax.model.hf_config import read_json, transformers
from memsearcher_jax.types import Completion, FinishReason, Prompt, TextSpan

CHATML_TOKENS = IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = (SYSTEM, END + USER, END + ASSISTANT, "\n" + USER)  # the last one after the end token of a reply
"""What opens each message of a conversation. Trusted text and transcripts are written with it, for every model."""

FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"
"""Instead of today's date, which some templates write: a resumed run must write what it wrote."""


CACHED_TOKENS = 1 << 21
"""Tokens of the texts whose ids a tokenizer keeps: those of two thousand trajectories, in some 20 MB."""


WORD_PATTERNS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""How Qwen2, Qwen2.5 and Qwen3 split a text before its parts are encoded, and how Llama 3 does.

No match has a letter of ASCII before another character of ASCII, and whether one ends there depends on nothing after
it. So a text has the ids of its words, one after another. The same is true of GPT-2's pattern (`ByteLevel`).
"""

KEPT_WORDS = 1 << 16
"""Words whose ids a tokenizer keeps, in some 15 MB."""

LONGEST_KEPT_WORD = 32
"""Characters. Text without letters of ASCII is one long word, which no other text is likely to have."""

_WORD = re.compile(r"(?:[^A-Za-z]*+[A-Za-z]++(?=[^\x00-\x7f]))*+[^A-Za-z]*+[A-Za-z]*+")
"""What precedes letters of ASCII, and these, up to another character of ASCII."""


class _Words:
    """Encodes outside text word by word, and a word once: five to ten times as fast as the text as a whole."""

    def __init__(self, tokenizer: Tokenizer, indivisible: Sequence[str]):
        """`indivisible`: tokens that outside text may hold and that a word may not split."""
        self._tokenizer = tokenizer
        self._indivisible = re.compile("|".join(map(re.escape, indivisible)) or r"(?!)")
        self._ids: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Words | None:
        """None for a tokenizer that may encode a text otherwise than its words."""
        texts = [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        if not (_divides_at_words(tokenizer) and all(map(str.isascii, texts))):
            return None
        return cls(tokenizer, texts)

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text; None if it holds an indivisible token."""
        if self._indivisible.search(text):
            return None
        kept = self._ids
        if len(kept) >= KEPT_WORDS:
            kept = self._ids = {}  # other threads may still read the old one
        ids: list[int] = []
        for word in _WORD.findall(text):
            known = kept.get(word)
            if known is None:
                known = self._tokenizer.encode(word, add_special_tokens=False).ids
                if len(word) <= LONGEST_KEPT_WORD:
                    kept[word] = known
            ids += known
        return ids


def _divides_at_words(tokenizer: Tokenizer) -> bool:
    """Whether normalizer, pre-tokenizer and model encode the words of `_WORD` apart from each other."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    normalizer = tokenizer.normalizer
    if normalizer and json.loads(normalizer.__getstate__())["type"] != "NFC":  # composes nothing with ASCII after it
        return False
    if not tokenizer.pre_tokenizer:
        return False
    last = json.loads(tokenizer.pre_tokenizer.__getstate__())
    first: list[dict[str, Any]] = []
    if last["type"] == "Sequence":
        *first, last = last["pretokenizers"]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return all(step["type"] == "Digits" for step in first)
    return any(
        first == [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
        for pattern in WORD_PATTERNS
    )


class _Encoder:
    """Encodes texts, and keeps the ids of those that were used last: a workflow counts, clips and shows one text."""

    def __init__(self, tokenizer: Tokenizer, prepare: Callable[[str], str] = str, words: _Words | None = None):
        """`prepare` changes a text before it is encoded. `words`: encodes texts faster, with the same ids."""
        self._tokenizer = tokenizer
        self._prepare = prepare
        self._words = words
        self._ids: dict[str, np.ndarray] = {}  # the longest unused first
        self._tokens = 0  # of all texts
        self._lock = threading.Lock()  # a service counts questions in other threads

    def ids(self, text: str) -> np.ndarray:
        """The ids of a text, int32 [T], which is not to be changed."""
        ids_T = self._cached(text)
        if ids_T is not None:
            return ids_T
        ids = self._words.encode(text) if self._words else None
        return self._keep(text, self.encode(text).ids if ids is None else ids)

    def encode(self, text: str) -> Encoding:
        """The ids of a text with their offsets, which are not kept."""
        return self._tokenizer.encode(self._prepare(text), add_special_tokens=False)

    def _cached(self, text: str) -> np.ndarray | None:
        with self._lock:
            ids_T = self._ids.pop(text, None)
            if ids_T is not None:
                self._ids[text] = ids_T
        return ids_T

    def _keep(self, text: str, ids: Sequence[int]) -> np.ndarray:
        ids_T = np.array(ids, np.int32)
        ids_T.flags.writeable = False
        with self._lock:
            if text not in self._ids:
                self._ids[text] = ids_T
                self._tokens += _size(ids_T)
            while self._tokens > CACHED_TOKENS:
                oldest = next(iter(self._ids))
                self._tokens -= _size(self._ids.pop(oldest))
        return ids_T

    def prefix(self, text: str, limit: int) -> str:
        """The longest prefix of a text, at a token boundary, that encodes to at most `limit` tokens."""
        if len(self.ids(text)) <= limit:
            return text
        encoding = self.encode(text)  # for its offsets
        # A prefix may encode to more tokens than the full text had for it, because its end merges differently.
        for kept in range(limit, 0, -1):
            clipped = text[: encoding.offsets[kept - 1][1]]
            if len(self.ids(clipped)) <= limit:
                return clipped
        return ""


def _size(ids_T: np.ndarray) -> int:
    """What a text counts in `CACHED_TOKENS`; an empty one needs memory, too."""
    return len(ids_T) + 8


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's tokenizer and chat template. It is also the `TokenCounter` of the workflows' budgets."""

    definition: str  # the text of tokenizer.json
    folder: str = ""  # its source, whose files exports copy
    markup: tuple[str, ...] = CHATML  # what the chat template writes in place of it
    end_tokens: tuple[str, ...] = (IM_END, END_OF_TEXT)  # that end a generation, first the one that ends a reply

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Reads `tokenizer.json`, chat template, special tokens and the end tokens of `generation_config.json`.

        A tokenizer without a chat template is taken for ChatML. Raises FileNotFoundError or ValueError in one line.
        """
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}: set --model.tokenizer to a folder that has one")
        # AutoTokenizer would replace the pre-tokenizer of tokenizer.json by the family's.
        try:
            library = transformers().PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            ends = _end_ids(Path(folder) / "generation_config.json")
        except Exception as error:  # the libraries raise bare Exception for a file that they cannot read
            raise ValueError(f"the tokenizer in {folder} cannot be read: {' '.join(str(error).split())}") from error
        rendered = _render(library, folder) if library.chat_template else [*CHATML[:3], IM_END + CHATML[3]]
        _declare_special(library.backend_tokenizer, "".join(rendered))
        tokenizer = cls(library.backend_tokenizer.to_str(), str(folder))
        if unknown := [id for id in ends if id not in tokenizer._specials]:
            raise ValueError(
                f"{folder}: generation_config.json ends replies with {unknown[0]}, which is no special token"
            )
        known = tokenizer._specials.values()
        end = next((token for token in known if rendered[-1].startswith(token)), "")
        markup = (*rendered[:-1], rendered[-1].removeprefix(end))
        names = (end, library.eos_token, END_OF_TEXT, *map(tokenizer.id_to_token, ends))
        end_tokens = tuple(name for name in dict.fromkeys(names) if name in known)
        tokenizer = replace(tokenizer, markup=markup, end_tokens=end_tokens)
        tokenizer._check(end)
        return tokenizer

    def _check(self, end: str) -> None:
        """Raises ValueError for a folder whose markup outside text could hold. `end`: the token that ends a reply."""
        folder = self.folder
        # transformers reads config.json where there is no generation_config.json; a run folder keeps neither.
        used = {id for id, token in self._specials.items() if token in self.end_tokens}
        unused = set(_end_ids(Path(folder) / "config.json")) - used
        if unused and not (Path(folder) / "generation_config.json").is_file():
            raise ValueError(
                f"{folder}: config.json ends replies with token {min(unused)}, and the files of the tokenizer do not: "
                "add a generation_config.json that does"
            )
        # A page could hold markup without one, which transcripts would show as a turn.
        known = self._specials.values()
        has_special = [any(token in text for token in known) for text in self.markup]
        if end not in known or not all(has_special):
            raise ValueError(
                f"the tokenizer in {folder} has no {IM_START} and {IM_END}, nor a chat template with special tokens "
                "between messages: choose the one of a chat model"
            )
        conversation = "content".join((*CHATML[:3], IM_END + CHATML[3]))
        if self.transcript(self.encode_trusted(conversation)) != conversation:  # which rewards are read from
            raise ValueError(
                f"the tokenizer in {folder} alters white space at markup: set lstrip, rstrip, add_prefix_space to false"
            )

    @cached_property
    def _template(self) -> Tokenizer:
        return _parse(self.definition, special_tokens_are_text=False)

    @cached_property
    def _outside(self) -> Tokenizer:
        return _parse(self.definition, special_tokens_are_text=True)

    @cached_property
    def _specials(self) -> dict[int, str]:
        return {id: token.content for id, token in self._template.get_added_tokens_decoder().items() if token.special}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's table may be larger."""
        return max(self._template.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: first the end of a reply."""
        return tuple(map(self._id, self.end_tokens))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens after which sampling stops: the end tokens, and the start of a turn."""
        return (*self.end_ids, self._id(self._starts[0]))

    @property
    def extra_markup_tokens(self) -> int:
        """Tokens by which the markup of a conversation exceeds ChatML's text, as which budgets count it."""
        return max(0, len(self.encode_trusted("".join(CHATML))) - self.count("".join(CHATML)))

    @cached_property
    def _starts(self) -> list[str]:
        """The special tokens that open a user message, in the order of its text."""
        specials = [token for token in self._specials.values() if token in self.markup[-1]]
        return sorted(specials, key=self.markup[-1].index)

    @cached_property
    def _own_markup(self) -> dict[str, str]:
        return dict(zip((*CHATML, IM_END), (*self.markup, self.end_tokens[0]), strict=True))

    @cached_property
    def _chatml(self) -> dict[str, str]:
        # Some templates end no system message: its user message opens as all do.
        own = {own: chatml for chatml, own in reversed(self._own_markup.items())}
        return own | {self.end_tokens[0] + self.markup[-1]: IM_END + CHATML[-1]}

    def _id(self, token: str) -> int:
        id = self._template.token_to_id(token)
        assert id is not None, "load() demands special tokens"
        return id

    @cached_property
    def _trusted(self) -> _Encoder:
        return _Encoder(self._template, lambda text: _substitute(text, self._own_markup))

    @cached_property
    def _untrusted(self) -> _Encoder:
        return _Encoder(self._outside, words=_Words.of(self._outside))

    def encode_trusted(self, text: str) -> tuple[int, ...]:
        """Ids of trusted text; ChatML becomes the markup and the control tokens of the model."""
        return tuple(self._trusted.ids(text).tolist())

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """Ids of text that a chat template of the model rendered, with its control tokens."""
        return tuple(self._template.encode(text, add_special_tokens=False).ids)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The control tokens as text."""
        return tuple(self._specials.values())

    def encode_untrusted(self, text: str) -> tuple[int, ...]:
        """Ids of outside text; chat markup stays text."""
        return tuple(self._untrusted.ids(text).tolist())

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary writes it, with spaces and other bytes as letters."""
        return self._template.id_to_token(id)

    def count(self, text: str) -> int:
        """Tokens of outside text."""
        return len(self._untrusted.ids(text))

    def clip(self, text: str, limit: int) -> str:
        """The longest prefix of outside text, at a token boundary, that encodes to at most `limit` tokens."""
        return self._untrusted.prefix(text, limit)

    def prompt(self, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
        """The ids of each segment, encoded apart: training and evaluation see the same ids."""
        return tuple(tuple(self._ids_of(segment).tolist()) for segment in prompt.segments)

    def encode_spans(self, spans: Sequence[TextSpan]) -> tuple[int, ...]:
        """The ids that extend a context."""
        return tuple(self.span_ids(spans).tolist())

    def span_ids(self, spans: Sequence[TextSpan]) -> np.ndarray:
        """The ids of a prompt's segments, or of the spans that extend a context, in one array: int32 [T]."""
        return np.concatenate([np.zeros(0, np.int32), *map(self._ids_of, spans)])

    def _ids_of(self, span: TextSpan) -> np.ndarray:
        return (self._trusted if span.trusted else self._untrusted).ids(span.text)

    def find_stop(self, pattern: str, ids: Sequence[int]) -> int | None:
        """The length of the shortest prefix of `ids` whose text matches the regular expression; None if none does.

        `pattern` must match every continuation of a text that it matches: without `$` or look-ahead.
        """

        def matches(count: int) -> bool:
            text = self._template.decode(list(ids[:count]), skip_special_tokens=False)
            return re.search(pattern, text, re.DOTALL) is not None

        return bisect_left(range(len(ids) + 1), True, key=matches) if matches(len(ids)) else None

    def completion(self, ids: Sequence[int], *, found_stop: bool = False) -> Completion:
        """The completion of one generation, from its ids. `found_stop`: it ended where `find_stop` said."""
        if found_stop:
            return Completion(self._template.decode(list(ids), skip_special_tokens=False))
        finish = FinishReason.LENGTH
        if ids[-1] in self.stop_ids:
            finish = FinishReason.STOP if ids[-1] in self.end_ids else FinishReason.FORGED_TURN
        kept = ids if finish is FinishReason.LENGTH else ids[:-1]
        return Completion(self._template.decode(list(kept), skip_special_tokens=False), finish)

    def transcript(self, ids: Sequence[int] | np.ndarray) -> str:
        """A context as ChatML text in which only special tokens read as markup.

        Plain decoding would turn a page's text `<|im_start|>` into the markup that it imitates, and deceive a parser of
        the transcript where the model was not deceived. Such text is written as `< |im_start|>`.
        """
        markup = re.compile("|".join(map(re.escape, {*self._specials.values(), *CHATML_TOKENS})))
        shown = []
        for special, run in groupby(np.asarray(ids).tolist(), self._specials.__contains__):
            if special:
                shown += [self._specials[id] for id in run]
            else:
                text = self._template.decode(list(run), skip_special_tokens=False)
                shown.append(markup.sub(lambda match: match[0][:1] + " " + match[0][1:], text))
        return _substitute("".join(shown), self._chatml)


def _render(library: Any, folder: str | Path) -> list[str]:
    """The markup of the chat template: what it writes before the contents of CHATML's messages."""
    messages = [{"role": role, "content": "CONTENT"} for role in ("system", "user", "assistant", "user")]
    try:
        template = FIXED_DATE + library.get_chat_template()
        text = library.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
        system, user, _, after_reply, assistant = text.split("CONTENT")
    except Exception as error:  # of jinja, or of the template itself
        reason = " ".join(str(error).split())
        raise ValueError(f"the chat template in {folder} renders no system message and turns: {reason}") from error
    # Templates of reasoning models open a thought in the generation prompt; agents open theirs, where they want one.
    assistant = re.sub(rf"{re.escape(THINK)}\s*$", "", assistant)
    if THINK in assistant:
        raise ValueError(f"the chat template in {folder} ends a thought before each reply: choose one that does not")
    return [system, user, assistant, after_reply]


def _declare_special(tokenizer: Tokenizer, markup: str) -> None:
    """Makes the added tokens of the markup special.

    Not every folder declares it, and outside text must not become markup.
    """
    # With the tokens that tokenizer_config.json and its neighbours add to tokenizer.json.
    added = tokenizer.get_added_tokens_decoder().values()
    own = [token for token in added if not token.content.isspace() and token.content in markup]
    for token in own:
        token.special = True
    tokenizer.add_special_tokens(own)


def _end_ids(file: Path) -> list[int]:
    """`eos_token_id` of a file, if there is one."""
    ids = read_json(file).get("eos_token_id") if file.is_file() else None
    return [id for id in (ids if isinstance(ids, list) else [ids]) if id is not None]


@lru_cache(maxsize=4)  # half a second for a tokenizer of 150,000 tokens
def _parse(definition: str, *, special_tokens_are_text: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(definition)
    # Published files carry both; transformers ignores them unless it is called with them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_tokens_are_text
    return tokenizer


def _substitute(text: str, replacements: dict[str, str]) -> str:
    pattern = "|".join(map(re.escape, sorted(replacements, key=len, reverse=True)))
    return re.sub(pattern, lambda match: replacements[match[0]], text)
