"""The choice of test questions, their distribution over hosts, and the metrics of an evaluation."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import MemSearcher
from memsearcher_jax.config import RunConfig
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.trajectories import append_trajectory
from memsearcher_jax.rl.evaluate import (
    HOST_FILE,
    drop_lost_trajectories,
    evaluate,
    evaluate_to_folder,
    missing_jobs,
    read_summaries,
)
from memsearcher_jax.rl.setup import select_test_problems
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.types import Outcome, Problem, StopReason, Trajectory, Turn

AGENT = MemSearcher(AgentConfig())


def problem(id, source="", question="Who?"):
    return Problem(id, question, ("Ada",), {"source": source} if source else {})


def trajectory(problem, *contexts, turns=1, answer="Ada", stop=StopReason.ANSWERED):
    outcome = Outcome(stop, answer, (Turn("", f"know</think>\\boxed{{{answer}}}"),) * turns)
    transcript = f"<|im_start|>assistant\n<think>know</think>\\boxed{{{answer}}}<|im_end|>"
    return Trajectory(problem, 0, outcome, contexts, transcript)


def score(trajectory):
    (scored,) = AGENT.rewards([trajectory], Scoring(None))
    return scored


def test_max_questions_limits_each_benchmark():
    mixed = [problem(f"{source}{n}", source) for source in ("nq", "popqa", "") for n in range(3)]
    chosen = [problem.id for problem in select_test_problems(mixed, 2)]
    assert chosen == [f"{source}{n}" for source in ("nq", "popqa", "") for n in range(2)]
    assert select_test_problems(mixed, 0) == mixed
    with pytest.raises(ValueError, match="there are no test questions"):
        select_test_problems([], 0)
    with pytest.raises(ValueError, match='two test questions have the id "q": evaluate the files'):
        select_test_problems([problem("q"), problem("q", question="Other?")], 0)


@given(st.integers(0, 50), st.integers(1, 7))
def test_each_question_is_assigned_to_one_host(questions, hosts):
    shares = [Hosts(host, hosts) for host in range(hosts)]
    problems = [problem(str(number)) for number in range(questions)]
    assigned = [job.number for share in shares for job in missing_jobs(problems, (), share)]
    assert sorted(assigned) == list(range(questions))
    sizes = [len(missing_jobs(problems, (), share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    left = [job.problem.id for job in missing_jobs(problems, {"0", "2"}, Hosts())]
    assert left == [str(number) for number in range(questions) if number not in (0, 2)]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_rewards_that_ask_an_answerer_have_the_memory_of_the_samplers_cache(in_chunks, tmp_path):
    """It has an engine with a cache of its own. A killed evaluation loses as many trajectories as there are slots."""
    events = []

    def reward_fn(trajectories, key, notify, params):
        events.append("reward")
        return list(map(score, trajectories))

    engine = SimpleNamespace(release=lambda: events.append("release"))
    driver = SimpleNamespace(
        engine=engine, trajectories=lambda jobs, *_: ([trajectory(job.problem) for job in jobs], None)
    )
    config, problems = RunConfig(sampling=SamplingConfig(slots=2)), list(map(problem, "pqr"))
    run = SimpleNamespace(config=config, agent=SimpleNamespace(needs_completers=True))
    jobs, done = missing_jobs(problems, (), Hosts()), {}
    if in_chunks:
        evaluate_to_folder(run, driver, {}, jobs, tmp_path, Hosts(), reward_fn, done.__setitem__)
        assert read_summaries(tmp_path, problems) == done
    else:
        done = [one.trajectory.problem.id for one in evaluate(run, driver, {}, print, reward_fn, jobs)]
    assert list(done) == ["p", "q", "r"]
    assert events == ["release", "reward"] * (2 if in_chunks else 1)


def test_a_changed_question_is_an_error(tmp_path):
    with (tmp_path / HOST_FILE.format(0)).open("ab") as log:
        append_trajectory(log, score(trajectory(problem("q"))))
    assert list(read_summaries(tmp_path, [problem("q"), problem("r")])) == ["q"]
    for others in ([problem("r")], [problem("q", question="Whom?")], [problem("q", "nq")]):
        with pytest.raises(ValueError, match="question 'q' is not one of these: start another evaluation"):
            read_summaries(tmp_path, others)


def test_only_the_host_of_a_file_removes_a_torn_line(tmp_path):
    """Another host may be writing to it."""
    files = [tmp_path / HOST_FILE.format(number) for number in range(2)]
    for file in files:
        with file.open("ab") as log:
            append_trajectory(log, score(trajectory(problem(file.name))))
        file.write_bytes(file.read_bytes() + file.read_bytes()[:9])
    sizes = [file.stat().st_size for file in files]
    assert len(read_summaries(tmp_path, [problem(file.name) for file in files])) == 2
    drop_lost_trajectories(tmp_path, Hosts(1, 2))
    assert [file.stat().st_size for file in files] == [sizes[0], sizes[1] - 9]


def test_a_trajectory_without_an_answer_scores_zero():
    right = score(trajectory(problem("q")))
    assert set(right.scores.values()) == {1.0}
    unanswered = score(trajectory(problem("q"), stop=StopReason.MAX_TURNS))
    assert unanswered.scores == dict.fromkeys(right.scores, 0.0)
