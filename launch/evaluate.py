"""Evaluates a checkpoint: what it answers right, benchmark by benchmark, and what that takes.

python launch/evaluate.py --checkpoint runs/NAME                              # on the run's own test questions
python launch/evaluate.py --checkpoint DIR --data FILE                        # on a JSONL file of questions
python launch/evaluate.py --checkpoint DIR --benchmarks all --data.root DIR   # on the seven benchmarks
python launch/evaluate.py --resume --out runs/EVALUATION                      # only the questions that are missing

docs/evaluation.md explains baselines (--workflow), sweeps of a setting (--sweep) and several hosts, which share the
questions by themselves where they form one slice, and by --share where they do not know of each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cli
import host
import sweep
import tyro
from rich.console import Console

from memsearcher_jax.agent.prompts import with_workflow
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.sources import BENCHMARKS, resolve
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.report.console import show_summary
from memsearcher_jax.report.evaluation import Evaluation, evaluation_of
from memsearcher_jax.report.evaluation_tables import show_evaluation
from memsearcher_jax.report.page_facts import Facts
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.report.streams import memories_by_source, memories_json, show_memories, without_nan
from memsearcher_jax.rl.run_folder import open_run_folder, with_own_tokenizer

if TYPE_CHECKING:
    from memsearcher_jax.rl.hosts import Hosts

WEIGHTS_FILE = "weights.json"  # which weights an evaluation is about; a run that trains on has others later
RESULTS_FILE, TRAJECTORIES = "results.json", "trajectories"
LINES = 20  # of progress, where it is told in lines
Summariser = Callable[[Sequence[Facts]], dict[str, float]]
_Word = tyro.conf.arg(metavar="WORD")


@dataclass(frozen=True)
class Evaluate(cli.Command):
    """Evaluate a checkpoint: EM, F1, cover-EM, precision, recall, turns, tokens, and why trajectories ended."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSONL file of questions (id, question, golden_answers); without it, the test questions of the settings."""
    benchmarks: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = ""
    """Benchmarks in --data.root, with commas between: nq,hotpotqa; nq:dev for another split; all for all seven."""
    workflow: Annotated[Literal["memsearcher", "react", "direct", "rag", "memalpha"] | None, _Word] = None
    """Which agent answers, with the packaged prompts for it; without it, that of the settings. With memalpha, streams
    are read; --memalpha.reader long_context or rag answers from the stream itself, to compare."""
    sweep: Annotated[str, tyro.conf.arg(metavar="SETTING=A,B,...")] = ""
    """One evaluation for each value of a setting, with a table and a plot: agent.memory_tokens=512,1024,2048."""
    share: Annotated[str, tyro.conf.arg(metavar="K/N")] = ""
    """Answer part K of N of the questions, K from 1; other hosts answer the others into the same folder."""

    def adjusted(self) -> Evaluate:
        if self.data and self.benchmarks:
            raise ValueError("--data and --benchmarks both say what to ask: leave one out")
        config = self.run
        if self.data or self.benchmarks:
            test = (str(self.data),) if self.data else benchmark_entries(self.benchmarks, config.data.root)
            config = replace(config, data=replace(config.data, train=(), test=test))
        if self.workflow:
            made = "streams" if self.workflow == "memalpha" else "world"
            data = replace(config.data, made=made)
            config = replace(config, agent=with_workflow(config.agent, self.workflow), data=data)
        return replace(self, run=config)


def benchmark_entries(names: str, root: str) -> tuple[str, ...]:
    """The entries of data.test for --benchmarks. Raises ValueError or OSError for one that is not there."""
    entries = BENCHMARKS if names == "all" else tuple(name.strip() for name in names.split(","))
    for entry in entries:
        if entry.partition(":")[0] not in BENCHMARKS:
            raise ValueError(
                f"--benchmarks: {entry!r} is no benchmark: choose from {', '.join(BENCHMARKS)}, or name a file with "
                "--data"
            )
        if entries.count(entry) > 1:
            raise ValueError(f"--benchmarks names {entry} twice")
        resolve(entry, "test", root)
    return entries


def main(argv: Sequence[str]) -> None:
    with contextlib.ExitStack() as job:
        with cli.one_line_errors():
            flags = cli.parse(Evaluate, argv)
            share = parse_share(flags.share)
            if not flags.resume:
                cli.need_weights(flags)
            if flags.share and not flags.out:
                raise ValueError("--share needs --out, the folder that all hosts write to")
            sweeps = flags.sweep or (flags.resume and sweep.is_sweep(flags.out))
            if flags.share and sweeps:
                raise ValueError("--share and --sweep do not go together: evaluate each value apart")
            if sweeps and flags.run.agent.workflow == "memalpha":
                raise ValueError(
                    "--sweep compares answers to questions, and memalpha reads streams: evaluate each value apart"
                )
            hosts = job.enter_context(host.joined(stops=False))
            if hosts.count > 1:
                refuse_apart(flags, sweeps, hosts.count)
                share = hosts.index, hosts.count
        if sweeps:
            sweep.run(flags, evaluate, Console(highlight=False))
            return
        done = evaluate(flags.run, flags.out, resume=flags.resume, share=share, hosts=hosts)
        if hosts.first:
            cli.write_json(flags.json, done.result)


def refuse_apart(flags: Evaluate, sweeps: bool, hosts: int) -> None:
    """Raises ValueError for what the hosts of one slice cannot do together."""
    if flags.share:
        raise ValueError(f"--share: these {hosts} hosts know of each other and share the questions: leave it out")
    if sweeps:
        raise ValueError(f"--sweep runs on one host, and these are {hosts}: evaluate each value apart")
    if flags.out is None:
        raise ValueError(f"--out is missing: name the one folder that all {hosts} hosts write to")


def parse_share(text: str) -> tuple[int, int]:
    """Number, from 0, and count of the parts that --share names. Raises ValueError."""
    part, slash, parts = text.partition("/")
    if not text:
        return 0, 1
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"--share {text}: write K/N with K from 1 to N, such as 1/4")
    return int(part) - 1, int(parts)


@dataclass(frozen=True)
class Evaluated:
    """What --json writes, and the numbers: None of streams, and where another host ends the evaluation."""

    result: dict[str, Any]
    numbers: Evaluation | None


def evaluate(
    config: RunConfig,
    out: Path | None,
    *,
    resume: bool,
    workspace: Path | None = None,
    share: tuple[int, int] = (0, 1),
    hosts: Hosts | None = None,
) -> Evaluated:
    """One evaluation, from its folder's beginning to its tables.

    `workspace` keeps data and index, if not `out`. `share` is the part of the questions that this process answers, of
    how many; `hosts` work side by side, and the first one ends it for all. What a user can put right ends the program
    in one line.
    """
    with cli.one_line_errors(), contextlib.ExitStack() as starting:
        if resume:
            refuse_changes(out, config)
        else:
            out = starting.enter_context(cli.new_folder(out, "evaluate"))

        # JAX takes seconds to load; --help and a wrong flag are answered without it.
        from memsearcher_jax.rl import build, source, start
        from memsearcher_jax.rl import evaluate as asking
        from memsearcher_jax.rl.hosts import Hosts

        hosts = hosts or Hosts()
        weights = {"checkpoint": config.model.path, "step": source.newest_step(config.model.path)}
        if resume:
            refuse_other_weights(out, weights)
        settings = with_own_tokenizer(out, config) if resume else config
        index = cli.standing_index(config)
        run = hosts.in_turn(lambda: build.prepare(settings, workspace or out, training=False, index=index))
        own, folder, problems = asking.Share(*share), out / TRAJECTORIES, asking.questions_of(run)
        done = asking.recorded(folder, problems, own)
        jobs = asking.missing(problems, done, own)
        # Hosts load weights together, also one that has nothing left to ask: nobody has begun to answer before that.
        if jobs or (hosts.count > 1 and len(done) < len(problems)):
            params = build.sampler_params(run, start.starting_params(run))
            driver = build.make_driver(run, evaluation=True)
            exam = start.open_exam(run, evaluation=True)
        if hosts.first:
            cli.tell_skipped(run.problems)
            if not resume:
                cli.write_json(out / WEIGHTS_FILE, weights)
                open_run_folder(out, config, run.tokenizer.folder)
        hosts.meet("the folder is there")
    if jobs:
        answers = asking.answer(run, driver, params, jobs, folder, own, exam)
        label = host.label(hosts, "evaluate")
        watch(label, answers, done, len(jobs), own.count(len(problems)), summariser(config))
    hosts.meet("all have answered")
    if own.hosts > 1:  # the others went on meanwhile
        done = asking.recorded(folder, problems, own)
    if missing := len(problems) - len(done):
        print(f"{out}: share {own.host + 1}/{own.hosts} is done; {missing} questions of other shares are missing")
        return Evaluated(weights | {"missing": missing}, None)
    if not hosts.first:
        return Evaluated(weights, None)
    return conclude(config, out, weights, [done[problem.id] for problem in problems])


def summariser(config: RunConfig) -> Summariser:
    """What makes numbers of facts: those of questions and those of streams differ."""
    from memsearcher_jax.rl import exam, score

    return exam.summarise_facts if config.agent.workflow == "memalpha" else score.summarise_facts


def watch(
    label: str,
    answers: Iterator[tuple[str, Facts]],
    done: dict[str, Facts],
    jobs: int,
    total: int,
    summarise: Summariser,
) -> None:
    """Puts the answers to so many jobs into `done` as they come, and shows how far it is, of `total` questions."""
    each, told = -(-jobs // LINES), 0
    with Progress(label, total, done=total - jobs) as progress:
        for number, (id, facts) in enumerate(answers, start=1):
            done[id] = facts
            progress.activity(f"{number}/{jobs} trajectories")
            if number % each == 0 or number == jobs:
                progress.advance(summarise(list(done.values())), by=number - told)
                told = number


def conclude(config: RunConfig, out: Path, weights: dict[str, Any], facts: Sequence[Facts]) -> Evaluated:
    """Writes the results and shows them."""
    summary, console = summariser(config)(facts), Console()
    result = weights | {"questions": len(facts), "metrics": without_nan(summary)}
    if config.agent.workflow == "memalpha":
        numbers, memories = None, memories_by_source(facts)
        show_memories(memories, console)
        result |= {"streams": memories_json(memories)}
    else:
        numbers = evaluation_of(
            facts,
            trained_on=config.evaluation.in_distribution,
            unnamed="world" if config.data.embedded else "questions",
            seed=config.seed,
        )
        show_evaluation(numbers, console)
        result |= {"evaluation": numbers.to_json()}
    console.print()
    show_summary(summary, console)
    cli.write_json(out / RESULTS_FILE, result)
    print(f"{out}: {len(facts)} questions answered by {config.model.path}; numbers in {out / RESULTS_FILE}")
    return Evaluated(result, numbers)


def refuse_changes(out: Path, config: RunConfig) -> None:
    """An evaluation under two kinds of settings would be about neither."""
    if not (out / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{out} holds no evaluation: there is no {WEIGHTS_FILE} in it")
    cli.refuse_changes(out, config, "evaluation")


def refuse_other_weights(out: Path, weights: dict) -> None:
    """Raises ValueError if the checkpoint has moved on since the evaluation in `out` was started."""
    file = out / WEIGHTS_FILE
    stored = parse_object(str(file), file.read_bytes())
    if stored != weights:
        raise ValueError(
            f"{out} evaluates step {stored.get('step')} of {stored.get('checkpoint')}, whose newest checkpoint is step "
            f"{weights['step']} now: start another evaluation"
        )


if __name__ == "__main__":
    cli.run(main)
