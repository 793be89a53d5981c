"""Which passages a question is made of."""

from memsearcher_jax.questions.evidence import CorpusPassage, candidates, split_of
from memsearcher_jax.types import Passage

FILLER = "This line only makes the passage long enough for a question, as pages of documents are. " * 2


def entry(title, text, source=""):
    return CorpusPassage(Passage(title, f'"{title}"\n{text} {FILLER}'), source or title)


def chains(corpus, hops, same_split=True, monkeypatch=None):
    if same_split:
        monkeypatch.setattr("memsearcher_jax.questions.evidence.split_of", lambda passage: "train")
    return {tuple(passage.title for passage in unit.passages) for unit in candidates(corpus, [hops], seed=0)}


def test_passages_are_joined_by_names_and_links(monkeypatch):
    corpus = [
        entry("Kestrel", "The brig was built by Ada Kern."),
        entry("Ada Kern (builder)", "She was born in Marn."),
        entry("Lands > Marn", "A town by the sea."),
        entry("Guide > Start", "See [the rules](../rules/all.md#first) for more.", "docs/guide/start.md"),
        entry("Rules", "Do not run.", "docs/rules/all.md"),
        CorpusPassage(Passage("short", '"Kern"\nToo short.'), "short"),
    ]
    assert chains(corpus, 1, monkeypatch=monkeypatch) == {(entry.passage.title,) for entry in corpus[:5]}
    assert chains(corpus, 2, monkeypatch=monkeypatch) == {
        ("Kestrel", "Ada Kern (builder)"),
        ("Ada Kern (builder)", "Lands > Marn"),
        ("Guide > Start", "Rules"),
    }
    assert chains(corpus, 3, monkeypatch=monkeypatch) == {("Kestrel", "Ada Kern (builder)", "Lands > Marn")}


def test_a_common_word_or_heading_is_no_name(monkeypatch):
    usages = [entry(f"Tool{number} > Usage", "Usage is simple.") for number in range(5)]
    assert chains([*usages, entry("Other", "The usage of it.")], 2, monkeypatch=monkeypatch) == set()
    mentions = [entry(f"Page {number}", f"It has water {number}.") for number in range(30)]
    assert chains([*mentions, entry("Water", "It is wet.")], 2, monkeypatch=monkeypatch) == set()


def test_no_split_shares_a_passage():
    corpus = [entry(f"Town{number}", f"It lies near Town{(number + 1) % 400}.") for number in range(400)]
    used = {}
    for unit in candidates(corpus, [1, 2, 3], seed=0):
        for passage in unit.passages:
            assert split_of(passage) == unit.split
            used.setdefault(unit.split, set()).add(passage.id)
    assert sum(map(len, used.values())) == 400
    assert 280 < len(used["train"]) < 360 and 15 < len(used["tune"]) < 75 and 15 < len(used["test"]) < 75


def test_the_numbers_of_hops_take_turns():
    corpus = [entry(f"Town{number}", f"It lies near Town{(number + 1) % 400}.") for number in range(400)]
    first = [unit.hops for unit, _ in zip(candidates(corpus, [1, 2, 3], seed=0), range(6), strict=False)]
    assert first == [1, 2, 3, 1, 2, 3]
    again = [unit.key for unit, _ in zip(candidates(corpus, [2], seed=1), range(20), strict=False)]
    assert again == [unit.key for unit, _ in zip(candidates(corpus, [2], seed=1), range(20), strict=False)]
    assert again != [unit.key for unit, _ in zip(candidates(corpus, [2], seed=2), range(20), strict=False)]
