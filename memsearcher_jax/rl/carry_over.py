"""Rollouts that do not wait for the slowest trajectory: what a step has not finished is carried into the next ones.

A step trains as many groups as it has problems. Until that many are complete, free slots begin the problems of the next
steps, at most `rl.carry_over` steps ahead. Then the rollout ends at once, and the next step continues the trajectories
under way with its weights, from their last complete context on. So every context is sampled by one policy, whose
log-probabilities it keeps, and no KV cache outlives the weights that filled it.

A context that was interrupted is sampled again with the same random numbers. While the weights are the same it becomes
the context that it would have been, whatever its length: interrupting does not select for short contexts.

A group whose oldest context is `rl.carry_over` steps old has to be complete, and the step waits for it: so no context
is staler than that, and nothing is discarded. It also waits for younger groups, where these would be too many for the
next steps. With `rl.carry_over` 0 every group has to be complete, and nothing is ever carried.

What is carried is plain data: for each trajectory its contexts, and the responses on which its workflow is run again to
the same point. A checkpoint holds it, that of all hosts, and any number of hosts takes it up.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import jax

from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import FinishedWorkflow, Job, Params, PausedWorkflow, Response, Rollout, RolloutDriver
from memsearcher_jax.runtime.distributed import Hosts
from memsearcher_jax.types import (
    Completion,
    Context,
    FinishReason,
    Outcome,
    Passage,
    Problem,
    SearchResult,
    StopReason,
    Trajectory,
)

Problems = Callable[[int], Sequence[Problem]]
"""The problems of a step, all hosts' in order."""
FIXED_SETTINGS = ("agent.", "memalpha.", "data.", "seed", "sampling.context_tokens", "training.seq_len")
"""What carried trajectories depend on: another value would attach them to other problems, or not hold them."""


@dataclass(frozen=True)
class Group:
    """A problem of which at least one rollout has begun."""

    step: int  # to which the problem belongs
    index: int  # of the problem among those of the step
    oldest_version: int  # of its contexts; while none is complete, the step that opened the first
    problem: Problem
    rollouts: tuple[Rollout, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Groups begin, and are trained, in this order."""
        return self.step, self.index

    @property
    def complete(self) -> bool:
        return all(isinstance(one, FinishedWorkflow) for one in self.rollouts)


@dataclass(frozen=True)
class Carried:
    """What is carried from one step to the next, on one host or on all hosts together."""

    next_steps: dict[int, int]  # by index of a problem in its step: the first step whose problem there has not begun
    groups: tuple[Group, ...] = ()  # begun and not trained, in order

    def share(self, index: int, count: int) -> Carried:
        """The part of one of `count` hosts: a contiguous share of the problems of a step."""
        total = len(self.next_steps)
        first, last = (total * number // count for number in (index, index + 1))
        groups = tuple(group for group in self.groups if first <= group.index < last)
        return Carried({number: self.next_steps[number] for number in range(first, last)}, groups)

    def restarted(self, step: int) -> Carried:
        """The same problems, none of whose rollouts has begun, as if the rollout of `step` had taken them up."""
        fresh = [
            replace(group, oldest_version=step, rollouts=(PausedWorkflow(),) * len(group.rollouts))
            for group in self.groups
        ]
        return replace(self, groups=tuple(fresh))


def step_problems(loader: ProblemLoader, step: int, position: int, settings: RLConfig) -> Problems:
    """The problems of any step, where those of `step` begin at `position`."""
    count = settings.prompts_per_step

    @lru_cache(maxsize=2 * settings.carry_over + 1)
    def problems(number: int) -> list[Problem]:
        return loader.batch(position + (number - step) * count, count)

    return problems


def rollout_key(seed: int, step: int, settings: RLConfig, refill: int = 0) -> jax.Array:
    """The key for the draws of a step's rollout, or of its `refill`-th rollout of further problems.

    With carrying over, all steps have the same key: see `_draw_number`.
    """
    key = named_key(seed, "rollout", 0 if settings.carry_over else step)
    return jax.random.fold_in(key, refill) if refill else key


def nothing_carried(step: int, prompts: int) -> Carried:
    """The state of all hosts before `step`, if no trajectory is under way."""
    return Carried(dict.fromkeys(range(prompts), step))


class Driver(Protocol):
    """`RolloutDriver`, or a simulation of it."""

    def run_while(
        self,
        jobs: Iterable[Job],
        params: Params,
        key: jax.Array,
        *,
        should_continue: Callable[[], bool],
        version: int,
    ) -> Generator[tuple[int, Rollout], None, RolloutStats]: ...

    def trajectory(self, problem: Problem, rollout: int, finished: FinishedWorkflow) -> Trajectory: ...


def rollout(
    driver: Driver,
    carried: Carried,
    problems: Problems,
    params: Params,
    key: jax.Array,
    step: int,
    settings: RLConfig,
    notify: Callable[[str], None],
) -> tuple[list[Trajectory], Carried, RolloutStats]:
    """The trajectories that a step trains, group by group in order, what it carries on, and what it took."""
    groups = [*carried.groups, *_new_groups(carried, problems, step, settings)]
    needs = _needs(groups, len(carried.next_steps), step, settings)
    complete = {position for position, group in enumerate(groups) if group.complete}
    step_rollout = _StepRollout(groups, step, needs, complete)
    waiting = {
        _draw_number(group, copy, settings): (position, copy, one)
        for position, group in enumerate(groups)
        for copy, one in enumerate(group.rollouts)
        if isinstance(one, PausedWorkflow)
    }
    jobs = [Job(number, groups[position].problem, copy, one) for number, (position, copy, one) in waiting.items()]
    ended = driver.run_while(jobs, params, key, should_continue=step_rollout.should_continue, version=step)
    with contextlib.closing(ended):
        while True:
            try:
                number, one = next(ended)
            except StopIteration as end:
                stats = end.value
                break
            position, copy, _ = waiting[number]
            step_rollout.record(position, copy, one)
            notify(step_rollout.progress(settings))
    trained, kept = step_rollout.split_trained()
    next_steps = dict(carried.next_steps)
    for group in (*trained, *kept):
        next_steps[group.index] = max(next_steps[group.index], group.step + 1)
    trajectories = [
        driver.trajectory(group.problem, copy, one)
        for group in trained
        for copy, one in enumerate(group.rollouts)
        if isinstance(one, FinishedWorkflow)
    ]
    return trajectories, Carried(next_steps, tuple(kept)), stats


@dataclass
class _StepRollout:
    """The groups of one step's rollout: all that have begun, then those that may."""

    groups: list[Group]
    step: int
    needs: list[tuple[set[int], int]]  # see `_needs`
    complete: set[int]  # positions of groups that are
    begun: set[int] = field(default_factory=set)  # positions of groups that held slots in this rollout
    finished: int = 0

    @property
    def quota(self) -> int:
        """Groups that the step trains."""
        return max(count for _, count in self.needs)

    def should_continue(self) -> bool:
        """Whether the step needs more groups to be complete."""
        return any(len(self.complete & positions) < count for positions, count in self.needs)

    def progress(self, settings: RLConfig) -> str:
        """With carrying over, more trajectories may end than the step trains."""
        if settings.carry_over:
            return f"{len(self.complete)}/{self.quota} groups, {self.finished} trajectories"
        return f"{self.finished}/{self.quota * settings.group_size} trajectories"

    def record(self, position: int, copy: int, one: Rollout) -> None:
        """Records how one rollout of a group ended: it finished or was paused."""
        group = self.groups[position]
        rollouts = (*group.rollouts[:copy], one, *group.rollouts[copy + 1 :])
        versions = (context.version for rollout in rollouts for context in rollout.contexts)
        self.groups[position] = replace(
            group, rollouts=rollouts, oldest_version=min(versions, default=group.oldest_version)
        )
        self.begun.add(position)
        if self.groups[position].complete:
            self.complete.add(position)
        self.finished += isinstance(one, FinishedWorkflow)

    def split_trained(self) -> tuple[list[Group], list[Group]]:
        """The groups to train, those with the oldest contexts first and then by their order, and those to carry on."""
        first = sorted(
            self.complete, key=lambda position: (self.groups[position].oldest_version, self.groups[position].order)
        )
        trained = set(first[: self.quota])
        kept = [
            group
            for position, group in enumerate(self.groups)
            if position not in trained and (position in self.begun or group.oldest_version < self.step)
        ]
        return sorted((self.groups[position] for position in trained), key=lambda group: group.order), kept


def _needs(groups: Sequence[Group], quota: int, step: int, settings: RLConfig) -> list[tuple[set[int], int]]:
    """(positions, how many of these groups have to be complete) for which the rollout of a step waits.

    Of all groups `quota`, as many as the step has problems; and of those that will be too old in `later` steps, as many
    as these steps, with `quota` each, will not train. A step trains more than `quota` only where the number of hosts
    has changed at a resume.
    """
    bound = settings.carry_over if step < settings.steps - 1 else 0  # after the last step nothing is trained
    needs = [(set(range(len(groups))), quota)]
    for later in range(bound + 1):
        old = {position for position, group in enumerate(groups) if group.oldest_version <= step - bound + later}
        needs.append((old, len(old) - later * quota))
    return needs


def _new_groups(carried: Carried, problems: Problems, step: int, settings: RLConfig) -> list[Group]:
    """The groups that may begin in this step, none of a step after the run's last.

    Where other hosts had other shares before a resume, some of an earlier step may be among them.
    """
    last = min(step + settings.carry_over, settings.steps - 1)
    return [
        Group(number, index, step, problems(number)[index], (PausedWorkflow(),) * settings.group_size)
        for number in range(min(carried.next_steps.values(), default=step), last + 1)
        for index, first in carried.next_steps.items()
        if first <= number
    ]


def _draw_number(group: Group, copy: int, settings: RLConfig) -> int:
    """Seeds the draws of a rollout: the same in every step that samples it, and unique among all with the same key."""
    step = group.step if settings.carry_over else 0
    return (step * settings.prompts_per_step + group.index) * settings.group_size + copy


def to_text(carried: Carried, hosts: Hosts) -> str:
    """What all hosts carry, as text for a checkpoint: compressed JSON without the problems. All hosts must call it."""
    groups = [
        {
            "step": group.step,
            "index": group.index,
            "oldest_version": group.oldest_version,
            "rollouts": list(map(_to_json, group.rollouts)),
        }
        for group in carried.groups
    ]
    local = {"next_steps": list(carried.next_steps.items()), "groups": groups}
    parts = hosts.exchange(zlib.compress(json.dumps(local).encode()))
    assert parts is not None, "every host gives its part"
    contents = [json.loads(zlib.decompress(part)) for part in parts]
    groups = sorted((one for part in contents for one in part["groups"]), key=lambda one: (one["step"], one["index"]))
    together = {"next_steps": [pair for part in contents for pair in part["next_steps"]], "groups": groups}
    return base64.b64encode(zlib.compress(json.dumps(together).encode())).decode()


def check_carried(text: str, settings: RLConfig, changed: Sequence[tuple[str, Any, Any]] = ()) -> None:
    """Raises ValueError if a setting has changed without which the groups in `text` cannot go on.

    `changed`: (name, old value, new value) of all settings that differ from those of the run that saved `text`.
    """
    content = _content(text)
    next_steps, groups = content["next_steps"], content["groups"]
    group_size = len(groups[0]["rollouts"]) if groups else settings.group_size
    if (len(next_steps), group_size) != (settings.prompts_per_step, settings.group_size):
        raise ValueError(
            f"the checkpoint carries trajectories of steps with rl.prompts_per_step {len(next_steps)} and "
            f"rl.group_size {group_size}: leave them"
        )
    # Without groups under way, problems of the next steps may be trained already.
    carries = groups or len({step for _, step in next_steps}) > 1
    for name, old, new in changed if carries else ():
        if name.startswith(FIXED_SETTINGS) or (name == "rl.carry_over" and new < old):
            raise ValueError(
                f"{name} cannot change to {new!r} while the checkpoint carries trajectories: leave it at {old!r}"
            )


def restored(
    text: str, step: int, problems: Problems, driver: RolloutDriver, settings: RLConfig, hosts: Hosts
) -> Carried:
    """This host's part of what a checkpoint carries into `step`; nothing if it has no text."""
    carried = from_text(text, problems, driver) if text else nothing_carried(step, settings.prompts_per_step)
    return carried.share(hosts.index, hosts.count)


def from_text(text: str, problems: Problems, driver: RolloutDriver) -> Carried:
    """The inverse of `to_text`, of all hosts: workflows are run again on their responses."""
    content = _content(text)

    def group(fields: dict[str, Any]) -> Group:
        problem = problems(fields["step"])[fields["index"]]
        rollouts = tuple(_from_json(one, problem, driver) for one in fields["rollouts"])
        return Group(fields["step"], fields["index"], fields["oldest_version"], problem, rollouts)

    return Carried(dict(map(tuple, content["next_steps"])), tuple(map(group, content["groups"])))


def _content(text: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _to_json(one: Rollout) -> dict[str, Any]:
    """An outcome that the workflow did not return is stored; the others it returns again."""
    fields: dict[str, Any] = {
        "contexts": [vars(context) for context in one.contexts],  # `asdict` would copy token by token
        "responses": [
            [asdict(result) for result in response]
            if isinstance(response, tuple)
            else asdict(response) | {"finish": response.finish.value}
            for response in one.responses
        ],
        "finished": isinstance(one, FinishedWorkflow),
    }
    if isinstance(one, FinishedWorkflow) and one.outcome.stop in (StopReason.FAULT, StopReason.NOT_FINITE):
        fields["fault"] = {"stop": one.outcome.stop.value, "error": one.outcome.error}
    return fields


def _from_json(fields: dict[str, Any], problem: Problem, driver: RolloutDriver) -> Rollout:
    contexts = tuple(
        Context(tuple(one["ids"]), tuple(one["logprobs"]), tuple(one["sampled"]), one["version"])
        for one in fields["contexts"]
    )
    responses = tuple(map(_response, fields["responses"]))
    if not fields["finished"]:
        return PausedWorkflow(contexts, responses)
    if "fault" in fields:
        outcome = Outcome(StopReason(fields["fault"]["stop"]), error=fields["fault"]["error"])
    else:
        outcome = driver.outcome(problem, responses)
    return FinishedWorkflow(outcome, contexts, responses)


def _response(fields: Any) -> Response:
    if isinstance(fields, list):
        return tuple(
            SearchResult(tuple(Passage(**passage) for passage in one["passages"]), one["error"]) for one in fields
        )
    return Completion(**fields | {"finish": FinishReason(fields["finish"])})
