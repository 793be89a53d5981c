"""How `plan_tpu.py` says what it found: for somebody who decides whether to rent a slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memsearcher_jax.config import RunConfig
from memsearcher_jax.rl import roofline
from memsearcher_jax.rl.roofline import Load, Phase, Slice

if TYPE_CHECKING:
    from memsearcher_jax.rl.plan import Program, Resident

GB = 1e9


@dataclass
class Text:
    """Prints one plan, part by part."""

    config: RunConfig
    load: Load
    where: Slice

    def setting(self, topology: str, mesh: dict[str, int], copies: int) -> None:
        """What is planned."""
        model, training, sampling, where = self.config.model, self.config.training, self.config.sampling, self.where
        shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
        micro = training.rows_per_update // training.accumulate
        print(
            f"{topology}: {where.chips} chips of {where.hosts} hosts, {where.devices} devices with "
            f"{where.chip.hbm_bytes / GB:.2f} GB each for programs\n"
            f"training: mesh {shape}, remat {model.remat}, mini-batches of {training.rows_per_update} rows of "
            f"{training.row_tokens:,} tokens in {training.accumulate} micro-batches of {micro}\n"
            f"sampling: on each host {sampling.slots} slots of {sampling.context_tokens:,} tokens, "
            f"{copies} x {sampling.tensor} devices"
        )

    def stays(self, stays: Resident) -> None:
        """What no program gives back."""
        print(
            f"stays on each device: state {stays.state / GB:.2f} GB, reference {stays.reference / GB:.2f}, sampler's "
            f"weights {stays.weights / GB:.2f} and slots {stays.cache / GB:.2f}; in all {stays.all / GB:.2f} GB\n\n"
            f"{'GB of one device':24}{'arguments':>10}{'temporary':>10}{'peak':>8}{'donated':>9}{'with all':>10}"
            f"{'sent':>8}{'TFLOP':>9}{'compiled':>10}"
        )

    def program(self, one: Program) -> None:
        """One line of the table."""
        bytes_of = (one.arguments, one.temporary, one.peak, one.donated, one.whole, one.sent)
        cells = "".join(f"{size / GB:>{width}.2f}" for size, width in zip(bytes_of, (10, 10, 8, 9, 10, 8), strict=True))
        print(f"{one.name:24}{cells}{one.flops / 1e12:9.1f}{one.compile_seconds:8.0f} s", flush=True)

    def fits(self, most: Program) -> None:
        """Which program decides, and what is left."""
        limit = self.where.chip.hbm_bytes
        print(
            f"\nfits: the most is {most.whole / GB:.2f} GB of {limit / GB:.2f}, in {most.name}; "
            f"{(limit - most.whole) / GB:.2f} GB are left"
        )

    def step(self, phases: list[Phase]) -> dict[str, Any]:
        """A step by phase, and a run; returns them for JSON."""
        config, load, rl = self.config, self.load, self.config.rl
        trajectories = rl.problems * rl.rollouts
        contexts = trajectories * load.contexts
        rows = roofline.rows_of_step(config, load)
        found = roofline.outlook(config, load, self.where, phases)
        print(
            f"\na step: {trajectories:,} trajectories, {contexts:,.0f} contexts of {load.context_tokens:,.0f} tokens "
            f"({load.generated_tokens:,.0f} generated), {rows:,.0f} rows; assumed, see --load\n"
            f"{'seconds at full rates':24}{'compute':>10}{'memory':>10}{'links':>8}{'':>4}bound by"
        )
        for one in phases:
            limits = f"{one.compute:10.2f}{one.memory:10.2f}{one.links:8.2f}"
            print(f"{one.name:24}{limits}{'':>4}{one.bound}")
        longest = max(phases, key=lambda phase: phase.seconds)
        print(
            f"in all {sum(one.seconds for one in phases):.1f} s, most of it {longest.name}, bound by {longest.bound}\n"
            f"at {load.efficiency:.0%} of that, which is assumed: {found.step_seconds:.1f} s a step, "
            f"{found.tokens_per_second:,.0f} tokens/s, {rl.steps} steps in {found.hours:.1f} hours, "
            f"{found.chip_hours:,.0f} chip-hours"
        )
        return {
            "phases": [vars(one) | {"seconds": one.seconds, "bound": one.bound} for one in phases],
            **vars(found),
            "load": vars(load),
        }
