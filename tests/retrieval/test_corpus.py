import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.types import Passage
from tests.retrieval.samples import make_corpus

GOOD = b'{"id": "0", "contents": "\\"A\\"\\nfirst"}\n'


def test_reads_plain_and_compressed_files(tmp_path):
    rows = [{"id": "0", "contents": '"Łódź"\n𝄞 cafe\u0301'}, {"id": 7, "contents": "漢字\u2028line"}]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    plain, compressed = tmp_path / "c.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_bytes(text)
    compressed.write_bytes(gzip.compress(text))
    corpus, again = make_corpus(plain), make_corpus(compressed)
    assert [corpus.passage(row) for row in range(len(corpus))] == [
        Passage("0", '"Łódź"\n𝄞 café'),
        Passage("7", "漢字\u2028line"),
    ]
    assert corpus.checksum == again.checksum


def test_checksum_depends_on_every_field_boundary():
    def checksum(*rows):
        return make_corpus(Passage(*row) for row in rows).checksum

    first, second = ("a", "bc"), ("d", "e")
    assert checksum(first, second) == checksum(first, second)
    others = [checksum(("ab", "c"), second), checksum(first), checksum(second, first), checksum(("a", "bd"), second)]
    assert len({checksum(first, second), *others}) == 5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1))
def test_any_text_round_trips(texts):
    corpus = make_corpus([Passage(str(row), text) for row, text in enumerate(texts)])
    assert [(passage.id, passage.contents) for passage in corpus] == [(str(n), text) for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b'{"id": "1", "contents": "x', ":2: not JSON"),
        (b'{"contents": "x"}', ':1: no field "id"; a line of a corpus is like {"id": "7", "contents": '),
        (b'{"id": "1"}', ':1: no field "contents"'),
        (b'{"id": true, "contents": "x"}', ':1: field "id" must be text, found bool'),
        (b'{"id": "1", "contents": ["x"]}', ':1: field "contents" must be text, found list'),
        (b'{"id": "1", "contents": " "}', ':1: field "contents" is empty'),
        (b'{"id": "1", "contents": "\\ud800"}', ':1: field "contents" holds a lone surrogate'),
        (b'{"id": "1", "contents": "\xff"}', ":1: not UTF-8"),
        (GOOD + b'\n{"id": "1", "contents": "x"}\n' + GOOD, ':4: id "0" is already the id of line 1'),
        (b"\n \n", ": contains no passages"),
    ],
)
def test_errors_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        make_corpus(path)
    text = str(caught.value)
    assert text.startswith(f"{path}{message}")
    assert "\n" not in text


def test_the_quotes_around_a_title_are_no_part_of_it():
    contents = ('""Weird Al" Yankovic"\ntext', "Lilo &amp; Stitch\ntext", ' "Oslo" \r\ntext')
    assert [Passage("", one).title for one in contents] == ['"Weird Al" Yankovic', "Lilo & Stitch", "Oslo"]
