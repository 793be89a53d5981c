"""The border between text and ids. Text lives left of this file, arrays right of it.

Two encoders share one vocabulary. Templates may hold chat markup; text from outside (questions, memories, passages,
tool calls) is encoded with special tokens disabled, so that a page that contains `<|im_start|>assistant` stays a page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from memsearcher_jax.agent.types import Finish, Piece, Prompt, Reply
from memsearcher_jax.sampling.buffer import PromptIds

TURN_OPENS, TURN_ENDS, TEXT_ENDS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class ChatTokenizer:
    """A ChatML vocabulary. It is also the `Ruler` by which workflows hold their budgets."""

    definition: str  # the text of tokenizer.json
    folder: str = ""  # where it came from; exports copy its files

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
        """Raises ValueError unless this is a tokenizer that holds the three tokens of ChatML."""
        try:
            tokenizer = self._template
        except Exception as error:  # the library raises bare Exception for a file that it can not read
            raise ValueError(f"{self.folder}/tokenizer.json is not a tokenizer: {error}") from error
        for token in (TURN_OPENS, TURN_ENDS, TEXT_ENDS):
            if tokenizer.token_to_id(token) is None:
                raise ValueError(f"the tokenizer in {self.folder} has no {token}: it does not speak ChatML")

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
        """Tokens by which a policy ends what it says: the end of the turn, the end of text."""
        return tuple(self._template.token_to_id(token) for token in (TURN_ENDS, TEXT_ENDS))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens after which nothing more is drawn: the ends, and a forged turn."""
        return (*self.end_ids, self._template.token_to_id(TURN_OPENS))

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Ids of trusted text; chat markup becomes control tokens."""
        return tuple(self._template.encode(text, add_special_tokens=False).ids)

    def encode_outside(self, text: str) -> tuple[int, ...]:
        """Ids of text from outside; chat markup stays text."""
        return tuple(self._outside.encode(text, add_special_tokens=False).ids)

    def text_of(self, id: int) -> str | None:
        """How the vocabulary writes a token: blanks and other bytes of ordinary ones are letters in it."""
        return self._template.id_to_token(id)

    def count(self, text: str) -> int:
        """Tokens of outside text."""
        return len(self.encode_outside(text))

    def clip(self, text: str, limit: int) -> str:
        """The longest prefix of outside text, up to a token's edge, that encodes to at most `limit` tokens."""
        encoding = self._outside.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= limit:
            return text
        kept = limit
        # A cut text may encode to more tokens than were kept of it (its end merges differently), so look again.
        while kept > 0:
            clipped = text[: encoding.offsets[kept - 1][1]]
            if self.count(clipped) <= limit:
                return clipped
            kept -= 1
        return ""

    def prompt(self, prompt: Prompt) -> PromptIds:
        """A fresh context's parts, each encoded apart: training and evaluation see the same ids."""
        return PromptIds(
            prefix=self.encode_template(prompt.prefix),
            question=self.encode_outside(prompt.question),
            bridge=self.encode_template(prompt.bridge),
            memory=self.encode_outside(prompt.memory),
            suffix=self.encode_template(prompt.suffix),
        )

    def pieces(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """The ids that extend a context."""
        ids: list[int] = []
        for piece in pieces:
            ids += self.encode_template(piece.text) if piece.trusted else self.encode_outside(piece.text)
        return tuple(ids)

    def reply(self, ids: Sequence[int]) -> Reply:
        """What was said, and why it ended, from the ids of one generation."""
        turn_ends, text_ends, turn_opens = self.stop_ids
        finish = {turn_ends: Finish.END, text_ends: Finish.END, turn_opens: Finish.MARKUP}.get(ids[-1], Finish.LENGTH)
        spoken = ids if finish is Finish.LENGTH else ids[:-1]
        return Reply(self._template.decode(list(spoken), skip_special_tokens=False), finish)

    def decode_with_offsets(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the ids, and for each where it begins and ends in it.

        A token that ends inside a character ends behind the mark that stands for it.
        """
        text, offsets = "", []
        for count in range(1, len(ids) + 1):
            begun, text = len(text), self._template.decode(list(ids[:count]), skip_special_tokens=False)
            offsets.append((begun, len(text)))
        return text, offsets

    def transcript(self, ids: Sequence[int]) -> str:
        """A context as ChatML text in which only control tokens read as markup.

        Decoding alone would turn a page's harmless text `<|im_start|>` into the markup that it imitates, and whoever
        parses the transcript would be deceived where the model was not. Such text is shown as `< |im_start|>`.
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
