"""Real questions with the tokenizer of Qwen2.5 and a small random Qwen: its export and the authors' evaluation."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from memsearcher_jax.launch import evaluate, export_hf, tpu_train
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.model import qwen, weights
from memsearcher_jax.runtime.tokenizer import ChatTokenizer

pytestmark = pytest.mark.slow

QUESTIONS, OTHER_PASSAGES = 6, 300
SETTINGS = """
    --config nano --model.vocab_size 151936 --model.embed_size 16 --model.ffn_size 32 --model.layers 2
    --model.heads 4 --model.kv_heads 2 --model.head_size 4 --model.max_positions 8192 --mesh.tensor 2
    --agent.prompts memsearcher --agent.max_turns 2 --agent.question_tokens 96 --agent.memory_tokens 64
    --agent.observation_tokens 256 --agent.completion_tokens 8 --sampling.context_tokens 1024 --sampling.slots 8
    --training.seq_len 1024 --training.minibatch_rows 4 --training.logit_chunk 128 --training.learning_rate 1e-2
    --rl.prompts_per_step 2 --rl.group_size 3 --rl.checkpoint_every 1
"""


@pytest.fixture(scope="module")
def data(shared, tmp_path_factory) -> Path:
    """The first questions, their supporting passages, and some other passages."""
    source, folder = shared / "data" / "wiki_mini", tmp_path_factory.mktemp("slice")
    questions = (source / "2wikimultihopqa" / "dev.jsonl").read_text().splitlines()[:QUESTIONS]
    titles = {title for line in questions for title in json.loads(line)["metadata"]["supporting_titles"]}
    passages = (source / "corpus.jsonl").read_text().splitlines()
    supporting = [line for line in passages if json.loads(line)["contents"].split("\n")[0].strip('"') in titles]
    assert len(supporting) >= QUESTIONS
    (folder / "questions.jsonl").write_text("\n".join(questions))
    (folder / "corpus.jsonl").write_text("\n".join({*supporting, *passages[:OTHER_PASSAGES]}))
    return folder


@pytest.fixture(scope="module")
def first_run(data, shared, tmp_path_factory) -> Path:
    """Trained for one step."""
    out = tmp_path_factory.mktemp("first_run") / "run"
    files = ["--data.train", data / "questions.jsonl", "--retrieval.corpus", data / "corpus.jsonl"]
    files += ["--model.tokenizer", shared / "tokenizer" / "qwen2.5", "--out", out]
    tpu_train.main([*SETTINGS.split(), *map(str, files), "--rl.steps", "1"])
    return out


@pytest.fixture(scope="module")
def exported(first_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first_run_export") / "hf"
    export_hf.main(["--checkpoint", str(first_run), "--out", str(folder)])
    return folder


@pytest.mark.parity
def test_transformers_loads_the_export_and_computes_the_same_logits(first_run, exported):
    import torch
    import transformers

    (file, *_) = sorted((first_run / "trajectories").iterdir())
    (first, *_) = read_trajectories(file)
    (context, *_) = first.trajectory.contexts
    ids_BT = np.array([context.ids])
    config, params = weights.load(exported)
    config = replace(config, compute_dtype="float32")
    forward = jax.jit(qwen.forward, static_argnames="config")
    ours_BTV, _ = forward(params, config, ids_BT, np.arange(ids_BT.shape[1])[None], np.ones_like(ids_BT))
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="float32")
    with torch.no_grad():
        theirs_BTV = model(torch.tensor(ids_BT)).logits.numpy()
    assert np.abs(np.asarray(ours_BTV) - theirs_BTV).max() < 1e-4

    tokenizer = ChatTokenizer.load(exported)
    text = tokenizer.transcript(context.ids)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs.encode(text) == list(tokenizer.encode_trusted(text))
    assert model.generation_config.eos_token_id == list(tokenizer.end_ids)


def test_the_authors_evaluation_on_seven_benchmarks(exported, data, shared, tmp_path, capsys):
    """docs/reproduce.md: with the settings for the published weights, and smaller ones in their place."""
    (small,) = re.findall(r"--model.vocab_size .*--mesh.tensor 2", SETTINGS.replace("\n", " "))
    given = f"--data.root {shared}/data/benchmarks --retrieval.corpus {data}/corpus.jsonl --retrieval.encoder hashing"
    limits = "--evaluation.max_questions 1 --evaluation.max_turns 2 --sampling.slots 8 --sampling.kv_tokens 65536"
    evaluate.main(
        f"--config memsearcher_3b --checkpoint {exported} --benchmarks all {given} --out {tmp_path}/seven "
        f"{small} {limits} --agent.completion_tokens 8".split()
    )
    (trajectory, *rest) = read_trajectories(tmp_path / "seven" / "trajectories" / "host_0000.jsonl.gz")
    opening = ChatTokenizer.load(exported).transcript(trajectory.trajectory.contexts[0].ids)
    assert len(rest) == 6 and "You will answer a complex question through iterative reasoning" in opening
    assert (tmp_path / "seven" / "report.html").is_file() and "bamboogle" in capsys.readouterr().out
