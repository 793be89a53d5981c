"""Dynamic sampling: groups whose rewards are all equal teach nothing, so further problems replace them."""

from __future__ import annotations

from dataclasses import replace

from memsearcher_jax.rl.batch import RolloutBatch, concatenate
from memsearcher_jax.rl.collector import Collector
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.rl.timing import Timer


class DynamicSampling(Collector):
    """Repeats rollouts, at most `rl.refill` times, until a step has as many mixed groups as it has problems."""

    def collect(self, state: RunState, timer: Timer) -> RolloutBatch:
        settings = self.run.config.rl
        group_size = settings.group_size
        batch = self.sample_groups(self.take(settings.prompts_per_step), state, timer)
        refills = 0
        replaced = 0
        while refills < settings.refill:
            missing = settings.prompts_per_step - batch.mixed_groups(group_size).count(True)
            if not missing:
                break
            refills += 1
            replaced += missing
            further = self.sample_groups(self.take(missing), state, timer, refills)
            batch = concatenate([batch, further], sum)
        batch = self.with_metrics(batch)
        counts = {"refills": float(refills), "replaced_groups": float(replaced)}
        return replace(batch, metrics={**batch.metrics, **counts})
