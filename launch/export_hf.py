"""Writes a checkpoint as a Hugging Face folder that transformers loads.

python launch/export_hf.py --checkpoint runs/NAME --out DIR
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cli


@dataclass(frozen=True)
class Export(cli.Command):
    """Write a checkpoint as a Hugging Face folder that transformers loads."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the written weights."""
    shard_gb: float = 5.0
    """Largest file of weights; a model over it goes into several."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Export, argv)
        cli.refuse_resume(flags, "an export")
        cli.need_weights(flags)
        if flags.out is None:
            raise ValueError("--out is missing: name the folder to write")
        if not 0 < flags.shard_gb < float("inf"):
            raise ValueError(f"--shard_gb is {flags.shard_gb}: it must be above 0")
        with cli.new_folder(flags.out, "export") as out:
            # JAX takes seconds to load; --help and a wrong flag are answered without it.
            from memsearcher_jax.rl import build, source

            model = flags.run.model
            source.check_weights(model.path, model)
            tokenizer = build.open_tokenizer(model)
            source.export(
                model.path, model, out, flags.dtype, tokenizer.folder, tokenizer.end_ids, int(flags.shard_gb * 1e9)
            )
    cli.write_json(flags.json, {"checkpoint": model.path, "out": str(out), "dtype": flags.dtype})
    print(f"{out}: {flags.dtype} weights, config and tokenizer; load it with transformers' AutoModelForCausalLM")


if __name__ == "__main__":
    cli.run(main)
