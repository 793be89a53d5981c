"""Settings that all workflows share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.ranges import Count, CountOrZero, Positive, Probability


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a trajectory that answers a question; one without an answer earns 0. Defaults: the paper's."""

    metric: Literal["f1", "exact_match", "cover_exact_match"] = "f1"
    """What an answer earns. Search-R1 uses exact_match."""
    wrong_answer: Probability = 0.1
    """What an answer with a metric of 0 earns if its format is right."""
    require_format: bool = True
    """An answer in the wrong format earns 0 (True) or its metric (False). Each workflow has a format of its own."""
    function: str = ""
    """A reward of one's own: FILE.py with a function `reward`, or of the file's name. It gets the trajectories of one
    problem and returns a number for each or, where rl.advantage_scope is pooled or position, one for each of its
    contexts (docs/extend.md). The metrics stay."""


PAPER_REWARD = RewardConfig()


@dataclass(frozen=True)
class AgentConfig:
    """The workflow and its limits in one trajectory. The defaults are the paper's training settings."""

    workflow: str = "memsearcher"
    """The agent: a compact memory (memsearcher), the complete history (react), a history that is summarised when it is
    too long (compact), the complete history in the protocol of Search-R1 (search_r1), one state that every turn
    rewrites (mem1), one reply without a search (direct), one reply after a search for the question (rag), a long text
    that is read for a question (memagent), a memory that is filled from a stream, then queried (memalpha), or one's
    own: FILE.py (docs/extend.md)."""
    tools: tuple[str, ...] = ()
    """Tools of one's own, besides the search: FILE.py, whose functions they are, or those in its list TOOLS;
    FILE.py:CLASS, which is made for each trajectory; mcp:http://HOST/mcp or mcp:COMMAND (docs/extend.md)."""
    tools_api_key_env: tuple[str, ...] = ()
    """Environment variables that hold the keys of the servers mcp:http://... in agent.tools, in their order; '' for a
    server without a key."""
    replay: str = ""
    """A run whose recorded results answer the calls of its tools, which need not be there."""
    tool_timeout: Positive = 30.0
    """Seconds after which a call of a tool has failed."""
    prompts: str = "default"
    """Style of the packaged templates (default, brief, terse; original and instruct for published weights), or a
    folder with templates of one's own (see agent/prompts.py)."""
    max_turns: Count = 5
    """Turns after which a trajectory ends without an answer."""
    completion_tokens: Count = 512
    """Maximum tokens of one reply with its thought."""
    question_tokens: Count = 695
    """Maximum tokens of a question; longer ones are refused when the data is read."""
    memory_tokens: CountOrZero = 1024
    """Token budget of the memory; a rewritten memory over it is cut and counted. With memalpha, the budget of the part
    of the memory that a context shows; the memory itself is unbounded."""
    rewrite_tokens: CountOrZero = 0
    """Maximum tokens of the generation that rewrites the memory, tags included; 0: a quarter more than memory_tokens,
    and at least completion_tokens. Above memory_tokens, so that the budget cuts a memory before this limit ends it."""
    history_tokens: CountOrZero = 2_048
    """Tokens of replies and results, without the prompt, above which compact summarises its context; 0: after every
    search. It also summarises where the next text would not fit the context."""
    carry_memory: bool = True
    """Carry the memory from turn to turn; False empties it after every turn, as an ablation of memsearcher and
    compact."""
    observation_tokens: Count = 4096
    """Token budget of the search results of one turn; passages are clipped to share it. Also of one tool's result and,
    with memagent, of a chunk of the text."""
    max_calls: Count = 5
    """Maximum tool calls of one reply; further calls are ignored and counted."""
    default_top_n: Count = 5
    """Passages per query if the call gives no top_n."""
    max_top_n: Count = 20
    """Maximum passages per query, whatever the call asks for."""
    harness: str = ""
    """An agent of another framework in place of `workflow`: FILE.py with an `async def` of the file's name that gets
    (problem, client), or a command such as "python my_agent.py". It asks the policy by OpenAI's chat completions, and
    returns or prints an answer, a reward, or both (docs/extend.md)."""
    harness_timeout: Positive = 600.0
    """Seconds after which a trajectory of a harness is lost as a fault."""
    on_search_error: Literal["stop", "show"] = "stop"
    """A failed search ends the trajectory (stop) or is shown to the model as the tool's result (show)."""

    @property
    def max_rewrite_tokens(self) -> int:
        """The limit of a memory rewrite."""
        return self.rewrite_tokens or max(self.completion_tokens, self.memory_tokens + self.memory_tokens // 4)
