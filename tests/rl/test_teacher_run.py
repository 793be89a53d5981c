"""Runs that learn from a teacher: another run's model, or the policy with a hint, with which it never samples."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from memsearcher_jax.config import check
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.rl import collector, hints
from memsearcher_jax.rl.advantages import multi_context_advantages
from memsearcher_jax.rl.batch import RolloutBatch, from_bytes, to_bytes
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.setup import check_teacher
from memsearcher_jax.runtime.export_settings import without_local_files
from memsearcher_jax.runtime.run_dir import PACKAGED_TOKENIZER
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.sampling.scheduler import Scheduler
from memsearcher_jax.training.config import TeacherConfig
from memsearcher_jax.types import (
    Context,
    Outcome,
    Passage,
    Problem,
    ScoredTrajectory,
    SearchResult,
    StopReason,
    Stream,
    StreamQuestion,
    Trajectory,
    Turn,
)
from tests.support import SMALL_RUN, byte_tokenizer

TOKENIZER = ChatTokenizer.load(PACKAGED_TOKENIZER)


def trained(out, *flags):
    tpu_train.main([*SMALL_RUN.split(), *flags, "--out", str(out)])
    steps = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in step.items() if not name.startswith("time/")} for step in steps]


@pytest.mark.slow
def test_a_run_of_another_size_teaches_carried_trajectories_and_adapters(tmp_path, fast_compile, refused):
    """And a resumed run equals an uninterrupted one."""
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    trained(teacher, "--model.embed_size", "16", "--seed", "1")
    trained(student, "--rl.steps", "1")
    flags = ["--teacher.path", str(teacher), "--training.objective", "grpo+distill", "--teacher.on", "wrong"]
    flags += ["--model.path", str(student), "--model.lora_rank", "2"]
    whole, carried = trained(tmp_path / "whole", *flags), trained(tmp_path / "carried", *flags, "--rl.carry_over", "1")
    assert all(step["teacher_kl"] > 0.1 and step["kl"] > 0 for step in (*whole, *carried))
    trained(tmp_path / "parts", *flags, "--rl.steps", "1")
    tpu_train.main(["--resume", "--out", str(teacher), "--rl.steps", "3"])
    resume = ["--resume", "--out", str(tmp_path / "parts"), "--rl.steps", "2"]
    assert "teacher.path has changed since the run" in refused(tpu_train.main, resume)
    shutil.rmtree(teacher / "checkpoints" / "3")
    tpu_train.main(resume)
    assert read_metrics(tmp_path / "parts" / "metrics.jsonl")[1]["loss"] == whole[1]["loss"]


def test_no_hint_reaches_a_sampled_context(tmp_path, monkeypatch):
    """Neither what the sampler is given nor what the policy is trained on holds a hint, which the teacher was shown."""
    given, hinted, generate, make = [], [], Scheduler._generate, hints.make_hints

    def spy(self, context, ids, *rest):
        given.append(TOKENIZER.transcript(ids))
        generate(self, context, ids, *rest)

    monkeypatch.setattr(Scheduler, "_generate", spy)

    def make_and_keep(scored, tokenizer):
        made = make(scored, tokenizer)
        for one, hints_C in zip(scored, made, strict=True):
            for context, (ids, place) in zip(one.trajectory.contexts, hints_C, strict=True):
                hinted.extend([TOKENIZER.transcript((*context.ids[:place], *ids))] if ids else [])
        return made

    monkeypatch.setattr(collector, "make_hints", make_and_keep)
    documents = "--agent.workflow memagent --agent.prompts terse --data.synthetic documents"
    documents += " --data.documents.train_passages 2 --data.documents.test_passages 2 --model.vocab_size 1536"
    flags = ["--training.objective", "distill", "--teacher.hint", "True", *documents.split()]
    steps = trained(tmp_path / "run", *flags)
    assert all(step["correct_logprob"] < 0 for step in steps if step["exact_match"])
    assert len(set(hinted)) > 4 and all(np.isfinite(step["teacher_kl"]) for step in steps)
    for file in (tmp_path / "run" / "trajectories").iterdir():
        contexts = (context for one in read_trajectories(file) for context in one.trajectory.contexts)
        given += [TOKENIZER.transcript(context.ids) for context in contexts]
    assert len(given) > 8 and not [text for text in given if any(begin in text for begin in hinted)]


QUESTION = Problem("q", "Who?", ("Ada", "Lovelace"), {"supporting_titles": ["Bob", "Eve"]})
ASKED = (StreamQuestion("Who?", ["Ada", "Lovelace"]), StreamQuestion("When?", 1815))
STREAM = replace(QUESTION, stream=Stream("source", ("a chunk",), ASKED))
OPENED, NEXT = "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n"


def context_of(*parts):
    """A context of parts of which every second one was sampled."""
    ids = [TOKENIZER.encode_trusted(part) for part in parts]
    sampled = tuple(number % 2 == 1 for number, part in enumerate(ids) for _ in part)
    return Context(sum(ids, ()), (0.0,) * len(sampled), sampled)


@pytest.mark.parametrize(
    ("problem", "before", "read", "hint"),
    [
        (QUESTION, ("Who?" + OPENED, "Search.", NEXT), "ADA of 1815", " Ada."),
        (QUESTION, ("Who?" + OPENED, "Search.", NEXT + "Ada" + OPENED, "More.", NEXT), "Bob of 1815", ""),
        (QUESTION, ("Who?" + OPENED, "Search.", NEXT), "Bob, and Eve", " Eve."),
        (QUESTION, ("Who?" + OPENED, "<search>", "\n<information>"), "Miss Lovelace</information>", " Lovelace."),
        (QUESTION, ("",), "Is it Ada?", ""),
        (STREAM, ("",), "Bob of 1815", " 1815."),
        (STREAM, ("",), "Ada was born in 1815", " Ada. 1815."),
    ],
)
def test_a_hint_ends_what_was_read_last_where_that_holds_an_answer(problem, before, read, hint):
    opened = "" if "information" in read else OPENED
    context = context_of(*before[:-1], before[-1] + read + opened, "A reply.")
    turn = Turn("", "", results=(SearchResult((Passage("1", '"Bob"\nA page.'),)),))
    outcome = Outcome(StopReason.ANSWERED, turns=(turn,))
    trajectory = Trajectory(problem, 0, outcome, (context_of("", ""), context), "")
    group = [ScoredTrajectory(trajectory, reward, scores={"exact_match": reward}) for reward in (0.0, 1.0)]
    found = hints.make_hints(group, TOKENIZER)
    (ids, place) = found[0][1]
    shown = (*context.ids[:place], *ids, *context.ids[place:])
    assert TOKENIZER.transcript(shown) == "".join(before) + read + hint + opened + "A reply."
    examples = multi_context_advantages(group, [0, 0], RLConfig(), found)
    again = from_bytes(to_bytes(RolloutBatch(examples, []))).examples
    assert [(one.correct, tuple(one.hint), one.hint_place) for one in again] == [
        (False, ids, place),
        (True, ids, place),
    ]


@pytest.mark.parametrize(
    ("teacher", "training", "message"),
    [
        (TeacherConfig(), {"objective": "distill"}, "objective distill needs a teacher"),
        (TeacherConfig("t"), {"kl_coefficient": 0.0}, "the teacher teaches nothing"),
        (TeacherConfig(hint=True), {}, "the teacher teaches nothing"),
        (TeacherConfig("t", top_k=4), {}, "the teacher teaches nothing"),
        (
            TeacherConfig("t", top_k=10**6),
            {"objective": "distill", "kl_coefficient": 0.0},
            "top_k 1000000 is more than the .* tokens of the model: lower it",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(teacher, training, message):
    config = load_preset("nano")
    with pytest.raises(ValueError, match=message):
        check(replace(config, teacher=teacher, training=replace(config.training, **training)))


def test_an_export_names_no_teacher():
    config = load_preset("nano")
    training = replace(config.training, objective="distill")
    exported = check(without_local_files(replace(config, training=training, teacher=TeacherConfig("/home/me/teacher"))))
    assert exported.teacher == TeacherConfig()


def test_a_teacher_with_other_tokens_is_refused_by_the_first_of_them(tmp_path):
    config = replace(load_preset("tiny"), teacher=TeacherConfig("package:tiny"))
    check_teacher(config, TOKENIZER)
    with pytest.raises(ValueError, match="package:tiny has another vocabulary: its token 256 is 'he', and the"):
        check_teacher(config, byte_tokenizer())
