"""A memory agent of one's own in one file, with a tool and a reward; docs/extend.md builds it step by step.

python launch/tpu_train.py --config tiny --agent.workflow examples/my_agent.py --reward.function examples/my_agent.py

The weights of `tiny` know one system message, and no text about a tool in it. Models that read a tool's schema, such as
Qwen2.5 and SmolLM2, also take --agent.tools examples/my_agent.py.
"""

import ast
import operator
from dataclasses import replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.reward import token_f1
from memsearcher_jax.agent.tools import run_tool_calls
from memsearcher_jax.types import FinishReason, Generate, Outcome, StopReason, Turn

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def my_agent(question, *, config, prompts, token_counter):
    """A notebook: each turn searches or calculates and adds a note. The oldest notes make room for new ones."""
    notes = []
    turns = []
    for _ in range(config.max_turns):
        memory = " ".join(notes)
        reply = yield Generate(prompts.initial_prompt(question, memory), config.completion_tokens)
        turn = Turn(memory, reply.text)
        calls = protocol.tool_calls(reply.text)
        if reply.finish is not FinishReason.STOP or not calls:
            stop, answer = protocol.final_answer(reply)
            return Outcome(stop, answer, (*turns, turn))

        used = yield from run_tool_calls(turn, calls, config=config, prompts=prompts, token_counter=token_counter)
        if used.error and config.on_search_error == "stop":
            return Outcome(StopReason.SEARCH_FAILED, turns=(*turns, used.turn), error=used.error)

        reply = yield Generate(prompts.continuation(used.message, think=False), config.max_rewrite_tokens)
        turn = replace(used.turn, rewrite=reply.text)
        note = token_counter.clip(protocol.memory(reply.text), config.memory_tokens)
        if not note:
            return Outcome(StopReason.BAD_MEMORY, turns=(*turns, turn))
        notes.append(note)
        while token_counter.count(" ".join(notes)) > config.memory_tokens:
            notes.pop(0)
        turns.append(replace(turn, new_memory=" ".join(notes)))
    return Outcome(StopReason.MAX_TURNS, turns=tuple(turns))


my_agent.keeps_memory = True  # as reports and pages show it


def calculate(expression: str) -> float:
    """Evaluates an expression of numbers with + - * / and brackets, such as (1894 - 1869) / 5."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError(f"{ast.unparse(node)} is neither a number nor an operation")

    return value(ast.parse(expression, mode="eval").body)


TOOLS = [calculate]


def reward(trajectories):
    """The F1 of the answer, of which every turn costs a fiftieth: what is known needs no search.

    A wrong answer earns 0, however many turns it took. If turns cost something there, too, the policy would learn to
    guess at once: in a group without a right answer, the fastest guess would earn the most.
    """
    rewards = []
    for trajectory in trajectories:
        outcome = trajectory.outcome
        f1 = token_f1(outcome.answer or None, trajectory.problem.golden_answers)
        rewards.append(f1 * max(0.0, 1 - 0.02 * len(outcome.turns)))
    return rewards
