"""Encoders agree with transformers in float32, with random weights of every variant."""

import jax
import numpy as np
import pytest

from memsearcher_jax.encoders import bert

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
VARIANTS = {
    "e5": ("Bert", {}),
    "wide_epsilon": ("Bert", {"layer_norm_eps": 1e-3}),
    "other_padding": ("Bert", {"pad_token_id": 5}),
    "roberta": ("Roberta", ROBERTA),
    "multilingual_e5": ("XLMRoberta", ROBERTA),
}


@pytest.fixture(params=VARIANTS)
def theirs(request):
    """A model of transformers with random weights, biases and norms included."""
    family, settings = VARIANTS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**BASE | settings)
    model = getattr(transformers, f"{family}Model")(config).eval()
    for weight in model.parameters():
        weight.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vectors_equal_those_of_transformers(theirs, dtype, tmp_path):
    theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="20KB")
    config, params = bert.load(tmp_path)
    theirs.float()
    rng = np.random.RandomState(1)
    ids_BT, length_B = rng.randint(6, 96, (6, 33)), np.array([33, 1, 2, 17, 32, 8])
    # RoBERTa finds its padding by the id, BERT by the mask.
    real_BT = np.arange(ids_BT.shape[1]) < length_B[:, None]
    ids = torch.from_numpy(np.where(real_BT, ids_BT, theirs.config.pad_token_id))
    with torch.no_grad():
        hidden_BTD = theirs(ids, attention_mask=torch.from_numpy(real_BT).long()).last_hidden_state.numpy()
    ours_BTD = jax.jit(bert.hidden_states, static_argnames="config")(params, config, ids_BT, length_B)
    np.testing.assert_allclose(np.asarray(ours_BTD)[real_BT], hidden_BTD[real_BT], atol=2e-4)
    mean_BD = (hidden_BTD * real_BT[..., None]).sum(axis=1) / length_B[:, None]
    mean_BD /= np.linalg.norm(mean_BD, axis=1, keepdims=True)
    ours_BD = np.asarray(bert.encode(params, config, ids_BT, length_B))
    assert (ours_BD * mean_BD).sum(axis=1).min() >= 0.99999
