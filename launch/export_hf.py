"""Writes a checkpoint as a Hugging Face folder that transformers loads.

python launch/export_hf.py --checkpoint runs/NAME --out DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cli

from memsearcher_jax.model import sharding, weights
from memsearcher_jax.rl import build, source


@dataclass(frozen=True)
class Export(cli.Command):
    """Write a checkpoint as a Hugging Face folder."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the written weights."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Export, argv)
        cli.refuse_resume(flags, "an export")
        if flags.out is None:
            raise ValueError("--out is missing: name the folder to write")
        config = cli.at_checkpoint(flags, needed=True)
        out = cli.new_folder(flags.out, "export")
        build.check_model(config)
        tokenizer = build.open_tokenizer(config.model)
        params = source.load_params(config.model.path, config.model, sharding.make_mesh(config.mesh), flags.dtype)
        weights.save(out, config.model, params, tokenizer.folder)
    cli.write_json(flags.json, {"checkpoint": config.model.path, "out": str(out), "dtype": flags.dtype})
    print(f"{out}: {flags.dtype} weights, config and tokenizer; load it with transformers' AutoModelForCausalLM")


if __name__ == "__main__":
    main(sys.argv[1:])
