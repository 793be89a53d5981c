import dataclasses
import hashlib
import subprocess
import sys
from collections import Counter

import pytest

from memsearcher_jax.data.language import RELATION, RELATIONS, ask
from memsearcher_jax.data.world import WorldConfig, make_world

WORLD = make_world(WorldConfig())
TEXT_OF = {passage.title: passage.contents for passage in WORLD.passages}


def test_size_and_spread():
    assert 250 < len(WORLD.passages) < 350
    assert (len(WORLD.train), len(WORLD.test)) == (360, 120)
    for split, each in ((WORLD.train, 120), (WORLD.test, 40)):
        assert Counter(p.metadata["hops"] for p in split) == {1: each, 2: each, 3: each}
        assert len({(p.question, p.golden_answers) for p in split}) >= 0.99 * len(split)
        assert {r for p in split for r in p.metadata["relations"]} == set(RELATION)


def test_titles_and_ids_are_unique():
    assert len(TEXT_OF) == len(WORLD.passages) == len({p.id for p in WORLD.passages}) == len(WORLD.entities)
    assert set(TEXT_OF) == set(WORLD.entities)
    ids = [p.id for p in (*WORLD.train, *WORLD.test)]
    assert len(set(ids)) == len(ids)


def test_relations_lead_to_entities_of_the_right_kind():
    for entity in WORLD.entities.values():
        for relation, target in entity.relations.items():
            assert entity.kind == RELATION[relation].subject
            assert WORLD.entities[target].kind == RELATION[relation].object
            if relation == "spouse":
                assert WORLD.entities[target].relations["spouse"] == entity.name
            if relation == "mother":
                assert WORLD.entities[target].woman
            if relation == "capital":
                assert WORLD.entities[target].relations["country"] == entity.name


def test_passages_state_their_facts_and_follow_the_layout():
    for entity in WORLD.entities.values():
        title, body = TEXT_OF[entity.name].split("\n")
        assert title == f'"{entity.name}"'
        assert body.endswith(".") and "{" not in body and "  " not in body
        assert entity.name in body.split(". ")[0], "the first sentence says whom it is about"
        for target in entity.relations.values():
            assert target in body


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_question_is_answered_by_its_supporting_passages(split):
    for problem in getattr(WORLD, split):
        titles, relations = problem.metadata["supporting_titles"], problem.metadata["relations"]
        assert len(titles) == len(relations) == problem.metadata["hops"]
        assert titles[0] in problem.question
        assert all(title not in problem.question for title in titles[1:]), "bridges must be found, not read"
        for title, relation, following in zip(titles, relations, (*titles[1:], problem.golden_answers[0]), strict=True):
            assert WORLD.entities[title].relations[relation] == following
            assert following in TEXT_OF[title]
        assert problem.golden_answers[0] not in problem.question
        assert problem.question.endswith("?")


def test_splits_share_no_entity_of_any_question():
    def touched(problems):
        return {name for p in problems for name in (*p.metadata["supporting_titles"], *p.golden_answers)}

    train, test = touched(WORLD.train), touched(WORLD.test)
    assert train and test and not train & test
    unasked = set(WORLD.entities) - train - test
    assert len(unasked) > 50, "distractors"
    for name in train:
        assert not test & set(WORLD.entities[name].relations.values())
    assert not any(name in TEXT_OF[title] for name in test for title in train)


def test_every_paraphrase_can_be_drawn():
    contents = " ".join(passage.contents for passage in make_world(WorldConfig(seed=5, train_people=200)).passages)
    for relation in RELATIONS:
        for fact in relation.facts:
            fixed = max((part.split("}")[-1] for part in fact.split("{")), key=len)
            assert fixed in contents, fact


def test_questions_nest():
    class First:
        choice = staticmethod(lambda options: options[0])

    assert ask(First, "X", ("director", "mother", "birthplace")) == "Where was the mother of the director of X born?"


def test_another_seed_is_another_world():
    other = make_world(WorldConfig(seed=1))
    assert len(set(other.entities) & set(WORLD.entities)) < 0.1 * len(WORLD.entities)
    assert make_world(WorldConfig()) == WORLD


def test_the_same_in_every_process():
    code = (
        "import hashlib; from memsearcher_jax.data.world import *;"
        "print(hashlib.sha256(repr(make_world(WorldConfig())).encode()).hexdigest())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert outputs == [hashlib.sha256(repr(WORLD).encode()).hexdigest()] * 2


@pytest.mark.parametrize("people", [16, 17, 33])
def test_small_and_odd_societies(people):
    config = WorldConfig(
        train_people=people, test_people=people, other_people=0, train_questions=10, test_questions=4, hops=(1, 2)
    )
    world = make_world(config)
    assert Counter(p.metadata["hops"] for p in world.train) == {1: 5, 2: 5}
    assert sum(entity.kind == "person" for entity in world.entities.values()) == 2 * people


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_people": 4}, "data.world.train_people is 4"),
        ({"other_people": 3}, "data.world.other_people is 3"),
        ({"test_questions": 100_000}, "lower data.world.test_questions"),
    ],
)
def test_numbers_that_cannot_be_met(changes, message):
    with pytest.raises(ValueError, match=message):
        make_world(dataclasses.replace(WorldConfig(), **changes))
