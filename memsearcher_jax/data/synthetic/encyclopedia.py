"""The embedded encyclopedia: a small fictional corpus and multi-hop questions about it, generated from a seed.

The corpus describes three separate societies. Training questions are about the first one, test questions about the
second one; the third one only adds passages. No fact links two societies, so the splits share no entity that a question
names, passes through or has as its answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from memsearcher_jax.data.synthetic.entity_names import NameGenerator, named_random
from memsearcher_jax.data.synthetic.relations import Entity, make_passage, make_question
from memsearcher_jax.ranges import CountOrZero, Hops, Seed
from memsearcher_jax.types import Passage, Problem


@dataclass(frozen=True)
class EncyclopediaConfig:
    """Seed and size of the embedded encyclopedia, which has about two passages per person."""

    seed: Seed = 0
    """Seed of the names, facts and questions."""
    train_people: CountOrZero = 64
    """People in the society of the training questions; at least 16."""
    test_people: CountOrZero = 32
    """People in the society of the test questions; at least 16."""
    other_people: CountOrZero = 48
    """People in the society without questions; 0, or at least 16."""
    train_questions: CountOrZero = 360
    """Training questions, distributed evenly over `hops`."""
    test_questions: CountOrZero = 120
    """Test questions, distributed evenly over `hops`."""
    hops: tuple[Hops, ...] = (1, 2, 3)
    """Numbers of facts that a question combines."""


@dataclass(frozen=True)
class Chain:
    """Facts that follow one another: `relations[i]` leads from `visited[i]` to `visited[i + 1]`."""

    visited: tuple[str, ...]  # names of entities
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Encyclopedia:
    passages: tuple[Passage, ...]  # in random order
    entities: dict[str, Entity]  # by name
    train: tuple[Problem, ...]
    test: tuple[Problem, ...]


def make_encyclopedia(config: EncyclopediaConfig) -> Encyclopedia:
    """Generate the encyclopedia. Raises ValueError if the societies are too small for the settings."""
    names = NameGenerator(named_random(config.seed, "names"))
    people = {"train": config.train_people, "test": config.test_people, "other": config.other_people}
    societies = {split: _society(config.seed, names, count, split) for split, count in people.items()}
    entities = {entity.name: entity for society in societies.values() for entity in society}
    order = list(entities.values())
    rng = named_random(config.seed, "passages")
    rng.shuffle(order)
    passages = tuple(Passage(str(row), make_passage(rng, entity)) for row, entity in enumerate(order))
    train = _questions(config, "train", societies["train"], config.train_questions)
    test = _questions(config, "test", societies["test"], config.test_questions)
    return Encyclopedia(passages, entities, train, test)


def _society(seed: int, names: NameGenerator, people: int, split: str) -> list[Entity]:
    """Two generations of families, and their cities, countries, firms and films."""
    if people == 0 and split == "other":
        return []
    if people < 16:
        raise ValueError(f"data.encyclopedia.{split}_people is {people}: a society needs at least 16 people")
    rng = named_random(seed, split, "society")
    countries = [names.country() for _ in range(max(2, people // 16))]
    cities = [names.town() for _ in range(people // 4)]
    firms = [names.firm() for _ in range(people // 4)]
    films = [names.film() for _ in range(people // 2)]
    persons = _families(rng, names, people)
    for person in persons:
        person.relations.update(birthplace=rng.choice(cities), employer=rng.choice(firms))

    def with_people(names: list[str]) -> Iterator[tuple[str, str]]:
        return zip(names, (person.name for person in rng.sample(persons, len(names))), strict=True)

    country_of = {city: countries[row % len(countries)] for row, city in enumerate(cities)}
    society = list(persons)
    for city, mayor in with_people(cities):
        society.append(Entity(city, "city", {"country": country_of[city], "mayor": mayor}))
    for country in countries:
        capital = rng.choice([city for city in cities if country_of[city] == country])
        society.append(Entity(country, "country", {"capital": capital}))
    for firm, founder in with_people(firms):
        society.append(Entity(firm, "firm", {"headquarters": rng.choice(cities), "founder": founder}))
    for film, director in with_people(films):
        society.append(Entity(film, "film", {"director": director, "location": rng.choice(cities)}))
    return society


def _families(rng: random.Random, names: NameGenerator, people: int) -> list[Entity]:
    """Couples of parents, couples of their children, and a single person if `people` is odd.

    Children have their mother's surname, so that names within a family are similar. Spouses have different mothers.
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
    single_surname = names.surname()
    # This name is drawn in any case, because every later name depends on the names drawn before.
    single_name = names.person(single_surname, woman=True)
    single = Entity(single_name, "person", {}, woman=True)
    return [*parents, *children, single] if people % 2 else parents + children


def _couple(names: NameGenerator, surnames: list[str]) -> list[Entity]:
    woman = names.person(surnames[0], woman=True)
    man = names.person(surnames[1], woman=False)
    return [Entity(woman, "person", {"spouse": man}, woman=True), Entity(man, "person", {"spouse": woman})]


def _questions(config: EncyclopediaConfig, split: str, society: list[Entity], count: int) -> tuple[Problem, ...]:
    """`count` different questions, distributed evenly over `config.hops` (the first entries get the remainder)."""
    if count and not config.hops:
        raise ValueError("data.encyclopedia.hops is empty: give the numbers of facts that a question combines")
    rng = named_random(config.seed, split, "questions")
    entities = {entity.name: entity for entity in society}
    chosen = list[tuple[str, Chain]]()
    for index, hops in enumerate(config.hops):
        takes_one_of_rest = index < count % len(config.hops)
        wanted = count // len(config.hops) + takes_one_of_rest
        chains = [chain for entity in society for chain in _chains(entities, Chain((entity.name,), ()), hops)]
        if wanted > len(chains):
            raise ValueError(
                f"data.encyclopedia: {wanted} {split} questions of {hops} hops requested, only {len(chains)} exist: "
                f"raise data.encyclopedia.{split}_people or lower data.encyclopedia.{split}_questions"
            )
        for chain in rng.sample(chains, wanted):
            chosen.append((make_question(rng, chain.visited[0], chain.relations), chain))
    rng.shuffle(chosen)
    problems = []
    for row, (question, chain) in enumerate(chosen):
        metadata = {
            "hops": len(chain.relations),
            "relations": list(chain.relations),
            # The passage of each entity but the last states one fact.
            "supporting_titles": list(chain.visited[:-1]),
        }
        problems.append(Problem(f"{split}_{row}", question, (chain.visited[-1],), metadata))
    return tuple(problems)


def _chains(entities: dict[str, Entity], begun: Chain, hops: int) -> Iterator[Chain]:
    """Every way to extend `begun` to a chain of `hops` facts that contains no entity twice."""
    if len(begun.relations) == hops:
        yield begun
        return
    for relation, target in entities[begun.visited[-1]].relations.items():
        if target not in begun.visited:
            longer = Chain((*begun.visited, target), (*begun.relations, relation))
            yield from _chains(entities, longer, hops)
