"""Evaluates a checkpoint on questions or streams: accuracy and its cost, benchmark by benchmark.

python launch/evaluate.py --checkpoint runs/NAME                              # on the run's own test questions
python launch/evaluate.py --checkpoint DIR --data FILE                        # on a JSONL file of questions
python launch/evaluate.py --checkpoint DIR --benchmarks all --data.root DIR   # on the seven benchmarks
python launch/evaluate.py --resume --out runs/EVALUATION                      # only the missing questions

docs/evaluate.md explains baselines (--workflow), sweeps of a setting (launch/sweep.py) and slices of several hosts,
which share the questions.
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.registry import agent_class
from memsearcher_jax.config import RunConfig, differences
from memsearcher_jax.data.benchmarks import BENCHMARKS, resolve
from memsearcher_jax.hosts import preemption
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.launch import cli, job_output, outputs, preconditions
from memsearcher_jax.logs.progress import Progress, announced
from memsearcher_jax.logs.run_facts import RESULTS_FILE, WEIGHTS_FILE
from memsearcher_jax.ranges import JoinSeconds
from memsearcher_jax.report.evaluation import show_results, summarize_evaluation
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.inputs import keep_inputs, with_own_inputs
from memsearcher_jax.runs.run_dir import open_run_folder, read_run_config
from memsearcher_jax.types import TrajectorySummary

if TYPE_CHECKING:
    from memsearcher_jax.hosts.distributed import Hosts
    from memsearcher_jax.rl.rewards import RewardFn
    from memsearcher_jax.rl.rollout import Job, Params, RolloutDriver
    from memsearcher_jax.rl.setup import Run

TRAJECTORIES = "trajectories"
MAX_UPDATES = 20  # of the progress; each computes all metrics
SERVICE_SETTINGS = (".api_key_env", ".timeout", ".max_concurrency", ".max_outage")  # which --resume may change


@dataclass(frozen=True)
class Evaluate(cli.Command, cli.ResumableSource):
    """Evaluate a checkpoint: EM, F1, cover-EM, precision, recall, turns, tokens and stop reasons."""

    data: cli.File = None
    """File of questions (.jsonl, .jsonl.gz, .json, .parquet), or of streams for memalpha. Default: the test questions
    of the settings."""
    benchmarks: Annotated[str, tyro.conf.arg(metavar="NAME,..."), cli.IS_PATH] = ""
    """Benchmarks in --data.root, or files, separated by commas: nq,hotpotqa; nq:dev for another split; all for the
    paper's seven. Others: web_questions, browsecomp_plus; for memalpha memalpha, memoryagentbench, longmemeval, locomo.
    """
    workflow: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """The agent to evaluate, with its packaged prompts. Default: that of the settings. memalpha reads streams; for
    comparison, --memalpha.answer_from long_context or rag answers from the stream itself."""
    join_timeout: JoinSeconds = preemption.JOIN_SECONDS
    """Seconds within which all hosts of one slice must start."""

    def with_settings(self) -> Evaluate:
        if self.data and self.benchmarks:
            raise ValueError("--data and --benchmarks exclude each other: omit one")
        config = self.run
        if self.data or self.benchmarks:
            test = (str(self.data),) if self.data else benchmark_entries(self.benchmarks, config.data.root)
            config = replace(config, data=replace(config.data, train=(), exclude="", test=test))
        if self.workflow:
            data = replace(config.data, synthetic=agent_class(self.workflow).synthetic_data)
            config = replace(config, agent=replace(config.agent, workflow=self.workflow), data=data)
        return replace(self, run=config)


def benchmark_entries(names: str, root: str) -> tuple[str, ...]:
    """The entries of data.test for --benchmarks: names of benchmarks, and files.

    Raises ValueError or OSError for an unknown or missing one.
    """
    entries: list[str] = []
    for name in names.split(","):
        if name.strip() == "all":
            entries += [benchmark for benchmark, kind in BENCHMARKS.items() if kind.in_paper]
        else:
            entries.append(name.strip())
    for entry in entries:
        if entry.partition(":")[0] not in BENCHMARKS and not Path(entry).is_file():
            known = ", ".join(BENCHMARKS)
            raise ValueError(f"--benchmarks: no benchmark or file {entry!r}: choose from all, {known}, or give a file")
        if entries.count(entry) > 1:
            raise ValueError(f"--benchmarks: {entry} is listed twice")
        resolve(entry, "test", hub.local_root(root))
    return tuple(entries)


def main(argv: Sequence[str]) -> None:
    with contextlib.ExitStack() as job:
        with cli.one_line_errors():
            flags = cli.parse(Evaluate, argv)
            if not flags.resume:
                preconditions.require_checkpoint(flags.run)
                if flags.out:
                    outputs.require_vacant(flags.out)
            preconditions.require_inputs(flags.run, questions="data.test")
            hosts = job.enter_context(preemption.joined(stoppable=False, timeout=flags.join_timeout))
        evaluate(flags, locks=job, hosts=hosts)


@dataclass(frozen=True)
class Sampler:
    """What answers questions, with the weights on the devices."""

    driver: RolloutDriver
    params: Params
    reward_fn: RewardFn


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, as a host has opened it."""

    flags: Evaluate
    hosts: Hosts
    out: Path
    run: Run
    weights: dict[str, Any]  # the checkpoint and its step
    done: dict[str, TrajectorySummary]  # of all hosts so far, by the question's id
    jobs: Sequence[Job]  # the questions that this host has to answer
    sampler: Sampler | None  # None where no host has any

    @property
    def folder(self) -> Path:
        """Of the trajectories."""
        return self.out / TRAJECTORIES

    @property
    def config(self) -> RunConfig:
        """The settings as they were given."""
        return self.flags.run

    @property
    def way_out(self) -> str:
        return f"fix the error and rerun with --resume --out {self.out}"


def evaluate(flags: Evaluate, *, locks: contextlib.ExitStack, hosts: Hosts) -> None:
    """Runs one evaluation in --out, which is locked until `locks` closes, writes its results and prints them.

    Each of the `hosts` answers its share of the questions; the first one writes the results. Errors of the user exit in
    one line.
    """
    with cli.one_line_errors(), contextlib.ExitStack() as startup, announced() as begin:
        if flags.resume:
            require_same_evaluation(flags.out, flags.run)
        out = job_output.open_output(flags, "evaluate", hosts, startup, locks)
        evaluation = open_evaluation(flags, hosts, out, begin)
    if evaluation.jobs:
        answer(evaluation)
    hosts.barrier("all hosts have answered")
    if hosts.first:
        finish(evaluation)


def open_evaluation(flags: Evaluate, hosts: Hosts, out: Path, begin: Callable[[str], None]) -> Evaluation:
    """Opens the model, the questions, what is already answered, and the weights if any question is not.

    `begin` announces each stage. Raises ValueError or OSError.
    """
    begin("loading JAX")  # seconds; --help and errors do not need it
    from memsearcher_jax.rl import answer_judge, evaluate, setup

    config = flags.run
    weights = weights_of_first_host(config, hosts)
    if flags.resume:
        require_same_weights(out, weights)
    settings = with_own_inputs(out, config) if flags.resume else config
    index = preconditions.reusable_index(config)
    begin("opening the model's files, the questions and the index")
    run = hosts.in_turn(lambda: setup.prepare(settings, out, training=False, index=index))
    if hosts.first:
        outputs.write_json(out / WEIGHTS_FILE, weights)
        _, notes = keep_inputs(out, config, weights["step"])
        for note in notes:
            print(f"{out}: {note}", file=sys.stderr)
    if asks_judge(config, run.agent):
        answer_judge.open_judge(config.judge)  # an error is found before the questions are answered
    problems = run.problems.test
    evaluate.drop_lost_trajectories(out / TRAJECTORIES, hosts)
    done = evaluate.read_summaries(out / TRAJECTORIES, problems)
    # Lost rows of other hosts count as missing on every host, whether they are removed yet or not.
    answered = {id for id in done if not done[id].stop.is_fault}
    jobs = evaluate.missing_jobs(problems, answered, hosts)
    is_complete = len(answered) == len(problems)
    sampler = None
    # All hosts load weights together, even those without jobs, before any of them starts to sample.
    if jobs or (hosts.count > 1 and not is_complete):
        begin("loading the weights")
        sampler = open_sampler(run, weights["step"])
    if hosts.first:
        preconditions.print_skipped(run.problems)
        if not is_complete:
            (out / RESULTS_FILE).unlink(missing_ok=True)  # of the evaluation that lost these questions
        if not flags.resume:
            open_run_folder(out, config, run.tokenizer.folder)
    hosts.barrier("the output directory exists")
    return Evaluation(flags, hosts, out, run, weights, done, jobs, sampler)


def weights_of_first_host(config: RunConfig, hosts: Hosts) -> dict[str, Any]:
    """The checkpoint, and its step as the first host sees it: a run that trains on may save another one meanwhile."""
    from memsearcher_jax.runs import load_weights

    newest_steps = hosts.exchange(json.dumps(load_weights.newest_step(config.model.path)).encode())
    assert newest_steps, "every host gives a step"
    return {"checkpoint": config.model.path, "step": json.loads(newest_steps[0])}


def open_sampler(run: Run, step: int | None) -> Sampler:
    """Loads the weights of the run's model, at this step of a checkpoint."""
    from memsearcher_jax.rl import setup, state

    params = setup.publish(run, state.initial_params(run, step))
    driver = setup.make_driver(run, evaluation=True)
    return Sampler(driver, params, state.open_reward_fn(run, evaluation=True))


def answer(evaluation: Evaluation) -> None:
    """Answers this host's questions; writes each trajectory as it ends, and shows the progress."""
    from memsearcher_jax.rl.evaluate import evaluate_to_folder
    from memsearcher_jax.rl.metrics import trajectory_metrics

    run = evaluation.run
    hosts = evaluation.hosts
    jobs = evaluation.jobs
    done = evaluation.done
    sampler = evaluation.sampler
    assert sampler is not None, "a host with questions has loaded the weights"
    share = len(range(hosts.index, len(run.problems.test), hosts.count))
    update_every = math.ceil(len(jobs) / MAX_UPDATES)
    answered_before = len(done)
    print(f"{evaluation.out}: {len(jobs):,} questions to answer", file=sys.stderr, flush=True)
    bar = Progress(preemption.label(hosts, "evaluate"), share, done=share - len(jobs))
    with cli.one_line_errors(evaluation.way_out), bar as progress:

        def on_answer(id: str, summary: TrajectorySummary) -> None:
            done[id] = summary
            number = len(done) - answered_before
            progress.activity(f"{number}/{len(jobs)} trajectories")
            if number % update_every == 0 or number == len(jobs):
                metrics = trajectory_metrics(list(done.values()), run.agent)
                progress.advance(metrics, by=number % update_every or update_every)

        evaluate_to_folder(
            run, sampler.driver, sampler.params, jobs, evaluation.folder, hosts, sampler.reward_fn, on_answer
        )


def finish(evaluation: Evaluation) -> None:
    """Writes the results of all hosts, and prints them."""
    from memsearcher_jax.rl.evaluate import read_summaries

    out = evaluation.out
    config = evaluation.config
    agent = evaluation.run.agent
    problems = evaluation.run.problems.test
    done = evaluation.done
    if evaluation.hosts.count > 1:  # the others have answered in the meantime
        done = read_summaries(evaluation.folder, problems)
    summaries = [done[problem.id] for problem in problems]
    result = evaluation.weights | evaluation_results(config, agent, summaries, out)
    if scored_by := agent.scored_by(problems):
        result["scored_by"] = scored_by
    if asks_judge(config, agent):
        with cli.one_line_errors(evaluation.way_out):
            result["judge"] = judged(evaluation)
    outputs.write_json(out / RESULTS_FILE, result)
    outputs.write_json(evaluation.flags.json, result)
    # Last: everything is written, should this fail.
    show_results(result, Console())
    answered_by = f"{result['questions']} questions answered by {config.model.path}"
    print(f"{out}: {answered_by}; results in {out / RESULTS_FILE}{job_output.write_report(out, out)}")
    if lost := result["lost"]:
        print(f"{out}: {lost} questions were lost to faults and enter no score; --resume asks them again")


def asks_judge(config: RunConfig, agent: Agent) -> bool:
    """Whether the judge scores the answers after all of them are written: not where rewards ask it themselves."""
    return config.judge.backend == "openai" and not agent.needs_completers


def judged(evaluation: Evaluation) -> dict[str, Any]:
    """How many answers the judge finds right; its judgements are written to a file."""
    from memsearcher_jax.rl import answer_judge

    config = evaluation.config
    answers = answer_judge.read_answers(evaluation.folder, default_dataset(config))
    judgements_file = evaluation.out / answer_judge.JUDGEMENTS_FILE
    judgements = answer_judge.judge_answers(answers, config.judge, judgements_file)
    return answer_judge.summarize_judgements(answers, judgements, config.seed)


def evaluation_results(
    config: RunConfig, agent: Agent, summaries: Sequence[TrajectorySummary], out: Path
) -> dict[str, Any]:
    """The metrics of all questions that were answered, and the tables of datasets. Exits if all questions were lost."""
    from memsearcher_jax.rl.metrics import trajectory_metrics

    counted = [summary for summary in summaries if not summary.stop.is_fault]
    lost = len(summaries) - len(counted)
    if not counted:
        raise SystemExit(
            f"error: all {lost} questions were lost to faults; fix that and rerun with --resume --out {out}"
        )
    metrics = trajectory_metrics(counted, agent)
    tables = summarize_evaluation(
        summaries,
        in_distribution=config.evaluation.in_distribution,
        default_dataset=default_dataset(config),
        seed=config.seed,
    )
    known_metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    return {"questions": len(counted), "lost": lost, "metrics": known_metrics, "evaluation": tables}


def default_dataset(config: RunConfig) -> str:
    """The name of the dataset of questions that name none."""
    return "encyclopedia" if config.data.is_synthetic else "questions"


def require_same_weights(out: Path, weights: Mapping[str, Any]) -> None:
    """Raises ValueError if the evaluation in `out` is of other weights than these."""
    file = out / WEIGHTS_FILE
    stored = parse_object(str(file), file.read_bytes())
    if stored != weights:
        raise ValueError(
            f"{out} evaluates step {stored.get('step')} of {stored.get('checkpoint')}, whose newest checkpoint is "
            f"now step {weights['step']}: start another evaluation"
        )


def require_same_evaluation(out: Path | None, config: RunConfig) -> None:
    """Raises ValueError or OSError unless `out` holds an evaluation with these settings. Services may have moved."""
    if out is None or not (out / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{out} holds no evaluation: there is no {WEIGHTS_FILE} in it")
    for name, stored, given in differences(read_run_config(out), config):
        service_moved = name.endswith(".url") and stored and given
        if not (service_moved or name.endswith(SERVICE_SETTINGS)):
            raise ValueError(f"{name} is {stored!r} in {out} and cannot change to {given!r}: start another evaluation")
