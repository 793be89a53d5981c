"""Asks one question and shows every turn as it happens: memory, thought, search, passages, rewritten memory.

python launch/ask.py --checkpoint runs/NAME "Who directed the film ...?"
python launch/ask.py --human "Who directed the film ...?"          # you are the policy
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cli
import tyro
from rich.console import Console

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.types import Outcome, Problem, Prompt, Reply, Say, Workflow
from memsearcher_jax.report import console as show
from memsearcher_jax.rl import build, start
from memsearcher_jax.rl.evaluate import roll_out
from memsearcher_jax.rl.keys import key_for
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for, search_all


@dataclass(frozen=True)
class Ask(cli.Command):
    """Ask one question and watch the agent at work."""

    question: tyro.conf.Positional[str] = ""
    """The question."""
    human: bool = False
    """You write the replies instead of a model."""


def main(argv: Sequence[str]) -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        with cli.one_line_errors():
            flags = cli.parse(Ask, argv)
            cli.refuse_resume(flags, "a question")
            config = cli.at_checkpoint(flags, needed=not flags.human)
            if not flags.question.strip():
                raise ValueError('there is no question: give one in quotes, such as "Who directed the film ...?"')
            problem = Problem("ask", flags.question, ())
            run = build.prepare(config, cli.workspace(flags, config, Path(scratch)), [problem])
            ask = by_hand if flags.human else by_model(run)
        show.show_question(problem, console)
        outcome = ask(run, problem, console)
    show.show_end(outcome, problem, console, reward=None, reason="")
    result = {"question": problem.question, "stop": outcome.stop.value, "answer": outcome.answer}
    cli.write_json(flags.json, result | {"turns": [asdict(turn) for turn in outcome.turns]})


def by_model(run: build.Run) -> Callable[[build.Run, Problem, Console], Outcome]:
    """The checkpoint answers, under evaluation's settings."""
    params = build.sampler_params(run, start.starting_params(run))
    driver = build.make_driver(run, evaluation=True)

    def ask(run: build.Run, problem: Problem, console: Console) -> Outcome:
        watching = RolloutDriver(
            driver.engine, driver.tokenizer, driver.searcher, lambda one: watched(driver.make_workflow(one), console)
        )
        (only,) = roll_out(watching, jobs_for([problem], 1), params, key_for(run.config.seed, "ask", 0), lambda _: None)
        return only.trajectory.outcome

    return ask


def by_hand(run: build.Run, problem: Problem, console: Console) -> Outcome:
    """A person is the policy. What the model would read is shown as it would read it."""
    console.print("Write each reply and end it with an empty line. A first reply goes on after <think>.", style="dim")

    def speak(say: Say) -> Reply:
        if not isinstance(say.text, Prompt):  # an opening says nothing that the turn's heading does not
            console.print(show.plain("".join(piece.text for piece in say.text), "dim"))
        return Reply("\n".join(written_lines()))

    make = build.workflow_maker(run.config.agent, run.prompts, run.tokenizer)
    return play(watched(make(problem), console), speak, lambda find: search_all(run.searcher, [find])[0])


def written_lines() -> Iterator[str]:
    """Lines from the keyboard up to an empty one, or to the end of the input."""
    while line := sys.stdin.readline().rstrip("\n"):
        yield line


def watched(workflow: Workflow, console: Console) -> Workflow:
    """The same workflow; every request and its answer is shown as it passes."""
    turn, memory, answer = 0, "", None
    while True:
        try:
            request = workflow.send(answer)
        except StopIteration as end:
            return end.value
        thinks = isinstance(request, Say) and opens_thought(request)
        if thinks:
            turn += 1
            memory = request.text.memory if isinstance(request.text, Prompt) else ""
            show.show_turn_start(turn, memory, console, has_memory=isinstance(request.text, Prompt))
        answer = yield request
        if thinks:
            show.show_reply(answer.text, console)
        elif isinstance(request, Say):
            show.show_rewrite(memory, protocol.memory(answer.text), answer.text, console)
        else:
            for query, found in zip(request.queries, answer, strict=True):
                show.show_search(query, found, console)


def opens_thought(say: Say) -> bool:
    """Whether the reply begins inside `<think>`; if not, it rewrites a memory."""
    text = say.text.suffix if isinstance(say.text, Prompt) else say.text[-1].text
    return text.endswith(protocol.THINK)


if __name__ == "__main__":
    main(sys.argv[1:])
