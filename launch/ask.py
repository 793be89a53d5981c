"""Asks one question and shows every turn as it happens: memory, thought, search, passages, rewritten memory.

python launch/ask.py --checkpoint runs/NAME "Who directed the film ...?"
python launch/ask.py --human "Who directed the film ...?"          # you are the policy
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cli
import tyro
from rich.console import Console

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.types import AgentConfig, Outcome, Problem, Prompt, Reply, Say, Workflow
from memsearcher_jax.report import console as show

if TYPE_CHECKING:
    from memsearcher_jax.rl.build import Run

Answer = Callable[[Problem, Console], Outcome]


@dataclass(frozen=True)
class Question(cli.Command):
    """Ask one question and watch the agent at work."""

    question: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="QUESTION")] = ""
    """The question, in quotes."""
    human: bool = False
    """You write the replies instead of a model."""


def main(argv: Sequence[str]) -> None:
    console = Console(highlight=False)
    with contextlib.ExitStack() as workspace:
        with cli.one_line_errors():
            flags = cli.parse(Question, argv)
            cli.refuse_resume(flags, "a question")
            if flags.run.agent.workflow == "memalpha":
                raise ValueError(
                    "agent.workflow memalpha reads streams and takes no single question: choose another one"
                )
            if not flags.question.strip():
                raise ValueError('there is no question: give one in quotes, such as "Who directed the film ...?"')
            if not flags.human:
                cli.need_weights(flags, otherwise=", or write the replies yourself with --human")
            problem = Problem("asked", flags.question, ())
            scratch = workspace.enter_context(tempfile.TemporaryDirectory())
            with cli.new_folder(flags.out, "ask") if flags.out else contextlib.nullcontext(Path(scratch)) as folder:
                # JAX takes seconds to load; --help and a wrong flag are answered without it.
                from memsearcher_jax.rl import build

                run = build.prepare(
                    flags.run, folder, training=False, asked=[problem], index=cli.standing_index(flags.run)
                )
                ask = by_hand(run) if flags.human else by_model(run)
        show.show_question(problem, console)
        outcome = ask(problem, console)
    show.show_end(outcome, problem, console, reward=None, reason="")
    result = {"question": problem.question, "stop": outcome.stop.value, "answer": outcome.answer}
    result |= {"error": outcome.error, "turns": [asdict(turn) for turn in outcome.turns]}
    cli.write_json(flags.out and flags.out / "answer.json", result)
    cli.write_json(flags.json, result)


def by_model(run: Run) -> Answer:
    """The checkpoint answers, under evaluation's settings, in no more slots than one question needs."""
    from memsearcher_jax.rl import build, start
    from memsearcher_jax.rl.evaluate import roll_out
    from memsearcher_jax.rl.keys import key_for
    from memsearcher_jax.rl.rollout import jobs_for

    sampling = replace(run.config.sampling, slots=run.meshes.local.shape["data"])
    run = replace(run, config=replace(run.config, sampling=sampling))
    params = build.sampler_params(run, start.starting_params(run))
    driver = build.make_driver(run, evaluation=True)

    agent = run.config.agent

    def ask(problem: Problem, console: Console) -> Outcome:
        watching = replace(driver, make_workflow=lambda one: watched(driver.make_workflow(one), agent, console))
        (only,) = roll_out(watching, jobs_for([problem], 1), params, key_for(run.config.seed, "ask", 0), lambda _: None)
        return only.trajectory.outcome

    return ask


def by_hand(run: Run) -> Answer:
    """A person is the policy. What the model would read is shown as it would read it."""
    from memsearcher_jax.rl import build
    from memsearcher_jax.rl.searches import search_all

    agent = replace(run.config.agent, max_turns=run.config.evaluation.max_turns)
    make_workflow = build.workflow_maker(agent, run.prompts, run.tokenizer)

    def ask(problem: Problem, console: Console) -> Outcome:
        console.print(show.plain(run.prompts.system, "dim"))
        console.print("Write each reply and end it with an empty line. A turn begins after <think>.")

        def speak(say: Say) -> Reply:
            if not isinstance(say.text, Prompt):  # an opening says nothing that the turn's heading does not
                console.print(show.plain("".join(piece.text for piece in say.text), "dim"))
            return Reply("\n".join(written_lines()))

        workflow = watched(make_workflow(problem), agent, console)
        return play(workflow, speak, lambda find: search_all(run.searcher, [find])[0])

    return ask


def written_lines() -> Iterator[str]:
    """Lines from the keyboard up to an empty one, or to the end of the input."""
    while line := sys.stdin.readline().rstrip("\n"):
        yield line


def watched(workflow: Workflow, agent: AgentConfig, console: Console) -> Workflow:
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
            show.show_turn_start(turn, memory, console, has_memory=agent.workflow == "memsearcher")
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
    cli.run(main)
