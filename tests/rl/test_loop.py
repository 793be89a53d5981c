"""The loop with scripted collaborators: what is saved, and with which status, however a run ends."""

import errno
import math
import threading
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import MemSearcher
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.logs import metrics as metrics_log
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import MetricsWriter, read_metrics
from memsearcher_jax.logs.trajectories import read_trajectories, step_path
from memsearcher_jax.rl import loop, recorder
from memsearcher_jax.rl.collector import Collector
from memsearcher_jax.rl.config import HealthConfig, RLConfig
from memsearcher_jax.rl.dynamic_sampling import DynamicSampling
from memsearcher_jax.rl.evaluate import Evaluator
from memsearcher_jax.rl.health import HealthMonitor, HealthState
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.rl.recorder import Recorder
from memsearcher_jax.rl.recovery import Recovery
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.training.checkpoint import DamagedCheckpointError
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory
from tests.support import NANO

STEPS, FAULTY = 8, 4  # the faults of a test begin in step 4
FULL = OSError(errno.ENOSPC, "No space left on device")


@dataclass
class FakeCheckpoints:
    """Checkpoints in memory; `failing` are the steps whose next save fails."""

    saved: dict = field(default_factory=dict)
    failing: set = field(default_factory=set)

    @property
    def newest(self):
        return max(self.saved, default=None)

    def save(self, step, train, model, meta):
        if step in self.failing:
            self.failing.remove(step)
            raise FULL
        self.saved[step] = (train, meta)

    def check(self):
        """No write is in the background."""

    wait = check

    def set_aside(self, step):
        return self.saved.pop(step, None) is not None

    def check_space(self, train):
        """There is any amount."""


class FakeState:
    """The policy is the number of its updates."""

    def __init__(self, config):
        self.run, self.step, self.train, self.params = SimpleNamespace(config=config), 0, 0, {}
        self.trained = []  # examples of each step
        self.metrics = {}  # of an update

    def publish(self, timer=None):
        """Nothing samples."""

    def update(self, examples, timer):
        self.train, self.trained = self.train + 1, [*self.trained, len(examples)]
        return {"updates": 1.0} | self.metrics

    def restore(self, train, rollbacks):
        self.train = train

    def weights_are_finite(self):
        return math.isfinite(self.train)


class Scripted:
    """A run of the real loop; tests replace what fails."""

    def __init__(self, out, health=None, **settings):
        config = RunConfig(
            rl=RLConfig(steps=STEPS, prompts_per_step=2, group_size=2, checkpoint_every=100, **settings),
            health=health or HealthConfig(patience=2),
        )
        problems = tuple(Problem(f"q{number}", "Who?", ("a",)) for number in range(40))
        run = SimpleNamespace(
            config=config, agent=MemSearcher(AgentConfig()), problems=SimpleNamespace(test=problems[:3])
        )
        self.state, self.hosts, self.notes, self.out = FakeState(config), Hosts(), [], out
        self.checkpoints, self.monitor = FakeCheckpoints(), HealthMonitor(config.health, self.notes.append)
        self.in_rollout = self.in_rewards = self.in_evaluation = lambda: None
        self.faulty = FAULTY
        self.stop, self.evaluations = StopReason.ANSWERED, 0
        driver = SimpleNamespace(engine=SimpleNamespace(release=lambda: None), trajectories=self.roll_out)
        self.collector = Collector(run, driver, self.reward, ProblemLoader(problems, 0), self.hosts)
        self.evaluator = Evaluator(run, driver, self.reward_evaluation, self.hosts)

    def roll_out(self, jobs, params, key, notify, version=0):
        if self.state.step >= self.faulty:
            self.in_rollout()
        stop = self.stop if self.state.step >= self.faulty else StopReason.ANSWERED
        context = Context((1, 2), (0.0, -1.0), (False, True), version)
        done = [Trajectory(job.problem, job.rollout, Outcome(stop, str(job.rollout)), (context,), "") for job in jobs]
        return done, RolloutStats(seconds=1.0)

    def reward(self, trajectories, key, notify, params):
        if self.state.step >= self.faulty:
            self.in_rewards()
        rewards = [math.nan if one.outcome.stop.is_fault else float(one.outcome.answer) for one in trajectories]
        return [ScoredTrajectory(one, reward) for one, reward in zip(trajectories, rewards, strict=True)]

    def reward_evaluation(self, trajectories, key, notify, params):
        self.evaluations += 1
        if self.state.step >= self.faulty:
            self.in_evaluation()
        return self.reward(trajectories, key, notify, params)

    def resumed(self):
        """The same run as a later process finds it, which resumes from the newest checkpoint."""
        health = self.state.run.config.health
        later = Scripted(self.out, health, evaluate_every=self.state.run.config.rl.evaluate_every)
        later.faulty, later.checkpoints.saved = math.inf, dict(self.checkpoints.saved)
        later.state.step = self.checkpoints.newest or 0
        if later.state.step:
            later.state.train, meta = self.checkpoints.saved[later.state.step]
            later.monitor.state = HealthState(**meta["health"])
        return later

    def meta(self):
        return {"of": "run"} | self.collector.meta() | {"health": asdict(self.monitor.state)}

    def train(self):
        progress = SimpleNamespace(activity=lambda text: None, advance=lambda metrics: None, note=self.notes.append)
        with MetricsWriter(self.out, resume_step=self.state.step or None, trackers=()) as self.writer:
            recorder = Recorder(self.out, self.checkpoints, progress, self.hosts, self.meta, self.writer)
            recovery = Recovery(self.monitor, self.checkpoints)
            return loop.train(self.state, self.collector, recovery, self.evaluator, recorder)

    def steps(self):
        """The steps whose metrics, and those whose trajectories, are written."""
        steps = [step["step"] for step in read_metrics(self.out / "metrics.jsonl")]
        return steps, [step for step in range(STEPS) if step_path(self.out, step).is_file()]


@pytest.fixture
def scripted(tmp_path):
    return lambda *args, **settings: Scripted(tmp_path, *args, **settings)


def refused():
    raise ConnectionError("none of 16 answers came")


def search_outage(run):
    run.stop = StopReason.SEARCH_FAILED


def answerer_outage(run):
    run.in_rewards = refused


def answerer_outage_in_an_evaluation(run):
    run.in_evaluation = refused


def error_in_a_rollout(run):
    run.in_rollout = lambda: 1 / 0


def numbers_of_an_own_agent(step, run):
    run.collector.run.agent = SimpleNamespace(numbers=lambda summary: {"n": 1 / (run.state.step < step)})


def interrupt(run):
    run.in_rollout = lambda: run.hosts.stop(EndReason.INTERRUPT, "Ctrl-C") or run.hosts.check()


def skipped_updates(run):
    run.state.metrics = {"updates": 2.0, "skipped_updates": 2.0}


@pytest.mark.parametrize(
    ("fault", "status", "step"),
    [
        (search_outage, 85, FAULTY + 2),  # patience is 2
        (answerer_outage, 85, FAULTY),
        (answerer_outage_in_an_evaluation, 85, FAULTY + 2),
        (error_in_a_rollout, 1, FAULTY),
        (partial(numbers_of_an_own_agent, FAULTY), 1, FAULTY),
        (partial(numbers_of_an_own_agent, 6), 1, 6),  # of an evaluation
        (interrupt, 130, FAULTY),
        (skipped_updates, 1, 2),  # all from the first step on
    ],
)
def test_healthy_steps_survive_whatever_ends_the_run_from_outside(fault, status, step, scripted):
    run = scripted(evaluate_every=3)
    fault(run)
    with pytest.raises(RunEnded, match=rf"^stopped after step {step} \(.*\); checkpoint saved$") as end:
        run.train()
    assert end.value.reason.status == status
    (train, meta) = run.checkpoints.saved[step]
    assert (train, meta["position"], meta["of"]) == (step, 2 * step, "run"), "of the step that comes next, nothing"
    assert meta["health"].keys() == vars(HealthState()).keys()
    assert run.steps() == (list(range(step)), list(range(step)))
    assert run.state.trained[:2] == [4] * 2


def interrupt_in_an_evaluation(run):
    run.in_evaluation = lambda: run.hosts.stop(EndReason.SIGNAL, "SIGTERM") or run.hosts.check()


def search_outage_in_an_evaluation(run):
    """Also in the one training step before it, which alone does not end the run."""
    run.stop, run.faulty = StopReason.SEARCH_FAILED, run.faulty - 1


@pytest.mark.parametrize("step", [0, FAULTY, STEPS], ids=["before the first step", "in the middle", "after the last"])
@pytest.mark.parametrize(
    "fault", [answerer_outage_in_an_evaluation, search_outage_in_an_evaluation, interrupt_in_an_evaluation]
)
def test_a_resumed_run_makes_the_evaluation_that_its_end_has_interrupted(fault, step, scripted):
    run = scripted(HealthConfig(patience=2, on_collapse="rollback"), evaluate_every=2)
    run.faulty = step
    fault(run)
    with pytest.raises(RunEnded, match=rf"^stopped after step {step} ") as end:
        run.train()
    assert end.value.reason.status == 85
    resumed = run.resumed()
    resumed.train()
    rows = read_metrics(run.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["step"] for row in rows if row.get("test/reward") == 0.0] == [1, 3, 5, 7]
    assert resumed.evaluations == 1 + (STEPS - step) // 2, "the interrupted one, and each that was due later"
    assert resumed.monitor.state.best_step == 0 and resumed.monitor.state.evaluated == STEPS


def test_an_outage_teaches_nothing(scripted):
    """What it leaves of a step are the trajectories that did not search."""
    run = scripted()
    run.stop = StopReason.SEARCH_FAILED
    with pytest.raises(RunEnded):
        run.train()
    assert run.state.trained == [4] * FAULTY + [0, 0]


def test_weights_that_collapse_are_not_saved(scripted):
    run = scripted(HealthConfig(max_entropy=0.1, patience=3, on_collapse="stop"))
    run.state.metrics = {"entropy": 9.0}
    with pytest.raises(RunEnded, match=r"stopped after step 3 \(step 2: entropy .*\); there is no checkpoint"):
        run.train()
    assert run.checkpoints.saved == {}
    assert run.steps() == ([0, 1, 2], [0, 1, 2]), "what shows why it collapsed"


def break_logits(run):
    run.stop = StopReason.NOT_FINITE


def break_weights(run):
    """By an update that is infinitely large."""
    run.state.update = lambda examples, timer: break_update(run)


def break_update(run):
    if run.state.step < run.faulty:
        return FakeState.update(run.state, [], None)
    run.state.train = math.nan
    return {"updates": 1.0, "weights_not_finite": 1.0}


@pytest.mark.parametrize("on_collapse", ["warn", "stop", "rollback"])
@pytest.mark.parametrize(
    ("fault", "stopped", "reason"),
    [
        (break_logits, FAULTY + 1, "step 4: the policy's logits were not finite in 100% of the trajectories"),
        (break_weights, FAULTY + 1, "step 4: the weights are not finite"),
    ],
)
def test_a_policy_that_is_not_finite_is_a_collapse_and_is_not_saved(fault, stopped, reason, on_collapse, scripted):
    """At once, whatever `on_collapse` is: nothing that the run does would mend it. Status 85 would restart it."""
    run = scripted(HealthConfig(patience=2, on_collapse=on_collapse))
    run.checkpoints.saved = {0: (0, {})}
    fault(run)
    with pytest.raises(RunEnded) as end:
        run.train()
    assert end.value.reason is EndReason.COLLAPSE and end.value.reason.status == 1
    assert str(end.value).startswith(f"stopped after step {stopped} ({reason}; ")
    assert str(end.value).endswith("the newest checkpoint is of step 0") and set(run.checkpoints.saved) == {0}
    assert run.state.trained == [4 if fault is break_logits else 0] * FAULTY + [0] * (fault is break_logits)


@pytest.mark.parametrize("fault", [break_logits, break_weights])
def test_a_policy_that_is_not_finite_rolls_back(fault, scripted):
    """To the best evaluation, at once. The rollback mends what is wrong here."""
    run = scripted(HealthConfig(patience=2, on_collapse="rollback"), evaluate_every=3)
    fault(run)
    restored = []

    def restore_best(state, timer):
        restored.append((state.step, run.monitor.state.best_step))
        run.stop, run.faulty, state.train = StopReason.ANSWERED, math.inf, 0

    with mock.patch.object(Recovery, "restore_best", lambda self, state, timer: restore_best(state, timer)):
        run.train()
    assert restored == [(FAULTY + 1, 0)] and run.monitor.state.rollbacks == 1
    assert set(run.checkpoints.saved) == {0, STEPS}
    alarms = [row["alarms"] for row in read_metrics(run.out / "metrics.jsonl")]
    assert alarms == [float(step == FAULTY) for step in range(STEPS)]


@pytest.mark.parametrize("on_collapse", ["warn", "rollback"])
def test_a_checkpoint_whose_logits_are_not_finite_is_set_aside(on_collapse, scripted):
    """Its weights were finite when they were saved: the next rollout shows what they are."""
    run = scripted(HealthConfig(on_collapse=on_collapse), evaluate_every=8 if on_collapse == "rollback" else 0)
    run.state.run.config = replace(run.state.run.config, rl=replace(run.state.run.config.rl, checkpoint_every=1))
    run.stop = StopReason.NOT_FINITE
    ended = pytest.raises(RunEnded) if on_collapse == "warn" else nullcontext()

    def restore_best(state, timer):
        assert FAULTY not in run.checkpoints.saved, "it is no candidate of a rollback"
        run.stop = StopReason.ANSWERED

    with mock.patch.object(Recovery, "restore_best", lambda self, state, timer: restore_best(state, timer)), ended:
        run.train()
    assert FAULTY not in run.checkpoints.saved and FAULTY - 1 in run.checkpoints.saved
    renamed = f"the logits of the checkpoint of step {FAULTY} are not finite: renamed to {FAULTY}.broken"
    assert run.notes[0] == renamed
    if on_collapse == "rollback":
        assert run.checkpoints.newest == STEPS


def with_broken_evaluation(run, step):
    """The run, in whose evaluation after this step no logits are finite, until it has rolled back."""
    restored = []

    def trajectories(*args):
        done, stats = run.roll_out(*args)
        if run.state.step == step and not restored:
            done = [replace(trajectory, outcome=Outcome(StopReason.NOT_FINITE)) for trajectory in done]
        return done, stats

    run.faulty = math.inf
    run.evaluator.driver = SimpleNamespace(engine=run.collector.driver.engine, trajectories=trajectories)
    return mock.patch.object(Recovery, "restore_best", lambda self, state, timer: restored.append(state.step)), restored


@pytest.mark.parametrize(("step", "on_collapse"), [(0, "rollback"), (FAULTY, "warn"), (STEPS, "warn")])
def test_an_evaluation_that_is_not_finite_ends_the_run(step, on_collapse, scripted):
    """Also the one before the first step, and the one after the last, which no rollout follows."""
    run = scripted(HealthConfig(on_collapse=on_collapse), evaluate_every=4)
    patch, restored = with_broken_evaluation(run, step)
    with (
        patch,
        pytest.raises(RunEnded, match=rf"^stopped after step {step} \(the evaluation after step {step}:") as end,
    ):
        run.train()
    assert end.value.reason is EndReason.COLLAPSE and not restored
    assert step not in run.checkpoints.saved


@pytest.mark.parametrize("step", [FAULTY, STEPS])
def test_an_evaluation_that_is_not_finite_rolls_back(step, scripted):
    run = scripted(HealthConfig(on_collapse="rollback"), evaluate_every=4)
    patch, restored = with_broken_evaluation(run, step)
    with patch:
        run.train()
    assert restored == [step] and run.monitor.state.best_step == 0 and run.monitor.state.rollbacks == 1


def test_weights_that_are_not_finite_are_never_saved(scripted):
    """Whatever has made them so, and however the run ends."""
    run = scripted()
    run.in_rollout = lambda: run.hosts.stop(EndReason.SIGNAL, "SIGTERM") or setattr(run.state, "train", math.nan)
    with pytest.raises(RunEnded, match="the weights are not finite") as end:
        run.train()
    assert end.value.reason is EndReason.COLLAPSE and run.checkpoints.saved == {}


def test_a_rollback_tries_the_checkpoints_nearest_to_the_best_first(scripted, one_device):
    """The newest ones may be of the policy that collapses, the oldest ones have learned little."""
    run, tried = scripted(HealthConfig(on_collapse="rollback"), evaluate_every=1), []

    def restore(step, model, target):
        tried.append(step)
        raise DamagedCheckpointError(f"{step} is damaged")

    checkpoints = SimpleNamespace(wait=lambda: None, steps=lambda: [80, 60, 40, 20, 0], restore=restore)
    run.state.run.meshes = SimpleNamespace(train=one_device)
    run.state.run.config = replace(run.state.run.config, model=NANO)
    run.monitor.state.best_step = 40
    with pytest.raises(RunEnded, match="no rollback is possible: 80 is damaged"):
        Recovery(run.monitor, checkpoints).restore_best(run.state, Timer())
    assert tried == [40, 20, 60, 0, 80]


def test_a_checkpoint_that_cannot_be_written_is_written_after_the_next_step(scripted):
    run = scripted()
    run.state.run.config = replace(run.state.run.config, rl=replace(run.state.run.config.rl, checkpoint_every=4))
    run.checkpoints.failing = {4, 8}
    run.train()
    assert set(run.checkpoints.saved) == {5, 8}, "the last one once more at the end"
    assert run.checkpoints.saved[5][1]["position"] == 10
    assert run.notes == ["not written yet, the next step tries again: No space left on device"]


def test_a_disk_that_stays_full_is_an_error_at_the_end(scripted):
    run = scripted()
    run.checkpoints.save = lambda *_: (_ for _ in ()).throw(FULL)
    with pytest.raises(OSError, match="No space left"):
        run.train()
    assert run.steps() == (list(range(STEPS)), list(range(STEPS)))


def test_metrics_and_trajectories_that_cannot_be_written_are_written_later(scripted, monkeypatch):
    run, failures = scripted(), {"trajectories": 3, "metrics": 3}

    def fails(what):
        failures[what] -= 1
        if run.state.step > 1 and failures[what] >= 0:
            raise FULL

    for module, what in ((recorder, "trajectories"), (metrics_log, "metrics")):
        monkeypatch.setattr(module, "atomic_write", lambda *args, what=what: fails(what) or atomic_write(*args))
    run.train()
    assert run.steps() == (list(range(STEPS)), list(range(STEPS)))
    assert [one.trajectory.rollout for one in read_trajectories(step_path(run.out, 2))] == [0, 1] * 2
    assert len(run.notes) == 1


def test_trajectories_are_compressed_while_the_devices_train(scripted, monkeypatch):
    updating, compressing = threading.Event(), threading.Event()
    run = scripted()
    update, compress = run.state.update, recorder.compress_trajectories

    def update_and_wait(examples, timer):
        updating.set()
        assert compressing.wait(30), "compression did not begin before the update ended"
        return update(examples, timer)

    def wait_and_compress(scored):
        assert updating.wait(30), "the update did not begin before the compression ended"
        compressing.set()
        return compress(scored)

    run.state.update = update_and_wait
    monkeypatch.setattr(recorder, "compress_trajectories", wait_and_compress)
    run.train()
    assert run.steps() == (list(range(STEPS)), list(range(STEPS)))
    written = [one.trajectory.problem.id for one in read_trajectories(step_path(run.out, 0))]
    assert len(written) == 4 and len(set(written)) == 2


def test_trajectories_that_cannot_be_written_as_json_end_the_run_after_their_step(scripted):
    run = scripted()
    roll_out = run.collector.driver.trajectories

    def with_metadata(*args, **settings):
        done, stats = roll_out(*args, **settings)
        metadata = {"value": object()} if run.state.step >= FAULTY else {}
        return [replace(one, problem=replace(one.problem, metadata=metadata)) for one in done], stats

    run.collector.driver.trajectories = with_metadata
    with pytest.raises(RunEnded, match="cannot be written as JSON") as end:
        run.train()
    assert end.value.reason is EndReason.FAILURE
    assert max(run.checkpoints.saved) == FAULTY + 1
    assert run.steps() == (list(range(FAULTY + 1)), list(range(FAULTY)))


def test_a_run_that_can_roll_back_begins_with_a_target(scripted):
    """Also after a change of what is rewarded: none of the earlier evaluations is compared with."""
    run = scripted(HealthConfig(on_collapse="rollback"), evaluate_every=100)
    run.train()
    assert run.monitor.state.best_step == 0 and 0 in run.checkpoints.saved
    changed = scripted(HealthConfig(on_collapse="rollback"), evaluate_every=100)
    changed.out = run.out / "changed"
    changed.monitor.state, changed.state.step = run.monitor.state.without_rewards(), 5
    changed.checkpoints.saved = {0: None, 5: None}
    changed.train()
    assert changed.monitor.state.best_step == 5


def test_groups_without_spread_are_replaced(scripted):
    """A third of the problems have spread. What is sampled and trained follows from their order."""
    run, keys = scripted(refill=2), []

    def has_spread(problem):
        return int(problem.id.removeprefix("q")) % 3 == 0

    def roll_out(jobs, params, key, *rest):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return run.roll_out(jobs, params, key, *rest)

    def reward(trajectories, key, notify, params):
        rewards = [float(has_spread(one.problem) and one.rollout == 0) for one in trajectories]
        return [ScoredTrajectory(*pair) for pair in zip(trajectories, rewards, strict=True)]

    first, driver = run.collector, SimpleNamespace(engine=run.collector.driver.engine, trajectories=roll_out)
    run.collector = DynamicSampling(first.run, driver, reward, first.loader, run.hosts)
    run.train()
    order, position = first.loader.batch(0, 6 * STEPS), 0
    for step, row in enumerate(read_metrics(run.out / "metrics.jsonl")):
        sampled, missing, rounds = [], 2, 0
        while missing and rounds <= 2:
            sampled += order[position : position + missing]
            position, rounds = position + missing, rounds + 1
            missing = 2 - sum(map(has_spread, sampled))
        written = list(read_trajectories(step_path(run.out, step)))
        assert [one.trajectory.problem.id for one in written[::2]] == [problem.id for problem in sampled]
        spread = sum(map(has_spread, sampled))
        assert (row["refills"], row["replaced_groups"]) == (rounds - 1, len(sampled) - 2), (
            "not those that nothing replaced"
        )
        assert row["frac_mixed_groups"] == spread / len(sampled) and run.state.trained[step] == 2 * spread
    assert run.checkpoints.saved[STEPS][1]["position"] == position > 2 * STEPS
    assert len(set(keys)) == len(keys) > STEPS, "every round has draws of its own"
