import dataclasses
import hashlib
from collections import Counter

import pytest

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia

ENCYCLOPEDIA = make_encyclopedia(EncyclopediaConfig())
TEXT_OF = {passage.title: passage.contents for passage in ENCYCLOPEDIA.passages}


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_question_is_answered_by_its_supporting_passages(split):
    for problem in getattr(ENCYCLOPEDIA, split):
        titles, relations = problem.metadata["supporting_titles"], problem.metadata["relations"]
        assert len(titles) == len(relations) == problem.metadata["hops"]
        assert titles[0] in problem.question
        assert all(title not in problem.question for title in titles[1:]), "bridge entities must not be given"
        for title, relation, following in zip(titles, relations, (*titles[1:], problem.golden_answers[0]), strict=True):
            assert ENCYCLOPEDIA.entities[title].relations[relation] == following
            assert following in TEXT_OF[title]
        assert problem.golden_answers[0] not in problem.question
        assert problem.question.endswith("?")


def test_splits_share_no_entity():
    def mentioned(problems):
        return {name for p in problems for name in (*p.metadata["supporting_titles"], *p.golden_answers)}

    train, test = mentioned(ENCYCLOPEDIA.train), mentioned(ENCYCLOPEDIA.test)
    assert train and test and not train & test
    others = set(ENCYCLOPEDIA.entities) - train - test
    assert len(others) > 50, "distractors"
    for name in train:
        assert not test & set(ENCYCLOPEDIA.entities[name].relations.values())
    assert not any(name in TEXT_OF[title] for name in test for title in train)


def test_the_encyclopedia_is_that_of_the_packaged_weights():
    """In every process and version; another seed has other names."""
    digest = hashlib.sha256(repr(ENCYCLOPEDIA).encode()).hexdigest()
    assert digest[:16] == "6a070dcad12b0727"
    other = make_encyclopedia(EncyclopediaConfig(seed=1))
    assert len(set(other.entities) & set(ENCYCLOPEDIA.entities)) < 0.1 * len(ENCYCLOPEDIA.entities)


@pytest.mark.parametrize("people", [16, 17, 33])
def test_small_and_odd_societies(people):
    config = EncyclopediaConfig(
        train_people=people, test_people=people, other_people=0, train_questions=10, test_questions=4, hops=(1, 2)
    )
    encyclopedia = make_encyclopedia(config)
    assert Counter(p.metadata["hops"] for p in encyclopedia.train) == {1: 5, 2: 5}
    assert sum(entity.kind == "person" for entity in encyclopedia.entities.values()) == 2 * people


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_people": 4}, "data.encyclopedia.train_people is 4"),
        ({"other_people": 3}, "data.encyclopedia.other_people is 3"),
        ({"hops": ()}, "data.encyclopedia.hops is empty"),
        ({"test_questions": 100_000}, "lower data.encyclopedia.test_questions"),
    ],
)
def test_impossible_sizes_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        make_encyclopedia(dataclasses.replace(EncyclopediaConfig(), **changes))
