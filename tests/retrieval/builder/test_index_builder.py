"""Builds that are interrupted, resumed, changed, or impossible."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memsearcher_jax.retrieval import scann_index, vector_files
from memsearcher_jax.retrieval.bm25 import BM25, TITLES
from memsearcher_jax.retrieval.builder import index_builder
from memsearcher_jax.retrieval.builder.build_dir import locked, staging_dir
from memsearcher_jax.retrieval.builder.earlier_index import Kept
from memsearcher_jax.retrieval.builder.index_builder import BuildShard, build_index, prepare_corpus
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import HASHING_NAME, TextEncoder, fit_hashing
from memsearcher_jax.retrieval.index import open_index
from memsearcher_jax.retrieval.local_source import open_source
from memsearcher_jax.types import Passage

PASSAGES = [Passage(f"p{row}", f'"Title {row}"\nThe passage of number {row}.') for row in range(40)]
TEXTS = [passage.contents for passage in PASSAGES]
ENCODER = fit_hashing(TEXTS, 32)
NAME = "hashed"
CONFIG = RetrievalConfig()
reopen = partial(open_index, encoder=NAME)


def build(folder, encoder=ENCODER, config=CONFIG, passages=PASSAGES, name=NAME, **options):
    return build_index(config, passages, folder, TextEncoder(name, encoder, encoder), **options)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(vector_files, "SHARD_ROWS", 16)
    monkeypatch.setattr(index_builder, "MAX_BATCH", 8)


@pytest.fixture
def corpus_file(tmp_path):
    def write(passages=PASSAGES, name="corpus.jsonl"):
        rows = [json.dumps({"id": passage.id, "contents": passage.contents}) for passage in passages]
        (tmp_path / name).write_text("\n".join(rows) + "\n")
        return tmp_path / name

    return write


class RecordingEncoder:
    """An encoder that records its texts, and raises an error at one of them."""

    def __init__(self, stop_at="", error=KeyboardInterrupt):
        self.texts, self.stop_at, self.error = [], stop_at, error

    def __call__(self, texts):
        if self.stop_at and any(self.stop_at in text for text in texts):
            raise self.error
        self.texts += texts
        return ENCODER(texts)


def vectors_of(directory):
    """The vectors that an opened folder searches."""
    return reopen(directory, index_type="exact").index.vectors_RD


def test_an_interrupted_build_continues(tmp_path):
    first, second = RecordingEncoder("number 35."), RecordingEncoder()
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", first)
    assert not (tmp_path / "i").exists()
    for unfinished in (tmp_path / "i", staging_dir(tmp_path / "i")):
        with pytest.raises(FileNotFoundError, match="not an index folder"):
            reopen(unfinished)
    build(tmp_path / "i", second)
    assert second.texts == [TEXTS[0], *TEXTS[32:]], "the first text determines the size"
    np.testing.assert_array_equal(vectors_of(tmp_path / "i"), ENCODER(TEXTS))
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    files = ["embeddings", "manifest.json", "passages.arrow"]
    assert sorted(path.name for path in (tmp_path / "i").iterdir()) == files


def test_a_build_with_other_settings_is_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", RecordingEncoder("number 35."))
    changed = [*PASSAGES[1:], Passage("p0", "changed")]
    for options, message in [
        ({"passages": changed}, "the made corpus changed since the build"),
        ({"name": "another"}, f"was started with encoder '{NAME}', not 'another'"),
        ({"config": replace(CONFIG, max_passage_tokens=9)}, "was started with max_passage_tokens 512, not 9"),
        ({"config": replace(CONFIG, method="bm25")}, r"\.i\.building has vectors of another build: delete it, or omit"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(tmp_path / "i", **options)
    build(tmp_path / "i")


def test_a_folder_with_other_files_is_not_changed(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").touch()
    (tmp_path / "file").touch()
    for taken in (tmp_path / "folder", tmp_path / "file"):
        with pytest.raises(FileExistsError, match="already exists; choose another folder"):
            build(taken)
    (tmp_path / "folder" / "notes").unlink()
    build(tmp_path / "folder")
    assert (tmp_path / "folder" / "manifest.json").is_file()
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "volume")
    with pytest.raises(FileExistsError, match="is a mounted volume, which cannot be replaced; choose a folder in it"):
        build(tmp_path / "volume")


@pytest.mark.parametrize("name", ["../folder", "../link", "."])
def test_an_empty_folder_is_replaced_by_any_name(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path / "folder")
    build(Path(name))
    assert (tmp_path / "folder" / "manifest.json").is_file()


def test_concurrent_builds_of_one_index_are_an_error(tmp_path):
    with (
        locked(staging_dir(tmp_path / "i"), "shard0"),
        pytest.raises(ValueError, match="another process is building"),
    ):
        build(tmp_path / "i")
    build(tmp_path / "i")


def test_shard_0_waits_for_the_others(tmp_path, monkeypatch):
    waits = []

    def build_other_shard(seconds):
        waits.append(seconds)
        build(tmp_path / "i", shard=BuildShard(1, 2))

    monkeypatch.setattr(index_builder.time, "sleep", build_other_shard)
    build(tmp_path / "i", shard=BuildShard(0, 2))
    assert len(waits) == 1
    np.testing.assert_array_equal(vectors_of(tmp_path / "i"), ENCODER(TEXTS))


def test_passages_are_stored_once(tmp_path, corpus_file):
    file, out = corpus_file(), tmp_path / "i"
    assert list(prepare_corpus(file, out)) == PASSAGES
    made = (staging_dir(out) / "passages.arrow").stat().st_mtime_ns
    assert list(prepare_corpus(file, out)) == PASSAGES
    assert (staging_dir(out) / "passages.arrow").stat().st_mtime_ns == made
    corpus_file(PASSAGES[:39])
    with pytest.raises(ValueError, match=r"corpus\.jsonl changed since the build of .*\.i\.building started: delete"):
        prepare_corpus(file, out)


def test_an_invalid_corpus_leaves_no_files(tmp_path, corpus_file):
    file = corpus_file([*PASSAGES, PASSAGES[7]])
    with pytest.raises(ValueError, match=':41: id "p7" is already the id of line 8'):
        prepare_corpus(file, tmp_path / "i")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        prepare_corpus(tmp_path / "none", tmp_path / "i")
    os.mkfifo(tmp_path / "pipe")  # of which the first reader would take the beginning
    for source in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is a folder or a pipe"):
            prepare_corpus(source, tmp_path / "i")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "pipe"]


def test_invalid_vectors_are_errors(tmp_path):
    def not_finite(texts):
        vectors = ENCODER(texts)
        for row, text in enumerate(texts):
            if "number 21." in text:
                vectors[row, 3] = np.nan
        return vectors

    with pytest.raises(ValueError, match='passage "p21" is zero or not finite'):
        build(tmp_path / "i", not_finite)
    with pytest.raises(ValueError, match=r"returned shape \(7, 32\) for 8 texts"):
        build(tmp_path / "j", lambda texts: ENCODER(texts[: max(1, len(texts) - 1)]))
    build(tmp_path / "i")


def test_precomputed_vectors_are_not_embedded(tmp_path):
    vectors, counting = ENCODER(TEXTS), RecordingEncoder()
    build(tmp_path / "i", counting, precomputed=vectors.astype(np.float16))
    assert len(counting.texts) == index_builder.COMPARED_ROWS
    np.testing.assert_allclose(vectors_of(tmp_path / "i"), vectors, atol=1e-3)
    build(tmp_path / "longer", precomputed=vectors * np.logspace(-18, 22, 40)[:, None])
    np.testing.assert_allclose(vectors_of(tmp_path / "longer"), vectors, atol=1e-6)


def test_precomputed_vectors_of_another_encoder_or_corpus_are_errors(tmp_path):
    vectors = ENCODER(TEXTS)
    damaged = vectors.copy()
    damaged[13, 2] = np.inf
    unfilled = np.where(np.arange(len(vectors))[:, None] < 30, vectors, 0)
    cases = [
        (vectors[:39], r"are \(39, 32\), passages and encoder need \(40, 32\)"),
        (vectors[:, :16], r"are \(40, 16\), passages and encoder need \(40, 32\)"),
        (vectors[:, ::-1], "are from another encoder: on 32 passages their median cosine with this encoder's is -?0"),
        (vectors[::-1], "check the encoder, its prompts and the order of the corpus"),
        (damaged, 'the embedding of passage "p13" is zero or not finite'),
        (unfilled, 'the embedding of passage "p30" is zero or not finite'),
        (vectors + 0.01, r"was started with embeddings '\w+', not '\w+': use the same"),
    ]
    for number, (precomputed, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message):
            build(tmp_path / f"{min(number, 5)}", precomputed=precomputed)


def test_recall_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(scann_index, "MIN_TREE_ROWS", 30)
    steps = []
    build(tmp_path / "i", on_progress=lambda step, done, total: steps.append((step, done, total)))
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert manifest["recall"] >= 0.9
    assert manifest["measured_on"] > 200
    assert [step for step, _, _ in steps[-2:]] == ["building the tree", "measuring recall"]
    assert [done for step, done, total in steps if step == "embedding"] == [0, 8, 16, 24, 32, 40]
    assert not (tmp_path / "i" / index_builder.FLOATS).exists()


def test_the_recall_is_verified_on_held_out_probes(tmp_path, monkeypatch):
    """A tree that misses the target there is tuned to a higher one."""
    monkeypatch.setattr(scann_index, "MIN_TREE_ROWS", 30)
    tune, aims = scann_index.tune, []

    def overfit(tree, probes, exact, aim):
        aims.append(aim)
        missing = replace(tree, leaves_searched=1)
        return tune(tree, probes, exact, 0.9) if aim > 0.95 else missing

    monkeypatch.setattr(scann_index, "tune", overfit)
    build(tmp_path / "i", config=replace(CONFIG, target_recall=0.9))
    assert aims == pytest.approx([0.9, 0.925, 0.95, 0.975])
    assert json.loads((tmp_path / "i" / "manifest.json").read_text())["recall"] >= 0.9


CHANGED = [Passage("new", "An unseen passage."), *PASSAGES[5:20], Passage("again", TEXTS[7]), *PASSAGES[20:33]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_index_that_is_built_again_embeds_only_what_is_new(tmp_path, dtype):
    config = replace(CONFIG, embedding_dtype=dtype)
    build(tmp_path / "i", config=config)
    encoder = RecordingEncoder()
    kept = build(tmp_path / "i", encoder, config=config, passages=CHANGED)
    assert kept == Kept(passages=29, new=1, removed=12, vectors=29)
    # The first text is also encoded to learn the size of the vectors.
    assert set(encoder.texts) == {"An unseen passage."}
    build(tmp_path / "fresh", config=config, passages=CHANGED)
    again, fresh = reopen(tmp_path / "i"), reopen(tmp_path / "fresh")
    np.testing.assert_array_equal(again.index.vectors_RD, fresh.index.vectors_RD)
    assert [passage.id for passage in again.corpus] == [passage.id for passage in CHANGED]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "i"]


def test_vectors_of_the_hashing_encoder_depend_on_the_whole_corpus(tmp_path):
    config = replace(CONFIG, index_type="exact")
    build_index(config, PASSAGES, tmp_path / "i")
    assert build_index(config, CHANGED, tmp_path / "i") == Kept(passages=29, new=1, removed=12, vectors=0)
    build_index(config, CHANGED, tmp_path / "fresh")
    again, fresh = (open_index(tmp_path / name, encoder=HASHING_NAME, index_type="exact") for name in ("i", "fresh"))
    np.testing.assert_array_equal(again.index.vectors_RD, fresh.index.vectors_RD)


def test_an_index_of_the_same_passages_is_kept(tmp_path):
    build(tmp_path / "i")
    before = (tmp_path / "i" / "manifest.json").stat()
    encoder = RecordingEncoder()
    assert build(tmp_path / "i", encoder) == Kept(passages=40, new=0, removed=0, vectors=40)
    after = (tmp_path / "i" / "manifest.json").stat()  # its time of access changes
    assert not encoder.texts
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


def test_another_index_is_not_replaced(tmp_path):
    build(tmp_path / "i")
    before = (tmp_path / "i" / "manifest.json").read_bytes()
    other = [Passage("0", "Something else.")]
    for message, options in {
        "of other passages": {"passages": other},
        "built with encoder 'hashed', not 'other'": {"name": "other"},
        "built with dtype 'float32', not 'float16'": {"config": replace(CONFIG, embedding_dtype="float16")},
        "built with index_type 'scann', not 'exact'": {"config": replace(CONFIG, index_type="exact")},
        "built with encoder 'hashed', not None": {"config": replace(CONFIG, method="bm25")},
    }.items():
        with pytest.raises(FileExistsError, match=f"already exists, {message}; choose another folder, or delete it"):
            build(tmp_path / "i", **{"passages": CHANGED, **options})
        assert [path.name for path in tmp_path.iterdir()] == ["i"]
    assert (tmp_path / "i" / "manifest.json").read_bytes() == before


def test_a_replacement_that_is_killed_loses_no_index(tmp_path, monkeypatch):
    build(tmp_path / "i")
    encoder = RecordingEncoder(stop_at="unseen")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", encoder, passages=CHANGED)
    assert len(reopen(tmp_path / "i").corpus) == 40, "the earlier index can be searched meanwhile"
    rename = Path.rename

    def killed(path, target):
        if Path(target).name == "i":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", passages=CHANGED)
    assert not (tmp_path / "i").exists()
    monkeypatch.setattr(Path, "rename", rename)
    build(tmp_path / "i", passages=CHANGED)
    assert len(reopen(tmp_path / "i").corpus) == 30
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


@pytest.mark.parametrize(("method", "folders"), [("dense", []), ("bm25", [BM25]), ("hybrid", [BM25, TITLES])])
def test_the_indexes_of_words_are_part_of_the_folder(tmp_path, monkeypatch, method, folders):
    config = RetrievalConfig(method=method, index_type="exact", index=str(tmp_path / "i"))
    build_index(config, PASSAGES, tmp_path / "i")
    assert [name for name in (BM25, TITLES) if (tmp_path / "i" / name).exists()] == folders
    monkeypatch.setattr("memsearcher_jax.retrieval.bm25._build", None)  # opening the index builds nothing
    source = open_source(config, tmp_path / "elsewhere")
    assert source.search(["passage of number 7"], 1)[0][0].id == "p7"
    assert not (tmp_path / "elsewhere").exists()
