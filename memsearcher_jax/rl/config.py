"""Settings of the training loop and of evaluation. No JAX here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.ranges import Count, CountOrZero, NonNegative, Positive, Probability


@dataclass(frozen=True)
class RLConfig:
    """How much a step samples and trains, and what a run keeps. Defaults: the paper's batch."""

    steps: Count = 662
    """Steps of the run; one step samples, rewards, trains and publishes. The default is one epoch of the paper's
    169,615 questions."""
    epochs: CountOrZero = 0
    """Passes over the training problems. Above 0 they decide the number of steps, and `steps` does not count: each pass
    has as many complete steps as the problems make."""
    prompts_per_step: Count = 256
    """Problems per step."""
    group_size: Count = 5
    """Trajectories per problem: the group over which rewards are normalised."""
    carry_over: CountOrZero = 0
    """Steps of staleness allowed. Above 0 a step does not wait for its slowest trajectories: free slots begin the
    problems of the next steps, the update runs on as many complete groups as a step has problems, and the others go on
    with the new weights, from their last complete context (docs/train.md). 0: every step trains what it began."""
    credit: Literal["all_contexts", "last_context"] = "all_contexts"
    """Contexts of a trajectory that are trained with its advantage: all, as in multi-context GRPO, or only the one
    that ended it, as an ablation."""
    advantage_scope: Literal["trajectory", "pooled", "position"] = "trajectory"
    """What a reward is normalised over: the trajectories of a problem (trajectory) or, where every context has a
    reward of its own, all contexts of a problem (pooled, as in Mem-alpha) or those at the same position (position)."""
    norm_by_std: bool = True
    """Divide advantages by the standard deviation of their group; off as in Dr. GRPO."""
    keep_constant_reward_groups: bool = True
    """Also train on groups whose rewards are all equal. Their advantage is 0: they count in the denominators of the
    loss and, where these are on, in entropy and KL divergence."""
    refill: CountOrZero = 0
    """Dynamic sampling: rounds in which a step replaces groups whose rewards are all equal by further problems, until
    it trains as many groups as it has problems. 0: it trains the groups that it has."""
    checkpoint_every: Count = 20
    """Steps between checkpoints. The last step is always saved."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep on disk, apart from the one with the best evaluation."""
    evaluate_every: CountOrZero = 0
    """Steps between evaluations on the test questions; 0: no evaluation during training."""
    search_timeout: Positive = 60.0
    """Seconds after which a batch of searches has failed; each of its searches is then repeated alone, once, with the
    same limit."""
    max_search_outage: NonNegative = 600.0
    """Seconds for which searches are repeated while the search service answers none, before they fail; 0: they fail at
    once. Their trajectories keep their slots meanwhile."""
    save_trajectories: bool = True
    """Save every step's trajectories as compressed JSONL."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Where to watch the metrics, besides metrics.jsonl: event files for TensorBoard, Weights & Biases, or nowhere."""


@dataclass(frozen=True)
class HealthConfig:
    """Limits on a step's metrics. 0 turns all but `max_unscored` off; a value that is not finite exceeds all."""

    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """What an alarm does: print a line on stderr (warn), end the run (stop), or restore the checkpoint with the best
    evaluation and go on with new problems and a lower learning rate (rollback). Weights or logits that are not finite
    roll back, or end the run under warn, too."""
    patience: Count = 5
    """Consecutive training steps beyond a limit before the alarm, consecutive steps without a finite gradient before
    the run ends or rolls back, consecutive steps without an update before a line says so, and steps over which the best
    mean reward is taken."""
    min_reward_fraction: Probability = 0.5
    """Alert when mean reward falls below this fraction of its best mean over `patience` steps."""
    max_entropy: NonNegative = 0.0
    """Alert when mean entropy, in nats per token, exceeds this (the policy is diverging)."""
    max_likelihood_fall: NonNegative = 0.0
    """Alert when the mean log-probability of the tokens of correct trajectories is this many nats below its best mean
    over `patience` steps: the earliest sign of a collapse (arXiv 2512.04220)."""
    max_unscored: Probability = 0.1
    """Alert when more than this fraction of a step's trajectories is lost to faults of the machinery, such as a search
    service that is down, and end the run after `patience` consecutive such steps, whatever `on_collapse` is; 1: off."""


@dataclass(frozen=True)
class CompleterConfig:
    """What answers Mem-alpha's questions, or judges: never the policy that is trained."""

    backend: Literal["initial_policy", "openai", "none"] = "initial_policy"
    """The frozen weights that the run started from (initial_policy), an OpenAI-compatible service (openai), or nothing
    (none), which only the judge may be: its reward term is then left out."""
    url: str = ""
    """openai: the address before /chat/completions, such as http://host:8000/v1."""
    model: str = ""
    """openai: the model's name at the service."""
    api_key_env: str = ""
    """openai: the environment variable that holds the key; empty: no key."""
    extra_body: str = ""
    """openai: further fields of each request, as a JSON object, such as
    '{"chat_template_kwargs": {"enable_thinking": false}}' for Qwen3 on vLLM; null leaves a field out, as in
    '{"max_tokens": null, "temperature": null, "max_completion_tokens": 4096}' for OpenAI's reasoning models."""
    timeout: Positive = 120.0
    """openai: seconds per attempt."""
    max_concurrency: Count = 16
    """openai: concurrent requests."""
    max_outage: NonNegative = 600.0
    """openai: seconds for which a request is repeated while the service does not answer, before it has failed."""


def read_key(variable: str, setting: str) -> str:
    """The key in an environment variable that `setting` names. Raises ValueError if there is none."""
    if not (secret := os.environ.get(variable, "").strip()):  # mounted secrets often end with a line break
        # The message omits the value: a user who passes the key itself must not find it in a log.
        raise ValueError(f"{setting}: the environment holds no variable of that name")
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"{setting}: the key has characters that an HTTP header cannot have")
    return secret


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation differs from training in these settings and in nothing else."""

    max_turns: Count = 20
    """Turns before a trajectory ends without an answer."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    max_questions: CountOrZero = 0
    """Evaluate only the first questions of each benchmark, at most this many; 0: all."""
    in_distribution: tuple[str, ...] = ("nq", "hotpotqa")
    """Benchmarks that the weights were trained on; the others are reported as out of distribution."""
