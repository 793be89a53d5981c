"""Asks one question and prints each turn as it happens: memory, thought, search, passages, rewritten memory.

python launch/ask.py --checkpoint runs/NAME "Who directed the film ...?"
python launch/ask.py --checkpoint runs/MEMALPHA --files DIR "..."   # from a memory of the documents in DIR
python launch/ask.py --human "Who directed the film ...?"          # you write the policy's replies
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.live import Live

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import Agent, QuestionAgent, ReadingAgent
from memsearcher_jax.agent.memagent import chunks_of
from memsearcher_jax.agent.run import run_workflow, starts_turn
from memsearcher_jax.config import agent_of
from memsearcher_jax.data.documents import (
    DOCUMENT_LIBRARIES,
    WORD_TOKENS,
    FolderReading,
    UnreadableDocument,
    find_documents,
    passages,
    read_document,
)
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.python_files import described
from memsearcher_jax.report import console as show
from memsearcher_jax.types import (
    Call,
    Completion,
    Generate,
    Outcome,
    Overrides,
    Problem,
    Prompt,
    StopReason,
    TokenCounter,
    Workflow,
)

if TYPE_CHECKING:
    from memsearcher_jax.rl.setup import Run

MAX_LIVE_CHARACTERS = 1_000  # of a text that grows; a terminal cannot redraw lines that have left its screen


@dataclass(frozen=True)
class Ask(cli.Command):
    """Ask one question and watch the agent."""

    question: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="QUESTION")] = ""
    """The question, in quotes."""
    human: bool = False
    """Write the replies yourself instead of a model."""
    files: cli.Directory = None
    """memalpha: read the Markdown, text, HTML, PDF, Word, PowerPoint and EPUB files of this directory into a memory,
    and answer from it."""


def main(argv: Sequence[str]) -> None:
    console = Console(highlight=False)
    with contextlib.ExitStack() as resources:
        with cli.one_line_errors():
            flags = cli.parse(Ask, argv)
            agent = agent_of(flags.run)
            check(flags, agent)
            problem = Problem("asked", flags.question, ())
            scratch = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            with announced() as begin:
                begin("loading JAX")  # seconds; --help and errors do not need it
                from memsearcher_jax.rl import setup
                from memsearcher_jax.runs import hub

                begin("opening the model's files, the documents and the index")
                if isinstance(agent, ReadingAgent) and flags.files:
                    tokenizer = setup.open_tokenizer(hub.local(flags.run).model)
                    problem = agent.text_problem(
                        document_chunks(flags.files, agent.chunk_tokens, tokenizer, flags.run.data.malformed),
                        flags.question,
                    )
                index = preconditions.reusable_index(flags.run)
                run = setup.prepare(flags.run, scratch, training=False, questions=[problem], index=index)
                answer = human_answer(run) if flags.human else model_answer(run, begin)
        show.show_question(problem, console)
        outcome = answer(problem, console)
    show.show_end(outcome, problem, console, reward=None, reason="")
    if outcome.stop is StopReason.ANSWERED and not isinstance(agent, ReadingAgent):
        show.show_sources(outcome, console)
    result = {"question": flags.question, "stop": outcome.stop.value, "answer": outcome.answer}
    result |= {"error": outcome.error, "turns": [asdict(turn) for turn in outcome.turns]}
    outputs.write_json(flags.json, result)


def check(flags: Ask, agent: Agent) -> None:
    """Raises ValueError or OSError, in one line, for flags that contradict each other or the agent."""
    if isinstance(agent, ReadingAgent):
        if not (flags.files and flags.files.is_dir()):
            name = flags.run.agent.workflow
            raise ValueError(f"agent.workflow {name} reads texts: give a directory of documents with --files")
        if flags.run.memalpha.answer_from != "memory":
            raise ValueError("questions are answered from the memory: omit memalpha.answer_from")
        preconditions.require_extra("documents", *DOCUMENT_LIBRARIES)
        if flags.human:
            raise ValueError("--human writes replies of search agents: choose another agent.workflow")
    elif flags.files:
        raise ValueError("--files fills a memory of documents: it needs an agent that reads, such as memalpha")
    if not flags.question.strip():
        raise ValueError('the question is missing: give it in quotes, such as "Who directed the film ...?"')
    if flags.human and flags.run.agent.harness:
        raise ValueError("--human writes replies of agents of this package: omit agent.harness")
    if flags.human and not sys.stdin:
        raise ValueError("--human reads your replies from the standard input, which is closed: open it")
    if not flags.human:
        preconditions.require_checkpoint(flags.run, alternative=", or write the replies yourself with --human")
        preconditions.require_inputs(flags.run)


def model_answer(run: Run, begin: Callable[[str], None]) -> Callable[[Problem, Console], Outcome]:
    """The checkpoint is the policy, with evaluation's settings and as few slots as possible."""
    from memsearcher_jax.rl import setup, state
    from memsearcher_jax.rl.rng import named_key
    from memsearcher_jax.rl.rollout import make_jobs

    config = run.config
    sampling = replace(config.sampling, slots=run.meshes.local.shape["data"])
    run = replace(run, config=replace(config, sampling=sampling))
    begin("loading the weights")
    params = setup.publish(run, state.initial_params(run))
    driver = setup.make_driver(run, evaluation=True)
    assert driver.sampling is not None, "make_driver sets it"
    temperature = driver.sampling.temperature
    top_p = driver.sampling.top_p
    reward_fn = state.open_reward_fn(run, evaluation=True)  # its answerer answers from a memory

    def answer(problem: Problem, console: Console) -> Outcome:
        @contextlib.contextmanager
        def streamed(request: Generate) -> Iterator[Generate]:
            """Shows the end of the text in a terminal while it grows."""
            with announced() as begin, Live(console=console, transient=True) as live:
                begin("generating; the first time, compiling")

                def progress(ids: Sequence[int]) -> bool:
                    text = run.tokenizer.completion(ids).text if ids else ""
                    live.update(show.safe_text(text[-MAX_LIVE_CHARACTERS:], "dim"))
                    return False

                yield replace(request, overrides=Overrides(0, temperature, top_p, progress))

        def start_shown(started: Problem) -> Workflow:
            return show_workflow(driver.start(started), run, console, streamed)

        shown = replace(driver, start=start_shown)
        key = named_key(config.seed, "ask", 0)
        (trajectory,), _ = shown.trajectories(make_jobs([problem], 1), params, key, lambda line: None)
        if config.agent.harness:  # whose requests are known when it has ended
            show_requests(trajectory.outcome, console)
        if trajectory.outcome.stop is not StopReason.STREAM_READ or not isinstance(run.agent, ReadingAgent):
            return trajectory.outcome
        memory = run.agent.remembered(trajectory.outcome)
        with announced() as begin:
            begin("answering from the memory")
            (completion,) = reward_fn.answer([(memory, problem.question)], key)
        stop = StopReason.FAULT if completion.error else StopReason.ANSWERED
        return replace(trajectory.outcome, stop=stop, answer=completion.text, error=completion.error)

    return answer


def show_requests(outcome: Outcome, console: Console) -> None:
    """Prints what a harness asked, its last message each time, and the replies."""
    for number, turn in enumerate(outcome.turns, start=1):
        show.show_turn_start(number, "", console, has_memory=False)
        console.print(show.safe_text(turn.observation, "dim"))
        show.show_reply(turn.reply, console)


def document_chunks(folder: Path, limit: int, token_counter: TokenCounter, malformed: str) -> tuple[str, ...]:
    """The texts of all documents in order, in chunks of at most `limit` tokens that end where a sentence ends.

    Only longer sentences are cut. `malformed`: as data.malformed, of documents that cannot be read. Raises ValueError
    for a directory without text.
    """
    paths, other_files = find_documents(folder)
    reading = FolderReading()
    for path in paths:
        try:
            document = read_document(path)
            reading.add(path, document, passages(folder, path, document, max(1, limit // WORD_TOKENS)))
        except UnreadableDocument as error:
            if malformed == "error":
                raise UnreadableDocument(f"{error}; mend it, or leave it out with --data.malformed skip") from error
            print(f"skipped {error}", file=sys.stderr)
    for line in reading.lines(other_files):
        print(line, file=sys.stderr)
    chunks = tuple(chunks_of([row["contents"] for row in reading.rows], limit, token_counter))
    if not chunks:
        raise ValueError(f"--files {folder}: contains no document with text")
    return chunks


def human_answer(run: Run) -> Callable[[Problem, Console], Outcome]:
    """A person is the policy and sees what the model would see."""
    from memsearcher_jax.rl import setup
    from memsearcher_jax.rl.tool_executor import respond

    agent = setup.evaluation_agent(run)
    assert isinstance(agent, QuestionAgent), "others do not take --human"
    prompts = agent.prompts.with_tools(agent.tools)
    backends = setup.make_backends(run)

    def answer(problem: Problem, console: Console) -> Outcome:
        console.print(show.safe_text(prompts.system, "dim"))
        begins = prompts.opening and f"A turn begins after {prompts.opening}."
        console.print("Write each reply and end it with an empty line.", begins)

        def generate(request: Generate) -> Completion:
            if not isinstance(request.text, Prompt):  # the heading of a turn shows what its prompt contains
                console.print(show.safe_text("".join(span.text for span in request.text), "dim"))
            lines = iter(lambda: sys.stdin.readline().rstrip("\r\n"), "")  # up to an empty one, or the end of the input
            return Completion("\n".join(lines))

        workflow = show_workflow(setup.make_start(run, agent)(problem), run, console)
        return run_workflow(workflow, generate, lambda request: respond(backends, request))

    return answer


def show_workflow(
    workflow: Workflow,
    run: Run,
    console: Console,
    generated: Callable[[Generate], contextlib.AbstractContextManager[Generate]] = contextlib.nullcontext,
) -> Workflow:
    """The same workflow; prints every request and its response.

    `generated` encloses each generation and may change its request.
    """
    turn = 0
    memory = ""
    response: Any = None
    while True:
        try:
            request = workflow.send(response)
        except StopIteration as end:
            return end.value
        except Exception as error:  # of a user's workflow: a fault, as in a run
            return Outcome(StopReason.FAULT, error=described(error))
        if not isinstance(request, Generate):
            response = yield request
            if isinstance(request, Call):
                show.show_call(response, console)
            else:
                for query, result in zip(request.queries, response, strict=True):
                    show.show_search(query, result, console)
            continue
        is_turn = starts_turn(request)
        if is_turn:
            turn += 1
            memory = request.text["memory"] if isinstance(request.text, Prompt) else ""
            show.show_turn_start(turn, memory, console, has_memory=run.agent.keeps_memory)
        with generated(request) as asked:
            response = yield asked
        if is_turn:
            show.show_reply(response.text, console)
        else:
            show.show_rewrite(memory, protocol.memory(response.text), response.text, console)
