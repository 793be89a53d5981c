"""Settings of the loop and of evaluation. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Baseline = Literal["trajectory", "pooled", "position"]


@dataclass(frozen=True)
class RLConfig:
    """How much is sampled, trained and kept. Defaults: the paper's batch."""

    method: Literal["grpo", "demonstrations"] = "grpo"
    """Learn from the rewards of own trajectories, or first by supervision from a scripted agent in embedded worlds."""
    steps: int = 600
    """Steps of the run; one step samples, scores, trains and publishes."""
    problems: int = 256
    """Problems per step."""
    rollouts: int = 5
    """Trajectories per problem: the group over which rewards are normalised."""
    credit: Literal["every context", "last context"] = "every context"
    """Which contexts of a trajectory are trained with its advantage: all, as multi-context GRPO does, or the one that
    ended it, to see what that costs."""
    baseline: Baseline = "trajectory"
    """What a reward is compared with: trajectories with those of their problem (trajectory), or, where every context
    has a reward of its own, contexts with all of their problem (pooled, as Mem-alpha does) or with those at the same
    place of the stream (position)."""
    even_groups: bool = True
    """Also train on groups whose rewards are all equal. Their advantage is 0: they add to the denominators of the loss
    and, where these are on, to entropy and divergence."""
    checkpoint_every: int = 20
    """Steps between checkpoints; the last step is always kept."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk."""
    evaluate_every: int = 0
    """Steps between evaluations on the test questions; 0: none during training."""
    search_seconds: float = 60.0
    """A search that takes longer has failed; what is asked with it is asked again alone."""
    save_trajectories: bool = True
    """Keep every step's trajectories as compressed JSONL."""


@dataclass(frozen=True)
class AlarmConfig:
    """When a run is going wrong. A limit of 0 is none; a number that is not finite is beyond every limit."""

    skipped_updates: int = 8
    """Updates in a row whose gradient is not finite, after which the run ends; its checkpoints stay as they are."""
    reward_below: float = 0.0
    """Mean reward of a step under which it counts."""
    entropy_below: float = 0.0
    """Mean entropy, in nats, under which a step counts: a policy that collapses."""
    entropy_above: float = 0.0
    """Mean entropy, in nats, over which a step counts: one that dissolves."""
    tokens_below: float = 0.0
    """Mean tokens per turn under which a step counts."""
    tokens_above: float = 0.0
    """Mean tokens per turn over which a step counts: context that grows without use."""
    kl_above: float = 0.0
    """Divergence from the starting weights, in nats per token, over which a step counts."""
    steps: int = 3
    """Steps in a row beyond a limit that make an alarm."""
    action: Literal["tell", "stop"] = "tell"
    """What an alarm does: a line on stderr, or the end of the run."""


@dataclass(frozen=True)
class DemonstrationConfig:
    """The scripted agent of `rl.method` demonstrations, and how it is imitated. Every step has a world of its own, or
    stories of its own where agent.workflow reads streams; rl.problems of its chunks are then read, errors included."""

    answer_early: float = 0.7
    """Probability that it answers while facts are missing."""
    wrong_query: float = 0.1
    """Probability that it searches for less than a name."""
    bad_memory: float = 0.1
    """Probability that it notes a wrong name, or nothing."""
    histories: int = 0
    """Problems of a step that are played as ReAct, besides the rl.problems of agent.workflow."""
    history_prompts: str = "terse_react"
    """The set of prompts for those."""
    copies: int = 140
    """Exercises of a step: a run of tokens that comes twice."""
    recitations: int = 100
    """Exercises of a step: a passage and behind it all of its facts; of streams a chunk and the calls that store it."""
    decisions: int = 0
    """Exercises of a step: how a turn begins when so much is remembered. For a workflow with a memory."""
    keep_part: float = 0.85
    """Of streams: probability that one sentence of a chunk is stored and no other."""
    keep_idle: float = 0.5
    """Of streams: where one is stored, probability that it is an idle one."""
    readings: int = 40
    """Of streams, exercises of a step: a chunk that is stored whole, which its reply begins by saying."""
    repetitions: int = 20
    """Of streams, exercises of a step: sentences, and the same in another order."""
    interviews: int = 48
    """Of streams, exercises of a step: what is found in a memory, and the answers to questions about it."""
    measure_every: int = 10
    """Steps between measurements of how surely names are copied, in worlds that are never learnt from."""


@dataclass(frozen=True)
class SpeakerConfig:
    """Who answers Mem-alpha's questions, or who judges: never the policy that is trained."""

    who: Literal["start", "endpoint", "nobody"] = "start"
    """The weights that the run started from, frozen, on a sampler like the policy's (start); an OpenAI-compatible
    service (endpoint); or nobody, which only a judge can be: its reward is left out."""
    url: str = ""
    """Of an endpoint: the address before /chat/completions, such as http://host:8000/v1."""
    model: str = ""
    """Of an endpoint: the model's name there."""
    key_variable: str = ""
    """Of an endpoint: the environment variable that holds its key; empty: it needs none."""
    timeout: float = 120.0
    """Of an endpoint: seconds that one attempt may take."""
    attempts: int = 4
    """Of an endpoint: attempts before a reply has failed."""
    at_once: int = 16
    """Of an endpoint: requests side by side."""
    cached: int = 20_000
    """Replies that are kept, so that the same prompt is not said twice; the ones used longest ago are forgotten."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation differs from training in these settings and in nothing else."""

    max_turns: int = 20
    """Turns before a trajectory ends without an answer."""
    temperature: float = 0.0
    """0 is greedy."""
    questions: int = 0
    """Questions to evaluate of each benchmark, from the first on; 0: all."""
    in_distribution: tuple[str, ...] = ("nq", "hotpotqa")
    """Benchmarks that the weights were trained on, against which the others are out of distribution."""
