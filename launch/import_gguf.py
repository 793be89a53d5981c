"""Converts a GGUF file to a Hugging Face directory, which --model.path takes. Needs the extra `gguf`.

python launch/import_gguf.py MODEL.gguf --out DIR
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.progress import announced


@dataclass(frozen=True)
class ImportGGUF:
    """Convert a GGUF file to a Hugging Face directory."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """GGUF file of a Qwen2, Qwen3 or Llama model; quantised weights become float32."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; it must be new."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(ImportGGUF, argv)
        with outputs.new_output_dir(flags.out, "import") as out, announced("converting the weights"):
            # JAX takes seconds to import; --help and errors do not need it.
            from memsearcher_jax.model import gguf_file

            config = gguf_file.convert(flags.file, out)
    print(
        f"{out}: a {config.family} model of {config.layers} layers, its tokenizer and chat template; --model.path {out}"
    )
