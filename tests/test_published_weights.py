"""A folder in the layout of published weights, with the tokenizer of Qwen2.5 and a small random Qwen."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from memsearcher_jax.launch import evaluate
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.model import qwen, weights
from memsearcher_jax.tokenizer import ChatTokenizer

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 151_936, "embed_size": 16, "ffn_size": 32, "layers": 2, "head_size": 4}
SIZES |= {"heads": 4, "kv_heads": 2, "max_positions": 8_192}
SMALLER = """
    --mesh.tensor 2 --agent.question_tokens 96 --agent.memory_tokens 64 --agent.rewrite_tokens 80
    --agent.observation_tokens 256 --agent.completion_tokens 8 --sampling.context_tokens 2048 --sampling.slots 8
    --sampling.kv_tokens 65536 --training.seq_len 2048 --evaluation.max_questions 1 --evaluation.max_turns 2
"""


@pytest.fixture(scope="module")
def exported(shared, tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("published") / "hf", shared / "tokenizer" / "qwen2.5"
    config = replace(load_preset("nano").model, **SIZES, param_dtype="float32")
    params = jax.jit(qwen.init, static_argnums=1)(jax.random.key(0), config)
    weights.save(folder, config, params, tokenizer, end_ids=ChatTokenizer.load(tokenizer).end_ids)
    return folder


@pytest.mark.parity
def test_transformers_loads_the_folder_and_computes_the_same_logits(exported):
    import torch
    import transformers

    tokenizer = ChatTokenizer.load(exported)
    text = "<|im_start|>user\nWhere was the director of film Ronnie Rocket born?<|im_end|>\n<|im_start|>assistant\n"
    ids_BT = np.array([tokenizer.encode_trusted(text)])
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs.encode(text) == ids_BT[0].tolist()
    config, params = weights.load(exported)
    config = replace(config, compute_dtype="float32")
    forward = jax.jit(qwen.forward, static_argnames="config")
    ours_BTV, _ = forward(params, config, ids_BT, np.arange(ids_BT.shape[1])[None], np.ones_like(ids_BT))
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="float32")
    with torch.no_grad():
        theirs_BTV = model(torch.tensor(ids_BT)).logits.numpy()
    assert np.abs(np.asarray(ours_BTV) - theirs_BTV).max() < 1e-4
    assert model.generation_config.eos_token_id == list(tokenizer.end_ids)


def test_the_authors_evaluation_on_seven_benchmarks(exported, shared, tmp_path, capsys):
    """docs/reproduce.md: with the settings for the published weights, and smaller ones in their place."""
    data, sizes = shared / "data", " ".join(f"--model.{name} {size}" for name, size in SIZES.items())
    corpus = f"--retrieval.corpus {data}/wiki_mini/corpus.jsonl --retrieval.encoder hashing"
    flags = f"--config memsearcher_3b --benchmarks all --data.root {data}/benchmarks {corpus} {sizes} {SMALLER}"
    evaluate.main([*flags.split(), "--checkpoint", str(exported), "--out", str(tmp_path / "seven")])
    (trajectory, *rest) = read_trajectories(tmp_path / "seven" / "trajectories" / "host_0000.jsonl.gz")
    opening = ChatTokenizer.load(exported).transcript(trajectory.trajectory.contexts[0].ids)
    assert len(rest) == 6 and "You will answer a complex question through iterative reasoning" in opening
    assert (tmp_path / "seven" / "report.html").is_file() and "bamboogle" in capsys.readouterr().out
