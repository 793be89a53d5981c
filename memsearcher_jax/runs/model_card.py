"""README.md of an exported model: the Hub's model card, from a run's settings and results."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from memsearcher_jax.agent.base import ReadingAgent
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.report.plots import CURVES_FILE
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.export_settings import EXPORT_FILE
from memsearcher_jax.runs.inputs import read_inputs
from memsearcher_jax.runs.run_dir import is_run, read_run_config

MODEL_CARD = "README.md"
LAST_STEPS = 10
MEANS = (MetricName.REWARD, MetricName.EXACT_MATCH)  # over LAST_STEPS
USE = """In a checkout of memsearcher_jax, after `pip install -e .`:

```bash
python launch/ask.py --checkpoint {checkpoint}{flags} "Who directed the film ...?"
```
"""


def write_model_card(directory: Path, run: Path, *, name: str, license: str, adapter: bool) -> None:
    """Writes the card of the weights of `run` to `directory`, with the learning curves. `license` "": not stated."""
    from huggingface_hub import ModelCardData

    config = read_run_config(run) if is_run(run) else None
    base = config.model.path if config else ""
    public_base = base.partition("@")[0] if hub.is_repository(base) else ""
    tags = ["memsearcher_jax"]
    datasets: list[str] = []
    origin = ""
    if config:
        agent = Path(config.agent.workflow).stem
        method = "sft" if config.sft.trajectories else "grpo"
        tags += [agent, method]
        datasets = [entry for entry in config.data.train if not Path(entry).suffix]
        link = f"[{base}](https://huggingface.co/{public_base})" if public_base else f"`{Path(base).name}`"
        from_base = f" from {link}" if base else ""
        origin = f"A {agent} agent, trained by {method} with memsearcher_jax{from_base}.\n"
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
    ]
    if origin:
        lines.append(origin)
    lines += [
        *_training(directory, run),
        "## Use\n",
        _use(config, name or str(directory), public_base or Path(base).name, adapter),
        f"Its settings are in [{EXPORT_FILE}]({EXPORT_FILE}).\n",
    ]
    (directory / MODEL_CARD).write_text("\n".join(lines), encoding="utf-8")


def _use(config: RunConfig | None, name: str, base: str, adapter: bool) -> str:
    """How to ask the agent, with the flags that say where its passages or texts are."""
    checkpoint = f"{base} --model.adapter {name}" if adapter else name
    flags = ""
    if config and config.agent.workflow.endswith(".py"):  # which only a command line may execute
        flags = f" --agent.workflow {Path(config.agent.workflow).name}"
    elif config and isinstance(agent_of(config), ReadingAgent):
        flags = " --files DOCUMENTS"
    elif config and agent_of(config).searches and not config.data.is_synthetic:
        flags = " --retrieval.index DIR"
    return USE.format(checkpoint=checkpoint, flags=flags)


def _training(directory: Path, run: Path) -> Iterator[str]:
    program = read_inputs(run).program
    if not program:
        return
    yield f"## Training\n\nmemsearcher_jax {program[-1]['version']}, commit {program[-1]['commit'] or 'unknown'}.\n"
    steps = read_metrics(run / METRICS_FILE) if (run / METRICS_FILE).is_file() else []
    last_steps = steps[-LAST_STEPS:]
    if last_steps:
        means = []
        for name in MEANS:
            values = [step.get(name, math.nan) for step in last_steps]
            if all(map(math.isfinite, values)):
                means.append(f"{name} {fmean(values):.3f}")
        yield f"{len(steps)} steps; means over the last {len(last_steps)}: {', '.join(means)}.\n"
    if (run / CURVES_FILE).is_file():
        shutil.copyfile(run / CURVES_FILE, directory / CURVES_FILE)
        yield f"![Learning curves]({CURVES_FILE})\n"
