"""The embedded world: a small fictional encyclopedia and the questions that it answers, drawn from a seed.

It is three societies in one corpus. The training questions are about the first, the test questions about the second,
and nobody asks about the third. No fact leads from one society to another, so the splits share no entity that a
question names, passes through or has for an answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from memsearcher_jax.agent.types import Passage, Problem
from memsearcher_jax.data.language import ask, describe
from memsearcher_jax.data.names import Names


@dataclass(frozen=True)
class WorldConfig:
    """Size and seed of the embedded world. A society has about two passages for each of its people."""

    seed: int = 0
    """Another seed is another world: other names, other facts, other questions."""
    train_people: int = 64
    """People of the society that the training questions are about; at least 16."""
    test_people: int = 32
    """People of the society that the test questions are about; at least 16."""
    other_people: int = 48
    """People of the society that nobody asks about; 0, or at least 16."""
    train_questions: int = 360
    """Training questions, spread evenly over the numbers of hops."""
    test_questions: int = 120
    """Test questions, likewise."""
    hops: tuple[int, ...] = (1, 2, 3)
    """Numbers of facts that a question needs."""


@dataclass(frozen=True)
class Entity:
    """Somebody or something with a passage of its own."""

    name: str  # also the title of the passage; unique in the world
    kind: str
    relations: dict[str, str]  # relation -> the name of the entity it leads to
    woman: bool = False


@dataclass(frozen=True)
class World:
    passages: tuple[Passage, ...]  # shuffled: the order says nothing
    entities: dict[str, Entity]  # by name
    train: tuple[Problem, ...]
    test: tuple[Problem, ...]


def make_world(config: WorldConfig) -> World:
    """Draw the world of this seed: the same in every process. Raises ValueError where the numbers cannot be met."""
    names = Names(_rng(config.seed, "names"))
    societies = {
        split: _society(_rng(config.seed, split, "society"), names, people, split)
        for split, people in (
            ("train", config.train_people),
            ("test", config.test_people),
            ("other", config.other_people),
        )
    }
    entities = {entity.name: entity for society in societies.values() for entity in society}
    order = list(entities.values())
    rng = _rng(config.seed, "passages")
    rng.shuffle(order)
    passages = tuple(
        Passage(str(row), describe(rng, entity.name, entity.kind, entity.woman, entity.relations))
        for row, entity in enumerate(order)
    )
    return World(
        passages=passages,
        entities=entities,
        train=_questions(config, "train", societies["train"], config.train_questions),
        test=_questions(config, "test", societies["test"], config.test_questions),
    )


def _rng(seed: int, *names: str) -> random.Random:
    """A stream of its own for each purpose, so that a change of one leaves the others as they were.

    Seeding with a string goes through SHA-512 and not through `hash()`, which differs between processes.
    """
    return random.Random("/".join((str(seed), *names)))


def _society(rng: random.Random, names: Names, people: int, split: str) -> list[Entity]:
    """People of two generations with their families, cities, countries, firms and films."""
    if people == 0 and split == "other":
        return []
    if people < 16:
        raise ValueError(f"data.world.{split}_people is {people}: a society needs at least 16 people")
    countries = [names.land() for _ in range(max(2, people // 16))]
    cities = [names.town() for _ in range(people // 4)]
    firms = [names.firm() for _ in range(people // 4)]
    films = [names.film() for _ in range(people // 2)]
    persons = _families(rng, names, people)
    for person in persons:
        person.relations.update(birthplace=rng.choice(cities), employer=rng.choice(firms))

    def some_people(count: int) -> list[str]:
        return [person.name for person in rng.sample(persons, count)]

    country_of = {city: countries[row % len(countries)] for row, city in enumerate(cities)}
    return [
        *persons,
        *(
            Entity(city, "city", {"country": country_of[city], "mayor": mayor})
            for city, mayor in zip(cities, some_people(len(cities)), strict=True)
        ),
        *(
            Entity(country, "country", {"capital": rng.choice([c for c in cities if country_of[c] == country])})
            for country in countries
        ),
        *(
            Entity(firm, "firm", {"headquarters": rng.choice(cities), "founder": founder})
            for firm, founder in zip(firms, some_people(len(firms)), strict=True)
        ),
        *(
            Entity(film, "film", {"director": director, "location": rng.choice(cities)})
            for film, director in zip(films, some_people(len(films)), strict=True)
        ),
    ]


def _families(rng: random.Random, names: Names, people: int) -> list[Entity]:
    """Couples of parents, then couples of their children; an odd person more is single.

    A child bears its mother's surname, so that names resemble each other as they do in families. The two of a couple
    have different mothers.
    """
    couples = people // 2
    parents: list[Entity] = []
    for _ in range(couples // 2):
        parents += _couple(names, [names.surname(), names.surname()])
    mothers = [person for person in parents if person.woman]
    children: list[Entity] = []
    for _ in range(couples - couples // 2):
        pair = rng.sample(mothers, 2)
        couple = _couple(names, [mother.name.split()[1] for mother in pair])
        for child, mother in zip(couple, pair, strict=True):
            child.relations["mother"] = mother.name
        children += couple
    single = [Entity(names.person(names.surname(), woman=True), "person", {}, woman=True)] * (people % 2)
    return parents + children + single


def _couple(names: Names, surnames: list[str]) -> list[Entity]:
    """A woman and a man, married to each other."""
    woman, man = names.person(surnames[0], woman=True), names.person(surnames[1], woman=False)
    return [Entity(woman, "person", {"spouse": man}, woman=True), Entity(man, "person", {"spouse": woman})]


def _questions(config: WorldConfig, split: str, society: list[Entity], count: int) -> tuple[Problem, ...]:
    """Draw `count` different questions, as many of each number of hops as of the next (the first get what is left)."""
    rng = _rng(config.seed, split, "questions")
    entities = {entity.name: entity for entity in society}
    problems = []
    for place, hops in enumerate(config.hops):
        wanted = count // len(config.hops) + (place < count % len(config.hops))
        chains = [chain for entity in society for chain in _chains(entities, (entity.name,), (), hops)]
        if wanted > len(chains):
            raise ValueError(
                f"data.world: {wanted} {split} questions of {hops} hops wanted, {len(chains)} exist: "
                f"raise data.world.{split}_people or lower data.world.{split}_questions"
            )
        problems += [_problem(rng, visited, relations) for visited, relations in rng.sample(chains, wanted)]
    rng.shuffle(problems)
    return tuple(
        Problem(f"{split}_{row}", question, (answer,), metadata)
        for row, (question, answer, metadata) in enumerate(problems)
    )


def _chains(
    entities: dict[str, Entity], visited: tuple[str, ...], relations: tuple[str, ...], hops: int
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Every way to follow `hops` facts on from the last of `visited` without meeting an entity twice."""
    if len(relations) == hops:
        yield visited, relations
        return
    for relation, target in entities[visited[-1]].relations.items():
        if target not in visited:
            yield from _chains(entities, (*visited, target), (*relations, relation), hops)


def _problem(rng: random.Random, visited: tuple[str, ...], relations: tuple[str, ...]) -> tuple[str, str, dict]:
    """Question, answer and metadata of one chain; the passage of every entity but the answer states one fact."""
    metadata = {"hops": len(relations), "relations": list(relations), "supporting_titles": list(visited[:-1])}
    return ask(rng, visited[0], relations), visited[-1], metadata
