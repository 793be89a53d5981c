"""Writes a checkpoint as a Hugging Face directory that transformers loads.

python launch/export_hf.py --checkpoint runs/NAME --out DIR
python launch/export_hf.py --checkpoint runs/NAME --out DIR --adapter     # the adapters of a LoRA run, for PEFT
hf upload OWNER/NAME DIR                                                  # to the Hub, by huggingface_hub
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.runs.export_settings import write_export_config


@dataclass(frozen=True)
class Export(cli.Command):
    """Write a checkpoint as a Hugging Face directory that transformers loads."""

    out: cli.Directory = None
    """Directory to write; it must be new."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the written weights."""
    adapter: bool = False
    """Write the adapters of a LoRA run alone, in PEFT's format. By default they are merged into the weights."""
    repository: str = ""
    """Repository of the Hugging Face Hub, OWNER/NAME, that the model card names in place of the directory."""
    license: str = ""
    """Licence of the weights for the model card, such as apache-2.0."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Export, argv)
        preconditions.require_checkpoint(flags.run)
        if flags.out is None:
            raise ValueError("--out is missing: give the directory to write")
        from memsearcher_jax.runs import hub, model_card

        with outputs.new_output_dir(flags.out, "export") as out, announced("converting the weights"):
            # JAX takes seconds to import; --help and errors do not need it.
            from memsearcher_jax.rl import setup
            from memsearcher_jax.runs import load_weights

            model = hub.local(flags.run).model
            load_weights.check_weights(model.path, model)
            tokenizer = setup.open_tokenizer(model)
            if flags.adapter:
                base = load_weights.export_adapters(model.path, out, flags.dtype)
                written = f"adapters of {base}; load them with peft's PeftModel.from_pretrained"
            else:
                load_weights.export(model, out, flags.dtype, tokenizer.folder, tokenizer.end_ids)
                written = "weights, config and tokenizer; load it with transformers' AutoModelForCausalLM"
            write_export_config(out, flags.run)
            names = {"name": flags.repository, "license": flags.license, "adapter": flags.adapter}
            model_card.write_model_card(out, Path(flags.run.model.path), **names)
    outputs.write_json(flags.json, {"checkpoint": flags.run.model.path, "out": str(out), "dtype": flags.dtype})
    print(f"{out}: {flags.dtype} {written}")
