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
from typing import Any, NamedTuple

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
        return all(rollout.outcome is not None for rollout in self.rollouts)

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
        settings = self.run.config.rl
        step = state.step
        count = settings.prompts_per_step
        self.take(count)

        def problems(later: int) -> list[Problem]:
            return self.loader.batch(self.position + (later - step) * count, count)

        # All steps have the same key, and each rollout a number of its own: see `rollout`.
        key = named_key(self.run.config.seed, "rollout", 0)
        indices = self.hosts.share(count)
        batch_of_host = None
        with self.hosts.guarded():
            with timer("rollout"):
                result = rollout(
                    self.driver, self.carried, problems, indices, state.params, key, step, settings, timer.notify
                )
            self.unfinished = result.carried
            batch_of_host = self.scored(result.trajectories, result.stats, state, timer)
        with timer("gather"):
            batch = self.with_metrics(exchange(self.hosts, batch_of_host))
        staleness = staleness_metrics(batch.summaries, step, batch.stats)
        return replace(batch, metrics={**batch.metrics, **staleness})

    def commit(self) -> None:
        assert self.unfinished is not None, "`collect` comes first"
        super().commit()
        self.carried = self.unfinished

    def restart(self) -> None:
        self.carried = replace(self.carried, groups=tuple(group.restarted() for group in self.carried.groups))

    def meta(self) -> dict[str, Any]:
        return super().meta() | {"carried": to_text(self.carried, self.hosts.exchange)}


class StepResult(NamedTuple):
    """What the rollout of one step made on one host."""

    trajectories: list[Trajectory]  # that the step trains
    carried: Carried  # what it carries on
    stats: RolloutStats


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
) -> StepResult:
    """Continues what is carried and begins new groups, until the step has the groups that it trains.

    `problems` gives those of a step, of which those at `indices` are this host's.
    """
    end_step = min(step + settings.carry_over + 1, settings.steps)  # no problem of a step after the run's last begins
    begun = list(carried.groups)
    for later in range(carried.next_step, end_step):
        batch = problems(later)
        begun += [Group(later, index, batch[index], (Rollout(),) * settings.group_size) for index in indices]

    groups = {group.step * settings.prompts_per_step + group.index: group for group in begun}
    complete = {number for number, group in groups.items() if group.complete}
    step_rollout = _StepRollout(groups, step, _needs(groups, len(indices), step, settings), complete)
    jobs = []
    for number, group in groups.items():
        for copy, begun_rollout in enumerate(group.rollouts):
            if begun_rollout.outcome is None:
                # The seed of its draws: the same in every step that samples the rollout, and unique among all.
                rollout_number = number * settings.group_size + copy
                jobs.append(Job(rollout_number, group.problem, copy, begun_rollout))

    def on_end(job: Job, ended: Rollout) -> None:
        step_rollout.record(job.number // settings.group_size, job.rollout, ended)
        notify(f"{len(step_rollout.complete)}/{step_rollout.quota} groups, {step_rollout.finished} trajectories")

    stats = driver.run(jobs, params, key, on_end, version=step, should_continue=step_rollout.should_continue)

    split = step_rollout.split_trained()
    trajectories = []
    for group in split.trained:
        for copy, ended in enumerate(group.rollouts):
            trajectories.append(driver.trajectory(Job(0, group.problem, copy), ended))
    next_step = max(end_step, carried.next_step)
    return StepResult(trajectories, Carried(next_step, tuple(split.kept)), stats)


@dataclass(frozen=True)
class _Need:
    """At least `count` of these groups have to be complete before the rollout of a step may end."""

    numbers: set[int]
    count: int


class _Split(NamedTuple):
    trained: list[Group]
    kept: list[Group]


@dataclass
class _StepRollout:
    """The groups of one step's rollout."""

    groups: dict[int, Group]  # by the number of the problem in the run, in order
    step: int
    needs: list[_Need]
    complete: set[int]  # numbers of groups that are
    finished: int = 0

    @property
    def quota(self) -> int:
        """Groups that the step trains."""
        return max(need.count for need in self.needs)

    def should_continue(self) -> bool:
        """Whether the step needs more groups to be complete."""
        return any(len(self.complete & need.numbers) < need.count for need in self.needs)

    def record(self, number: int, copy: int, ended: Rollout) -> None:
        """Records how one rollout of a group ended: it finished or was paused."""
        group = self.groups[number]
        rollouts = (*group.rollouts[:copy], ended, *group.rollouts[copy + 1 :])
        versions = [context.version for rollout in rollouts for context in rollout.contexts]
        opened = self.step if group.oldest_version is None else group.oldest_version
        group = replace(group, rollouts=rollouts, oldest_version=min(versions, default=opened))
        self.groups[number] = group
        if group.complete:
            self.complete.add(number)
        if ended.outcome is not None:
            self.finished += 1

    def split_trained(self) -> _Split:
        """The groups to train, which are those with the oldest contexts, and those to carry on."""
        oldest_first = sorted(self.complete, key=lambda number: (self.groups[number].oldest_version, number))
        trained = set(oldest_first[: self.quota])
        kept = [group for number, group in self.groups.items() if number not in trained]
        return _Split([self.groups[number] for number in sorted(trained)], kept)


def _needs(groups: Mapping[int, Group], quota: int, step: int, settings: RLConfig) -> list[_Need]:
    """What the rollout of a step waits for: as many complete groups as it trains, among them those that must not wait.

    `quota` is the number of groups that a step trains. A context may be `rl.carry_over` steps old when it is trained.
    So the groups that reach this age within the next `later` steps have to be trained by this step and by those, of
    which each trains `quota`: the groups for which these later steps have no room have to be complete now.

    For example, the quota is 3 and `carry_over` 2, and step 7 has one group begun in step 5, five begun in step 6 and
    three that are new:

    - of all nine groups, 3 have to be complete;
    - `later` 0: the group of step 5 is as old as is allowed, so it has to be complete;
    - `later` 1: step 8 is the last that may train the groups of step 6 and earlier, and it trains 3 of these six, so
      the other 3 have to be complete now: a new group that ends early takes no place of theirs;
    - `later` 2: steps 8 and 9 train 6 of the nine groups, so 3 have to be complete.
    """
    is_last = step == settings.steps - 1
    max_staleness = 0 if is_last else settings.carry_over  # after the last step nothing is trained
    oldest_version = {
        number: step if group.oldest_version is None else group.oldest_version for number, group in groups.items()
    }
    needs = [_Need(set(groups), quota)]
    for later in range(max_staleness + 1):
        too_old_after = step - max_staleness + later
        due = {number for number, version in oldest_version.items() if version <= too_old_after}
        needs.append(_Need(due, len(due) - later * quota))
    return needs


def to_text(carried: Carried, exchange: Callable[[bytes], list[bytes] | None]) -> str:
    """What all hosts carry, as text for a checkpoint: compressed JSON. All hosts must call it."""
    groups_of_host = []
    for group in carried.groups:
        fields = {
            "step": group.step,
            "index": group.index,
            "oldest_version": group.oldest_version,
            "problem": problem_name(group.problem),
            "rollouts": list(map(_to_json, group.rollouts)),
        }
        groups_of_host.append(fields)
    groups = []
    for share in exchange(json.dumps(groups_of_host).encode()) or ():
        groups += json.loads(share)
    groups.sort(key=lambda fields: (fields["step"], fields["index"]))
    carried_by_all = {"next_step": carried.next_step, "groups": groups}
    return base64.b64encode(zlib.compress(json.dumps(carried_by_all).encode())).decode()


def from_text(
    text: str, problems: Sequence[Problem], driver: RolloutDriver, changed: Sequence[tuple[str, Any, Any]] = ()
) -> Carried:
    """The inverse of `to_text`, of all hosts: workflows are run again on their responses.

    `problems`: all that the run trains on; `changed`: (name, old value, new value) of all settings that have changed
    since. Raises ValueError if the carried groups cannot go on with these.
    """
    content = json.loads(zlib.decompress(base64.b64decode(text)))
    must_not_change = changed if content["groups"] else ()
    for name, old, new in must_not_change:
        if name.startswith(FIXED_SETTINGS) or (name == "rl.carry_over" and new < old):
            raise ValueError(
                f"{name} cannot change to {new!r} while the checkpoint carries trajectories: leave it at {old!r}"
            )
    ids = {group["problem"]["id"] for group in content["groups"]}
    found = {problem_name(problem)["sha256"]: problem for problem in problems if problem.id in ids}

    def restored(fields: dict[str, Any]) -> Group:
        name = fields["problem"]
        problem = found.get(name["sha256"])
        if problem is None:
            raise ValueError(
                f"the checkpoint carries trajectories of problem {name['id']!r}, which the training data no longer has "
                "as it was: restore the data that the run began with"
            )
        rollouts = tuple(_from_json(rollout_fields, problem, driver) for rollout_fields in fields["rollouts"])
        return Group(fields["step"], fields["index"], problem, rollouts, fields["oldest_version"])

    return Carried(content["next_step"], tuple(map(restored, content["groups"])))


def problem_name(problem: Problem) -> dict[str, str]:
    """What identifies a problem, at any position of the data."""
    content = json.dumps(asdict(problem), sort_keys=True, default=str)
    return {"id": problem.id, "sha256": hashlib.sha256(content.encode()).hexdigest()}


def _to_json(rollout: Rollout) -> dict[str, Any]:
    """The rollout without an outcome that its workflow returns again; one that it did not return is stored."""
    outcome = rollout.outcome
    fault = None
    if outcome is not None and outcome.stop in (StopReason.FAULT, StopReason.NOT_FINITE):
        fault = {"stop": outcome.stop.value, "error": outcome.error}
    return {
        "contexts": [encode_context(context) for context in rollout.contexts],
        "responses": list(map(encode_response, rollout.responses)),
        "finished": outcome is not None,
        "fault": fault,
    }


def _from_json(fields: dict[str, Any], problem: Problem, driver: RolloutDriver) -> Rollout:
    contexts = decode(tuple[Context, ...], fields["contexts"])
    responses = tuple(map(decode_response, fields["responses"]))
    outcome = None
    if fault := fields["fault"]:
        outcome = Outcome(StopReason(fault["stop"]), error=fault["error"])
    elif fields["finished"]:
        outcome = driver.outcome(problem, responses)
    return Rollout(contexts, responses, outcome)
