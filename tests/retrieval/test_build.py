"""Builds that are killed, that go on, that find something changed, and that cannot be finished."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval import build as building
from memsearcher_jax.retrieval.build import Part, build, prepare_corpus
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import IndexConfig, open_index
from memsearcher_jax.retrieval.workplace import locked, working_folder

PASSAGES = [Passage(f"p{row}", f'"Title {row}"\nThe passage of number {row}.') for row in range(40)]
CORPUS = corpus_of(PASSAGES)
ENCODER = fit_hashing(CORPUS.texts(0, 40), 32)
CONFIG = IndexConfig(encoder=ENCODER.name, batch=8, shard_rows=16)
reopen = partial(open_index, encoder=ENCODER.name)


@pytest.fixture
def corpus_file(tmp_path):
    def write(passages=PASSAGES, name="corpus.jsonl"):
        rows = [json.dumps({"id": passage.id, "contents": passage.contents}) for passage in passages]
        (tmp_path / name).write_text("\n".join(rows) + "\n")
        return tmp_path / name

    return write


class Counting:
    """An encoder that knows which texts it has embedded, and can be stopped."""

    def __init__(self, stop_at="", error=KeyboardInterrupt):
        self.texts, self.stop_at, self.error = [], stop_at, error

    def __call__(self, texts):
        if self.stop_at and any(self.stop_at in text for text in texts):
            raise self.error
        self.texts += texts
        return ENCODER(texts)


def vectors_of(directory):
    """The vectors that an opened folder searches."""
    return reopen(directory, kind="exact").index.vectors_RD


def test_a_build_that_was_stopped_goes_on_where_it_was(tmp_path):
    first, second = Counting("number 35."), Counting()
    with pytest.raises(KeyboardInterrupt):
        build(CORPUS, first, tmp_path / "i", CONFIG)
    assert not (tmp_path / "i").exists()
    build(CORPUS, second, tmp_path / "i", CONFIG)
    assert second.texts == [CORPUS.contents[0], *CORPUS.texts(32, 40)], "the first text tells the size"
    np.testing.assert_array_equal(vectors_of(tmp_path / "i"), ENCODER(CORPUS.texts(0, 40)))
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    assert sorted(path.name for path in (tmp_path / "i").iterdir()) == sorted(
        ["contents.bin", "contents.offset.npy", "embeddings", "ids.bin", "ids.offset.npy", "manifest.json"]
    )


PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.build import build, prepare_corpus
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import IndexConfig

approximate.SCAN_BELOW = 100
corpus = prepare_corpus(Path(sys.argv[1]), Path(sys.argv[2]))
encoder = fit_hashing(corpus.texts(0, len(corpus)), 32)
def slowly(texts):
    time.sleep(0.05)
    return encoder(texts)
build(corpus, slowly, Path(sys.argv[2]), IndexConfig(encoder.name, batch=16, shard_rows=32))
"""


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path, corpus_file):
    """SIGKILL again and again, at random moments: what is finished in the end is what an undisturbed build makes."""
    passages = [Passage(str(row), f"Passage {row} of {row % 7} and {row % 11}.") for row in range(2_000)]
    file, out = corpus_file(passages), tmp_path / "killed"
    draw, kills = random.Random(0), 0
    while not out.exists():
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, file, out])
        time.sleep(draw.uniform(0.6, 2.0) if kills < 20 else 60)
        if process.poll() is None:
            process.kill()
            kills += 1
        assert process.wait() in (0, -9)
    assert kills >= 3
    subprocess.run([sys.executable, "-c", PROGRAM, file, tmp_path / "whole"], check=True)
    encoder = fit_hashing([passage.contents for passage in passages], 32)
    killed, whole = (open_index(tmp_path / name, encoder=encoder.name) for name in ("killed", "whole"))
    assert killed.manifest["checksum"] == whole.manifest["checksum"]
    assert killed.index.settings.leaves == 89
    exact = [open_index(tmp_path / name, encoder=encoder.name, kind="exact").index for name in ("killed", "whole")]
    np.testing.assert_array_equal(exact[0].vectors_RD, exact[1].vectors_RD)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "whole").iterdir())


def test_a_killed_build_leaves_nothing_that_opens(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; import numpy as np\n"
        "from memsearcher_jax.agent.types import Passage\n"
        "from memsearcher_jax.retrieval.build import build\n"
        "from memsearcher_jax.retrieval.corpus import corpus_of\n"
        "from memsearcher_jax.retrieval.index import IndexConfig\n"
        "corpus = corpus_of(Passage(str(row), 'text') for row in range(4))\n"
        "calls = []\n"
        "def killed(texts):\n"
        "    calls.append(texts)\n"
        "    return np.ones((1, 8), np.float32) if len(calls) < 4 else os._exit(9)\n"
        "build(corpus, killed, Path(sys.argv[1]), IndexConfig(encoder='e', batch=1, shard_rows=1))\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "i")]).returncode == 9
    (left,) = tmp_path.iterdir()
    assert left == working_folder(tmp_path / "i")
    for folder in (left, tmp_path / "i"):
        with pytest.raises(FileNotFoundError, match="not an index folder"):
            open_index(folder, encoder="e")


def test_another_build_in_the_same_place_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(CORPUS, Counting("number 35."), tmp_path / "i", CONFIG)
    changed = corpus_of([*PASSAGES[1:], Passage("p0", "changed")])
    for corpus, config, message in [
        (changed, CONFIG, "was begun with checksum"),
        (CORPUS, replace(CONFIG, encoder="another"), f"was begun with encoder '{ENCODER.name}', and this is 'another'"),
        (CORPUS, replace(CONFIG, dtype="bfloat16"), "was begun with dtype 'float32'"),
        (CORPUS, replace(CONFIG, shard_rows=8), "was begun with shard_rows 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(corpus, ENCODER, tmp_path / "i", config)
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG)


def test_two_processes_do_not_build_in_one_place(tmp_path):
    with (
        locked(working_folder(tmp_path / "i"), "part0"),
        pytest.raises(ValueError, match="another process is building"),
    ):
        build(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG)


def test_several_processes_make_a_part_each(tmp_path, monkeypatch):
    encoders = [Counting(), Counting(), Counting()]
    for number in (2, 1):
        build(CORPUS, encoders[number], tmp_path / "i", CONFIG, part=Part(number, 3))
        assert not (tmp_path / "i").exists()
    build(CORPUS, encoders[0], tmp_path / "i", CONFIG, part=Part(0, 3))
    assert [len(encoder.texts) - 1 for encoder in encoders] == [16, 16, 8], "a shard each"
    np.testing.assert_array_equal(vectors_of(tmp_path / "i"), ENCODER(CORPUS.texts(0, 40)))
    with pytest.raises(ValueError, match="part 3 of 3: parts are numbered from 0 to 2"):
        Part(3, 3)


def test_part_0_waits_for_the_others(tmp_path, monkeypatch):
    waits = []

    def others_arrive(seconds):
        waits.append(seconds)
        build(CORPUS, ENCODER, tmp_path / "i", CONFIG, part=Part(1, 2))

    monkeypatch.setattr(building.time, "sleep", others_arrive)
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG, part=Part(0, 2))
    assert len(waits) == 1
    np.testing.assert_array_equal(vectors_of(tmp_path / "i"), ENCODER(CORPUS.texts(0, 40)))


def test_a_corpus_is_read_once(tmp_path, corpus_file):
    file, out = corpus_file(), tmp_path / "i"
    corpus = prepare_corpus(file, out)
    assert corpus.checksum == CORPUS.checksum
    assert corpus.texts(0, 40) == CORPUS.texts(0, 40)
    made = (working_folder(out) / "contents.bin").stat().st_mtime_ns
    os.utime(file, ns=(0, 0))  # touched, not changed
    assert prepare_corpus(file, out).checksum == CORPUS.checksum
    assert (working_folder(out) / "contents.bin").stat().st_mtime_ns == made
    corpus_file(PASSAGES[:39])
    with pytest.raises(ValueError, match=r"corpus\.jsonl changed since .*\.i\.building was begun: delete that folder"):
        prepare_corpus(file, out)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "contents": "cut o', ":41: not JSON"),
        ('{"id": "p7", "contents": "again"}', ':41: id "p7" is already the id of line 8'),
        ('{"id": "x"}', ':41: no field "contents"'),
    ],
)
def test_a_corpus_that_cannot_be_read_leaves_nothing(tmp_path, corpus_file, line, message):
    file = corpus_file()
    with file.open("a") as more:
        more.write(line)
    with pytest.raises(ValueError, match=message):
        prepare_corpus(file, tmp_path / "i")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        prepare_corpus(tmp_path / "none", tmp_path / "i")


def test_refuses_vectors_that_are_not_finite_or_too_few(tmp_path):
    def spoiled(texts):
        vectors = ENCODER(texts)
        for row, text in enumerate(texts):
            if "number 21." in text:
                vectors[row, 3] = np.nan
        return vectors

    with pytest.raises(ValueError, match='passage "p21" is not finite'):
        build(CORPUS, spoiled, tmp_path / "i", CONFIG)
    with pytest.raises(ValueError, match=r"returned shape \(7, 32\) for 8 texts"):
        build(CORPUS, lambda texts: ENCODER(texts[: max(1, len(texts) - 1)]), tmp_path / "j", CONFIG)
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG)


def test_a_full_disk(tmp_path):
    """/dev/full refuses every byte, as a full disk does."""
    with pytest.raises(KeyboardInterrupt):
        build(CORPUS, Counting("number 20."), tmp_path / "i", CONFIG)
    blocked = working_folder(tmp_path / "i") / "embeddings" / "000001.partial"
    blocked.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"\.i\.building: the disk is full; make room and give the same command again"):
        build(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    blocked.unlink()
    again = Counting()
    build(CORPUS, again, tmp_path / "i", CONFIG)
    assert len(again.texts) == 1 + 24, "the shard that was done is not made again"


def test_a_disk_that_is_too_small_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000})())
    counting = Counting()
    with pytest.raises(OSError, match=r"i\.building: needs 5\.1 kB on a disk that has 1\.0 kB free: make room"):
        build(CORPUS, counting, tmp_path / "i", CONFIG)
    assert len(counting.texts) == 1


def test_published_vectors_need_no_embedding(tmp_path):
    vectors, counting = ENCODER(CORPUS.texts(0, 40)), Counting()
    build(CORPUS, counting, tmp_path / "i", CONFIG, published=vectors.astype(np.float16))
    assert len(counting.texts) == building.COMPARED
    np.testing.assert_allclose(vectors_of(tmp_path / "i"), vectors, atol=1e-3)


def test_published_vectors_of_something_else(tmp_path):
    vectors = ENCODER(CORPUS.texts(0, 40))
    spoilt = vectors.copy()
    spoilt[13, 2] = np.inf
    for published, message in [
        (vectors[:39], "there are 39 published vectors, and 40 passages"),
        (vectors[:, :16], "have 16 dimensions, the encoder 32"),
        (vectors[:, ::-1], "are not this encoder's: on 32 passages their median cosine with its own is -?0"),
        (vectors[::-1], "check the encoder, its prompts and the order of the corpus"),
        (spoilt, 'the embedding of passage "p13" is not finite'),
    ]:
        with pytest.raises(ValueError, match=message):
            build(CORPUS, ENCODER, tmp_path / "i", CONFIG, published=published)


def test_recall_is_measured_before_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "SCAN_BELOW", 30)
    steps = []
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG, report=lambda step, done, total: steps.append((step, done, total)))
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert manifest["recall"] >= 0.9
    assert manifest["measured_on"] > 200
    assert steps[-2:] == [("building the tree", 0, 0), ("measuring recall", 0, 0)]
    assert [done for step, done, total in steps if step == "embedding"] == [0, 8, 16, 24, 32, 40]
    assert not [path for path in Path(tmp_path / "i").iterdir() if path.name == building.FLOATS]


def test_a_recall_out_of_reach_stops_the_build_and_a_lower_one_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "SCAN_BELOW", 30)
    counting = Counting()
    with monkeypatch.context() as patched:
        patched.setattr(approximate, "recall_of", lambda found, exact: 0.5)
        with pytest.raises(ValueError, match=r"ScaNN finds 0\.500 .* lower retrieval\.recall from 0\.98"):
            build(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    build(CORPUS, counting, tmp_path / "i", replace(CONFIG, recall=0.9))
    assert not set(counting.texts) & set(CORPUS.texts(1, 40)), "nothing is embedded again"
