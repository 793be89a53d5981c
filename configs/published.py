"""Published weights with the prompts and limits of their authors' evaluations.

python launch/evaluate.py --config memsearcher_3b --checkpoint yuanqianhao/MemSearcher-3B --benchmarks all \\
    --data.root RUC-NLPIR/FlashRAG_datasets --retrieval.index DIR --retrieval.encoder intfloat/e5-base-v2
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.memalpha import memalpha_4b
from memsearcher_jax.configs.qwen import qwen3b, search_r1_3b
from memsearcher_jax.rl.config import CompleterConfig


def memsearcher_3b() -> RunConfig:
    """MemSearcher's 3B model as its `eval.sh` evaluates it.

    Greedy, 20 turns, 512 tokens for a reply or a memory, errors of the search as results, and the 10 passages of its
    search server where a call does not say how many.

    `--judge.backend openai --judge.url URL` adds the judge that its `llm_judge.py` asks.
    """
    base = qwen3b()
    agent = replace(
        base.agent,
        prompts="original",
        memory_tokens=511,  # cuts nothing: the original has no budget, but 512 tokens for the memory with its tags
        rewrite_tokens=512,
        default_top_n=10,
        on_search_error="show",
    )
    return replace(base, agent=agent, judge=replace(base.judge, model="gpt-4o-mini", api_key_env="OPENAI_API_KEY"))


def search_r1_3b_it() -> RunConfig:
    """Search-R1's 3B models that were trained from the Instruct model; `search_r1_3b` is for the others."""
    base = search_r1_3b()
    return replace(base, agent=replace(base.agent, prompts="instruct"))


def memalpha_4b_original() -> RunConfig:
    """Mem-alpha's 4B model as its `main.py` and memory server evaluate it.

    Greedy, with answers by Qwen3-32B without thoughts, at temperature 0.7, from at most 30,000 tokens of memory. Chunks
    are longer than in training.

    `--answerer.backend openai --answerer.url URL`, and the same for `judge`, which the sources lme_train and
    longmemeval_s* need.
    """
    base = memalpha_4b()
    service = CompleterConfig(model="Qwen/Qwen3-32B", extra_body='{"chat_template_kwargs": {"enable_thinking": false}}')
    return replace(
        base,
        agent=replace(base.agent, prompts="original"),
        memalpha=replace(base.memalpha, chunk_tokens=8_192, answer_memory_tokens=30_000, answer_temperature=0.7),
        sampling=replace(base.sampling, context_tokens=16_384),
        training=replace(base.training, seq_len=16_384),
        answerer=service,
        judge=service,
    )
