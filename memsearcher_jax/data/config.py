"""Settings of the problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memsearcher_jax.data.readers import CHUNK_WORDS
from memsearcher_jax.data.synthetic.documents import DocumentConfig
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig
from memsearcher_jax.data.synthetic.streams import SyntheticStreamConfig
from memsearcher_jax.ranges import Count


@dataclass(frozen=True)
class DataConfig:
    """Training and test problems. Without any file, problems are generated from a seed."""

    train: tuple[str, ...] = ()
    """Training data: names of benchmarks in data.root (the paper uses nq hotpotqa), or files in the format of FlashRAG
    (JSONL with id, question, golden_answers, plain or .gz), of Search-R1 (.parquet), or of a benchmark's authors
    (.json); for agent.workflow memalpha streams in Mem-alpha's format."""
    test: tuple[str, ...] = ()
    """Test data in the same form. A benchmark's name means the split that results are reported on; name:split selects
    another one."""
    root: str = ""
    """Folder, or dataset repository of the Hub, of the benchmarks in FlashRAG's layout: nq/train.jsonl and so on."""
    questions: Literal["all", "span"] = "all"
    """Questions of the files to use: all, or span: without those that can be guessed, whose answer is yes, no or an
    option in the question."""
    objectives: Count = 1
    """Questions that one problem joins, as in MEM1; semicolons separate them, and their answers. A rest is left out."""
    exclude: str = ""
    """JSONL file of {"id"} of training problems to leave out, such as hopeless.jsonl of launch/build_index.py
    --audit."""
    chunk_words: Count = CHUNK_WORDS
    """Words of a chunk of a conversation of LongMemEval or LoCoMo (.json), at most: its sessions are divided."""
    malformed: Literal["error", "skip"] = "error"
    """What to do with a malformed row: raise an error, or skip and count it."""
    synthetic: Literal["encyclopedia", "streams", "documents"] = "encyclopedia"
    """What to generate without files: questions about the embedded encyclopedia, streams of chunks for agent.workflow
    memalpha, or long documents with a question each for memagent."""
    encyclopedia: EncyclopediaConfig = field(default_factory=EncyclopediaConfig)
    """Seed and size of the embedded encyclopedia."""
    documents: DocumentConfig = field(default_factory=DocumentConfig)
    """Lengths of the generated documents."""
    streams: SyntheticStreamConfig = field(default_factory=SyntheticStreamConfig)
    """Seed, number and lengths of the generated streams."""

    @property
    def is_synthetic(self) -> bool:
        return not (self.train or self.test)
