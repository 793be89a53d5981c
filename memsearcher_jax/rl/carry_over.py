"""Rollouts that do not wait for the slowest trajectory: what a step has not finished is carried into the next ones.

A step trains as many groups as it has problems. Until that many are complete, free slots begin the problems of the next
steps, at most `rl.carry_over` steps ahead. Then the rollout ends at once, and the next step continues the trajectories
under way with its weights, from their last complete context on. So every context is sampled by one policy, whose
log-probabilities it keeps, and no KV cache outlives the weights that filled it.

A context that was interrupted is sampled again with the same random numbers, so that interrupting does not select for
short contexts. A group whose oldest context is `rl.carry_over` steps old has to be complete, and the step waits for it:
no context is staler than that, and nothing is discarded. It also waits for younger ones that later steps cannot take.

What is carried is plain data, which any number of hosts takes up; a workflow is run again on its responses.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memsearcher_jax.logs.trajectories import decode, decode_response, encode_context, encode_response
from memsearcher_jax.rl.batch import RolloutBatch, exchange
from memsearcher_jax.rl.collector import Collector
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats, staleness_metrics
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import Job, Rollout, RolloutDriver
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.types import Context, Outcome, Problem, StopReason, Trajectory

FIXED_SETTINGS = (
    "agent.",
    "memalpha.",
    "data.",
    "seed",
    "sampling.context_tokens",
    "training.seq_len",
    "rl.prompts_per_step",
    "rl.group_size",
)
"""What carried trajectories depend on: under another value they would not be what that value describes."""


@dataclass(frozen=True)
class Group:
    """The rollouts of a problem that no step has trained yet."""

    step: int  # to which the problem belongs
    index: int  # of the problem among those of the step
    problem: Problem
    rollouts: tuple[Rollout, ...]
    oldest_version: int | None = None  # of its contexts; without one, the step that opened the first; None: not begun

    @property
    def complete(self) -> bool:
        return all(one.outcome is not None for one in self.rollouts)

    def restarted(self) -> Group:
        """The same problem, none of whose rollouts has begun."""
        return replace(self, oldest_version=None, rollouts=(Rollout(),) * len(self.rollouts))


@dataclass(frozen=True)
class Carried:
    """What is carried from one step to the next, on one host or on all hosts together."""

    next_step: int  # the first of whose problems none has a group
    groups: tuple[Group, ...] = ()  # in order

    def share(self, indices: Container[int]) -> Carried:
        """The groups of some problems of each step, which are one host's."""
        return replace(self, groups=tuple(group for group in self.groups if group.index in indices))


@dataclass
class CarryOver(Collector):
    """Trains complete groups and carries the others on."""

    carried: Carried = field(kw_only=True)
    unfinished: Carried | None = None  # what the step under way would carry on

    def collect(self, state: RunState, timer: Timer) -> RolloutBatch:
        settings, step, batch = self.run.config.rl, state.step, None
        count = settings.prompts_per_step
        self.take(count)

        def problems(later: int) -> list[Problem]:
            return self.loader.batch(self.position + (later - step) * count, count)

        # All steps have the same key, and each rollout a number of its own: see `rollout`.
        key, indices = named_key(self.run.config.seed, "rollout", 0), self.hosts.share(count)
        with self.hosts.guarded():
            with timer("rollout"):
                trajectories, self.unfinished, stats = rollout(
                    self.driver, self.carried, problems, indices, state.params, key, step, settings, timer.notify
                )
            batch = self.scored(trajectories, stats, timer)
        with timer("gather"):
            batch = self.with_metrics(exchange(self.hosts, batch))
        return replace(batch, metrics={**batch.metrics, **staleness_metrics(batch.summaries, step, batch.stats)})

    def commit(self) -> None:
        assert self.unfinished is not None, "`collect` comes first"
        super().commit()
        self.carried = self.unfinished

    def restart(self) -> None:
        self.carried = replace(self.carried, groups=tuple(group.restarted() for group in self.carried.groups))

    def meta(self) -> dict[str, Any]:
        return super().meta() | {"carried": to_text(self.carried, self.hosts.exchange)}


def rollout(
    driver: RolloutDriver,
    carried: Carried,
    problems: Callable[[int], Sequence[Problem]],
    indices: Sequence[int],
    params: Any,
    key: Any,
    step: int,
    settings: RLConfig,
    notify: Callable[[str], None],
) -> tuple[list[Trajectory], Carried, RolloutStats]:
    """The trajectories that a step trains, what it carries on, and what it took.

    `problems` gives those of a step, of which those at `indices` are this host's.
    """
    # None of a step after the run's last.
    next_step, begun = min(step + settings.carry_over + 1, settings.steps), list(carried.groups)
    for later in range(carried.next_step, next_step):
        batch = problems(later)
        begun += [Group(later, index, batch[index], (Rollout(),) * settings.group_size) for index in indices]
    groups = {group.step * settings.prompts_per_step + group.index: group for group in begun}
    complete = {number for number, group in groups.items() if group.complete}
    step_rollout = _StepRollout(groups, step, _needs(groups, len(indices), step, settings), complete)
    jobs = [
        # The number seeds the draws: the same in every step that samples the rollout, and unique among all.
        Job(number * settings.group_size + copy, group.problem, copy, one)
        for number, group in groups.items()
        for copy, one in enumerate(group.rollouts)
        if one.outcome is None
    ]

    def on_end(job: Job, ended: Rollout) -> None:
        step_rollout.record(job.number // settings.group_size, job.rollout, ended)
        notify(f"{len(step_rollout.complete)}/{step_rollout.quota} groups, {step_rollout.finished} trajectories")

    stats = driver.run(jobs, params, key, on_end, version=step, should_continue=step_rollout.should_continue)
    trained, kept = step_rollout.split_trained()
    trajectories = [
        driver.trajectory(Job(0, group.problem, copy), one)
        for group in trained
        for copy, one in enumerate(group.rollouts)
    ]
    return trajectories, Carried(max(next_step, carried.next_step), tuple(kept)), stats


@dataclass
class _StepRollout:
    """The groups of one step's rollout."""

    groups: dict[int, Group]  # by the number of the problem in the run, in order
    step: int
    needs: list[tuple[set[int], int]]  # see `_needs`
    complete: set[int]  # numbers of groups that are
    finished: int = 0

    @property
    def quota(self) -> int:
        """Groups that the step trains."""
        return max(count for _, count in self.needs)

    def should_continue(self) -> bool:
        """Whether the step needs more groups to be complete."""
        return any(len(self.complete & numbers) < count for numbers, count in self.needs)

    def record(self, number: int, copy: int, one: Rollout) -> None:
        """Records how one rollout of a group ended: it finished or was paused."""
        group = self.groups[number]
        rollouts = (*group.rollouts[:copy], one, *group.rollouts[copy + 1 :])
        versions = (context.version for rollout in rollouts for context in rollout.contexts)
        opened = self.step if group.oldest_version is None else group.oldest_version
        group = replace(group, rollouts=rollouts, oldest_version=min(versions, default=opened))
        self.groups[number] = group
        if group.complete:
            self.complete.add(number)
        self.finished += one.outcome is not None

    def split_trained(self) -> tuple[list[Group], list[Group]]:
        """The groups to train, which are those with the oldest contexts, and those to carry on."""
        numbers = sorted(self.complete, key=lambda number: (self.groups[number].oldest_version, number))
        trained = set(numbers[: self.quota])
        kept = [group for number, group in self.groups.items() if number not in trained]
        return [self.groups[number] for number in sorted(trained)], kept


def _needs(groups: Mapping[int, Group], quota: int, step: int, settings: RLConfig) -> list[tuple[set[int], int]]:
    """(numbers, how many of these groups have to be complete) for which the rollout of a step waits.

    Of all groups `quota`, as many as the step has problems; and of those that will be too old in `later` steps, as many
    as these steps, with `quota` each, will not train.
    """
    bound = settings.carry_over if step < settings.steps - 1 else 0  # after the last step nothing is trained
    needs = [(set(groups), quota)]
    for later in range(bound + 1):
        ages = {number: step if one.oldest_version is None else one.oldest_version for number, one in groups.items()}
        old = {number for number, version in ages.items() if version <= step - bound + later}
        needs.append((old, len(old) - later * quota))
    return needs


def to_text(carried: Carried, exchange: Callable[[bytes], list[bytes] | None]) -> str:
    """What all hosts carry, as text for a checkpoint: compressed JSON. All hosts must call it."""
    local = [
        {
            "step": group.step,
            "index": group.index,
            "oldest_version": group.oldest_version,
            "problem": problem_name(group.problem),
            "rollouts": list(map(_to_json, group.rollouts)),
        }
        for group in carried.groups
    ]
    groups = [one for share in exchange(json.dumps(local).encode()) or () for one in json.loads(share)]
    groups.sort(key=lambda one: (one["step"], one["index"]))
    together = {"next_step": carried.next_step, "groups": groups}
    return base64.b64encode(zlib.compress(json.dumps(together).encode())).decode()


def from_text(
    text: str, problems: Sequence[Problem], driver: RolloutDriver, changed: Sequence[tuple[str, Any, Any]] = ()
) -> Carried:
    """The inverse of `to_text`, of all hosts: workflows are run again on their responses.

    `problems`: all that the run trains on; `changed`: (name, old value, new value) of all settings that have changed
    since. Raises ValueError if the carried groups cannot go on with these.
    """
    content = json.loads(zlib.decompress(base64.b64decode(text)))
    for name, old, new in changed if content["groups"] else ():
        if name.startswith(FIXED_SETTINGS) or (name == "rl.carry_over" and new < old):
            raise ValueError(
                f"{name} cannot change to {new!r} while the checkpoint carries trajectories: leave it at {old!r}"
            )
    ids = {group["problem"]["id"] for group in content["groups"]}
    found = {problem_name(problem)["sha256"]: problem for problem in problems if problem.id in ids}

    def restored(fields: dict[str, Any]) -> Group:
        name = fields["problem"]
        if (problem := found.get(name["sha256"])) is None:
            raise ValueError(
                f"the checkpoint carries trajectories of problem {name['id']!r}, which the training data no longer has "
                "as it was: restore the data that the run began with"
            )
        rollouts = tuple(_from_json(one, problem, driver) for one in fields["rollouts"])
        return Group(fields["step"], fields["index"], problem, rollouts, fields["oldest_version"])

    return Carried(content["next_step"], tuple(map(restored, content["groups"])))


def problem_name(problem: Problem) -> dict[str, str]:
    """What identifies a problem, at any position of the data."""
    content = json.dumps(asdict(problem), sort_keys=True, default=str)
    return {"id": problem.id, "sha256": hashlib.sha256(content.encode()).hexdigest()}


def _to_json(one: Rollout) -> dict[str, Any]:
    """An outcome that the workflow did not return is stored; the others it returns again."""
    outcome = one.outcome
    lost = outcome is not None and outcome.stop in (StopReason.FAULT, StopReason.NOT_FINITE)
    return {
        "contexts": [encode_context(context) for context in one.contexts],
        "responses": list(map(encode_response, one.responses)),
        "finished": outcome is not None,
        "fault": {"stop": outcome.stop.value, "error": outcome.error} if outcome and lost else None,
    }


def _from_json(fields: dict[str, Any], problem: Problem, driver: RolloutDriver) -> Rollout:
    contexts = decode(tuple[Context, ...], fields["contexts"])
    responses = tuple(map(decode_response, fields["responses"]))
    if fault := fields["fault"]:
        return Rollout(contexts, responses, Outcome(StopReason(fault["stop"]), error=fault["error"]))
    return Rollout(contexts, responses, driver.outcome(problem, responses) if fields["finished"] else None)
