"""Between text and token ids: agents work with text, the sampler and the trainer with ids.

Two encoders share one vocabulary. Templates may hold chat markup; outside text (questions, memories, passages, tool
calls) is encoded with special tokens disabled, so that a page that contains `<|im_start|>assistant` stays plain text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from memsearcher_jax.types import Completion, FinishReason, Prompt, TextSpan

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class ChatTokenizer:
    """A ChatML tokenizer. It is also the `TokenCounter` of the workflows' budgets."""

    definition: str  # the text of tokenizer.json
    folder: str = ""  # its source, whose files exports copy

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Reads `tokenizer.json`. Raises FileNotFoundError or ValueError in one line."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}: set --model.tokenizer to a folder that has one")
        tokenizer = cls(file.read_text(encoding="utf-8"), str(folder))
        tokenizer.check()
        return tokenizer

    def check(self) -> None:
        """Raises ValueError unless this is a tokenizer with the three special tokens of ChatML."""
        try:
            tokenizer = self._template
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise ValueError(f"{self.folder}/tokenizer.json is not a tokenizer: {error}") from error
        for token in (IM_START, IM_END, END_OF_TEXT):
            if tokenizer.token_to_id(token) is None:
                raise ValueError(f"the tokenizer in {self.folder} has no {token}: it is not a ChatML tokenizer")

    @cached_property
    def _template(self) -> Tokenizer:
        return Tokenizer.from_str(self.definition)

    @cached_property
    def _outside(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _specials(self) -> dict[int, str]:
        return {id: token.content for id, token in self._template.get_added_tokens_decoder().items() if token.special}

    @property
    def vocab_size(self) -> int:
        """Ids in use; a model's table may be larger."""
        return self._template.get_vocab_size(with_added_tokens=True)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: end of turn, end of text."""
        return self._id(IM_END), self._id(END_OF_TEXT)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens after which sampling stops: the end tokens, and the start of a turn."""
        return (*self.end_ids, self._id(IM_START))

    def _id(self, token: str) -> int:
        id = self._template.token_to_id(token)
        assert id is not None, "check() demands the tokens of ChatML"
        return id

    def encode_trusted(self, text: str) -> tuple[int, ...]:
        """Ids of trusted text; chat markup becomes control tokens."""
        return tuple(self._template.encode(text, add_special_tokens=False).ids)

    def encode_untrusted(self, text: str) -> tuple[int, ...]:
        """Ids of outside text; chat markup stays text."""
        return tuple(self._outside.encode(text, add_special_tokens=False).ids)

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary writes it, with spaces and other bytes as letters."""
        return self._template.id_to_token(id)

    def count(self, text: str) -> int:
        """Tokens of outside text."""
        return len(self.encode_untrusted(text))

    def clip(self, text: str, limit: int) -> str:
        """The longest prefix of outside text, at a token boundary, that encodes to at most `limit` tokens."""
        encoding = self._outside.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= limit:
            return text
        kept = limit
        # A prefix may encode to more tokens than the full text had for it, because its end merges differently.
        while kept > 0:
            clipped = text[: encoding.offsets[kept - 1][1]]
            if self.count(clipped) <= limit:
                return clipped
            kept -= 1
        return ""

    def prompt(self, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
        """The ids of each segment, encoded apart: training and evaluation see the same ids."""
        return tuple(map(self._encode, prompt.segments))

    def encode_spans(self, spans: Sequence[TextSpan]) -> tuple[int, ...]:
        """The ids that extend a context."""
        return tuple(id for span in spans for id in self._encode(span))

    def _encode(self, span: TextSpan) -> tuple[int, ...]:
        return self.encode_trusted(span.text) if span.trusted else self.encode_untrusted(span.text)

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
        turn_ends, text_ends, turn_opens = self.stop_ids
        finish = {turn_ends: FinishReason.STOP, text_ends: FinishReason.STOP, turn_opens: FinishReason.FORGED_TURN}.get(
            ids[-1], FinishReason.LENGTH
        )
        kept = ids if finish is FinishReason.LENGTH else ids[:-1]
        return Completion(self._template.decode(list(kept), skip_special_tokens=False), finish)

    def decode_with_offsets(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the ids, and for each id where it begins and ends in the text.

        A token that ends inside a character ends after its replacement character.
        """
        text, offsets = "", []
        for count in range(1, len(ids) + 1):
            begun, text = len(text), self._template.decode(list(ids[:count]), skip_special_tokens=False)
            offsets.append((begun, len(text)))
        return text, offsets

    def transcript(self, ids: Sequence[int]) -> str:
        """A context as ChatML text in which only special tokens read as markup.

        Plain decoding would turn a page's text `<|im_start|>` into the markup that it imitates, and deceive a parser of
        the transcript where the model was not deceived. Such text is written as `< |im_start|>`.
        """
        markup = re.compile("|".join(re.escape(token) for token in self._specials.values()))
        shown, run = [], []
        for id in (*ids, None):
            if id is not None and id not in self._specials:
                run.append(id)
                continue
            text = self._template.decode(run, skip_special_tokens=False)
            shown.append(markup.sub(lambda match: match[0][:1] + " " + match[0][1:], text))
            run = []
            if id is not None:
                shown.append(self._specials[id])
        return "".join(shown)
