"""README.md of an exported model: the Hub's model card, from a run's settings, its results and an evaluation of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.base import ReadingAgent
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.logs.run_facts import read_facts, read_results
from memsearcher_jax.report.plots import CURVES_FILE
from memsearcher_jax.runtime import hub
from memsearcher_jax.runtime.export_settings import EXPORT_FILE
from memsearcher_jax.runtime.inputs import read_inputs
from memsearcher_jax.runtime.run_dir import is_run, read_run_config

MODEL_CARD = "README.md"
USE = """In a checkout of memsearcher_jax, after `pip install -e .`:

```bash
python launch/ask.py --checkpoint {checkpoint}{flags} "Who directed the film ...?"
```
"""


def read_evaluation(folder: Path | None) -> dict[str, Any]:
    """Benchmark -> its results, of a directory that launch/evaluate.py wrote. Raises FileNotFoundError, ValueError."""
    if folder is None:
        return {}
    results = read_results(folder)
    if "evaluation" not in results:
        raise ValueError(f"--evaluation {folder} is no evaluation: name a folder that launch/evaluate.py wrote")
    return results["evaluation"]["benchmarks"]


def write_model_card(
    directory: Path, run: Path, *, name: str, license: str, adapter: bool, evaluation: Mapping[str, Any]
) -> None:
    """Writes the card of the weights of `run` to `directory`, with the learning curves. `license` "": not stated."""
    from huggingface_hub import ModelCardData

    config = read_run_config(run) if is_run(run) else None
    base = config.model.path if config else ""
    public_base = base.partition("@")[0] if hub.is_repository(base) else ""
    tags, datasets, origin = ["memsearcher_jax"], [], ""
    if config:
        agent, method = Path(config.agent.workflow).stem, "sft" if config.sft.trajectories else "grpo"
        tags += [agent, method]
        datasets = [entry for entry in config.data.train_entries if not Path(entry).suffix]
        link = f"[{base}](https://huggingface.co/{public_base})" if public_base else f"`{Path(base).name}`"
        origin = f"A {agent} agent, trained by {method} with memsearcher_jax{f' from {link}' if base else ''}.\n"
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license=license or None,
        base_model=public_base or None,
        datasets=datasets or None,
        tags=tags,
    )
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name or directory.name}\n",
        *([origin] if origin else []),
        *_evaluation(evaluation),
        *_training(directory, run),
        "## Use\n",
        _use(config, name or str(directory), base, adapter),
        f"Its settings are in [{EXPORT_FILE}]({EXPORT_FILE}).\n",
    ]
    (directory / MODEL_CARD).write_text("\n".join(lines), encoding="utf-8")


def _use(config: RunConfig | None, name: str, base: str, adapter: bool) -> str:
    """How to ask the agent, with the flags that say where its passages or texts are."""
    checkpoint = f"{base.partition('@')[0]} --model.adapter {name}" if adapter else name
    flags = ""
    if config and config.agent.workflow.endswith(".py"):  # which only a command line may execute
        flags = f" --agent.workflow {Path(config.agent.workflow).name}"
    elif config and isinstance(agent_of(config), ReadingAgent):
        flags = " --files DOCUMENTS"
    elif config and agent_of(config).searches and not config.data.is_synthetic:
        flags = " --retrieval.index DIR"
    return USE.format(checkpoint=checkpoint, flags=flags)


def _evaluation(evaluation: Mapping[str, Any]) -> Iterator[str]:
    if not evaluation:
        return
    scores = list(next(iter(evaluation.values()))["scores"])
    yield "## Evaluation\n\nMeans in percent with 95 % intervals over questions.\n"
    yield f"| benchmark | questions | {' | '.join(score.replace('_', ' ') for score in scores)} |"
    yield "| --- " * (len(scores) + 2) + "|"
    for benchmark, result in evaluation.items():
        cells = (_interval(result["scores"][score], scale=100) for score in scores)
        yield f"| {benchmark} | {result['questions']} | {' | '.join(cells)} |"
    yield ""


def _training(directory: Path, run: Path) -> Iterator[str]:
    results, program = read_facts(run).results, read_inputs(run).program
    if not program:
        return
    program = program[-1]
    yield f"## Training\n\nmemsearcher_jax {program['version']}, commit {program['commit'] or 'unknown'}.\n"
    if "last_steps" in results:
        means = (f"{name} {_interval(value)}" for name, value in results["metrics"].items())
        yield f"{results['steps']} steps; means over the last {results['last_steps']}: {', '.join(means)}.\n"
    if (run / CURVES_FILE).is_file():
        shutil.copyfile(run / CURVES_FILE, directory / CURVES_FILE)
        yield f"![Learning curves]({CURVES_FILE})\n"


def _interval(value: Mapping[str, float], scale: int = 1) -> str:
    digits = 1 if scale == 100 else 3
    mean, low, high = (f"{scale * value[key]:.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
