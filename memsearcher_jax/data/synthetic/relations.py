"""The relations of the embedded encyclopedia, and the sentences and questions that express them.

Every sentence states its fact in full, so that a question can be answered from the passage of the entity it names.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Entity:
    name: str  # unique; also the title of the passage
    kind: str
    relations: dict[str, str]  # from the name of a relation to the name of its object
    woman: bool = False


@dataclass(frozen=True)
class Relation:
    """The templates that express a fact about two entities.

    Placeholders of `facts`: {S} is the subject's name or pronoun and {P} its possessive; {p} is the possessive pronoun;
    {s} and {o} are the names of subject and object. {x} is the subject in `phrase` and `questions`.
    """

    facts: tuple[str, ...]  # paraphrases
    phrase: str  # refers to the object within a longer question
    questions: tuple[str, ...]


RELATIONS = {
    "birthplace": Relation(
        ("{S} was born in {o}.", "{S} comes from {o}, the city of {p} birth.", "{P} place of birth is {o}."),
        "the city where {x} was born",
        ("Where was {x} born?", "In which city was {x} born?"),
    ),
    "mother": Relation(
        ("{P} mother is {o}.", "{S} was brought up by {p} mother, {o}.", "{S} learned to read from {p} mother {o}."),
        "the mother of {x}",
        ("Who is the mother of {x}?", "Which woman is the mother of {x}?"),
    ),
    "spouse": Relation(
        ("{S} is married to {o}.", "{P} spouse is {o}.", "{S} lives with {p} spouse, {o}."),
        "the spouse of {x}",
        ("Who is the spouse of {x}?", "Who is married to {x}?"),
    ),
    "employer": Relation(
        ("{S} works for {o}.", "{P} employer is {o}.", "{S} has a post at {o}, {p} employer."),
        "the employer of {x}",
        ("Which firm does {x} work for?", "What is the employer of {x}?"),
    ),
    "director": Relation(
        (
            "{S} is a film directed by {o}.",
            "{S} is a film. The director is {o}.",
            "{o} is the director of {s}, a film.",
        ),
        "the director of {x}",
        ("Who directed {x}?", "Who is the director of {x}?"),
    ),
    "location": Relation(
        ("It was filmed in {o}.", "All of {s} was filmed in {o}.", "The crew filmed it in {o}."),
        "the city where {x} was filmed",
        ("Where was {x} filmed?", "In which city was {x} filmed?"),
    ),
    "headquarters": Relation(
        (
            "{S} is a firm based in {o}.",
            "{S} is a firm with its head office in {o}.",
            "{o} is the home of {s}, a firm.",
        ),
        "the city where {x} is based",
        ("Where is {x} based?", "In which city is {x} based?"),
    ),
    "founder": Relation(
        ("It was founded by {o}.", "Its founder is {o}.", "{o} founded it."),
        "the founder of {x}",
        ("Who founded {x}?", "Who is the founder of {x}?"),
    ),
    "country": Relation(
        ("{S} is a city in {o}.", "{S} is a city that belongs to {o}.", "In {o} lies the city of {s}."),
        "the country that {x} belongs to",
        ("In which country is {x}?", "Which country does {x} belong to?"),
    ),
    "mayor": Relation(
        ("Its mayor is {o}.", "The mayor of {s} is {o}.", "{o} is the mayor of the city."),
        "the mayor of {x}",
        ("Who is the mayor of {x}?", "Which person is the mayor of {x}?"),
    ),
    "capital": Relation(
        ("{S} is a country whose capital is {o}.", "{S} is a country. Its capital is {o}."),
        "the capital of {x}",
        ("What is the capital of {x}?", "Which city is the capital of {x}?"),
    ),
}

REMARKS = {
    "person": ("{S} plays the flute.", "{S} likes long walks.", "{S} keeps bees.", "{S} collects old maps."),
    "film": ("It lasts two hours.", "It won a small prize.", "Critics liked the music.", "It was made in a hurry."),
    "firm": ("It has many customers.", "It pays its workers well.", "Its first year was hard.", "It is quite small."),
    "city": ("It lies on a river.", "It has an old market.", "Its streets are narrow.", "Its harbour is deep."),
    "country": ("It is rich in forests.", "Its winters are mild.", "Its coast is long.", "It exports timber."),
}
"""Sentences that state no fact, by kind of entity."""


def make_passage(rng: random.Random, entity: Entity, named_share: float = 0.3) -> str:
    """The passage of one entity in FlashRAG's format: the title in quotes, a newline, the facts and a remark.

    The first sentence contains the name, and `named_share` of the later ones, which else use a pronoun.
    """
    name = entity.name
    pronoun = "It"
    possessive = "its"
    if entity.kind == "person":
        pronoun, possessive = ("She", "her") if entity.woman else ("He", "his")
    templates = [(rng.choice(RELATIONS[relation].facts), target) for relation, target in entity.relations.items()]
    templates.append((rng.choice(REMARKS[entity.kind]), ""))
    sentences = []
    for template, target in templates:
        named = not sentences or rng.random() < named_share
        subject, of_subject = (name, f"{name}'s") if named else (pronoun, possessive.capitalize())
        sentences.append(template.format(S=subject, P=of_subject, p=possessive, s=name, o=target))
    return f'"{name}"\n' + " ".join(sentences)


def noun_phrase(relation: str, subject: str) -> str:
    """The object of a relation in words, such as "the mother of X"."""
    return RELATIONS[relation].phrase.format(x=subject)


def make_question(rng: random.Random, start: str, relations: tuple[str, ...]) -> str:
    """The question that leads from the entity `start` along `relations`: "Where was the mother of X born?"."""
    subject = functools.reduce(lambda subject, relation: noun_phrase(relation, subject), relations[:-1], start)
    return rng.choice(RELATIONS[relations[-1]].questions).format(x=subject)
