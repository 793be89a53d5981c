"""Finished trajectories for tests of what is written and reported; no JAX."""

from dataclasses import replace

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import compress_trajectories
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory, Turn

ANSWERED = Turn("", "I know.</think> \\boxed{Ada}")


def context(tokens, sampled=1):
    """A context whose last tokens are sampled."""
    return Context(tuple(range(tokens)), (0.0,) * tokens, (False,) * (tokens - sampled) + (True,) * sampled)


def scored(
    correct=True, turns=(ANSWERED,), *, id="q1", question="Who wrote it?", golden=("Ada",), metadata=None, **changes
):
    """An answered question; the contexts of its turns have 10, 20, ... tokens.

    Other keywords are fields of `Outcome`, `Trajectory` and `ScoredTrajectory`.
    """
    value = float(correct)
    outcome = Outcome(StopReason.ANSWERED, "Ada", tuple(turns))
    contexts = tuple(context(10 * (number + 1)) for number in range(len(turns)))
    trajectory = Trajectory(Problem(id, question, golden, metadata or {}), 0, outcome, contexts, "")
    scores = {"exact_match": value, "f1": value, "cover_exact_match": value}
    one = ScoredTrajectory(trajectory, value, "", scores)
    for name, field in changes.items():
        if hasattr(outcome, name):
            outcome = replace(outcome, **{name: field})
        elif hasattr(trajectory, name):
            trajectory = replace(trajectory, **{name: field})
        else:
            one = replace(one, **{name: field})
    return replace(one, trajectory=replace(trajectory, outcome=outcome))


def write_shard(folder, trajectories, number=0):
    """The trajectories as an evaluation leaves them in its folder."""
    file = folder / "trajectories" / f"host_{number:04d}.jsonl.gz"
    atomic_write(file, compress_trajectories(trajectories))
    return file
