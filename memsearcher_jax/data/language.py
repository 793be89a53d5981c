"""How the embedded world speaks: its relations, the sentences that state them, and the questions about them.

Every sentence states its fact whole, so that a question can be answered from the passage of the entity it names.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """A function from one kind of entity to another; in its texts {s} is the subject, {o} the object, {x} the asked."""

    name: str
    subject: str
    object: str
    facts: tuple[str, ...]  # paraphrases; {S} is the subject's name or pronoun, {P} its possessive
    phrase: str  # stands for the object inside a longer question
    questions: tuple[str, ...]


RELATIONS = (
    Relation(
        "birthplace",
        "person",
        "city",
        ("{S} was born in {o}.", "{S} comes from {o}, the city of {p} birth.", "{P} place of birth is {o}."),
        "the city where {x} was born",
        ("Where was {x} born?", "In which city was {x} born?"),
    ),
    Relation(
        "mother",
        "person",
        "person",
        ("{P} mother is {o}.", "{S} was brought up by {p} mother, {o}.", "{S} learned to read from {p} mother {o}."),
        "the mother of {x}",
        ("Who is the mother of {x}?", "Which woman is the mother of {x}?"),
    ),
    Relation(
        "spouse",
        "person",
        "person",
        ("{S} is married to {o}.", "{P} spouse is {o}.", "{S} lives with {p} spouse, {o}."),
        "the spouse of {x}",
        ("Who is the spouse of {x}?", "Who is married to {x}?"),
    ),
    Relation(
        "employer",
        "person",
        "firm",
        ("{S} works for {o}.", "{P} employer is {o}.", "{S} has a post at {o}, {p} employer."),
        "the employer of {x}",
        ("Which firm does {x} work for?", "What is the employer of {x}?"),
    ),
    Relation(
        "director",
        "film",
        "person",
        (
            "{S} is a film directed by {o}.",
            "{S} is a film. The director is {o}.",
            "{o} is the director of {s}, a film.",
        ),
        "the director of {x}",
        ("Who directed {x}?", "Who is the director of {x}?"),
    ),
    Relation(
        "location",
        "film",
        "city",
        ("It was filmed in {o}.", "All of {s} was filmed in {o}.", "The crew filmed it in {o}."),
        "the city where {x} was filmed",
        ("Where was {x} filmed?", "In which city was {x} filmed?"),
    ),
    Relation(
        "headquarters",
        "firm",
        "city",
        (
            "{S} is a firm based in {o}.",
            "{S} is a firm with its head office in {o}.",
            "{o} is the home of {s}, a firm.",
        ),
        "the city where {x} is based",
        ("Where is {x} based?", "In which city is {x} based?"),
    ),
    Relation(
        "founder",
        "firm",
        "person",
        ("It was founded by {o}.", "Its founder is {o}.", "{o} founded it."),
        "the founder of {x}",
        ("Who founded {x}?", "Who is the founder of {x}?"),
    ),
    Relation(
        "country",
        "city",
        "country",
        ("{S} is a city in {o}.", "{S} is a city that belongs to {o}.", "In {o} lies the city of {s}."),
        "the country that {x} belongs to",
        ("In which country is {x}?", "Which country does {x} belong to?"),
    ),
    Relation(
        "mayor",
        "city",
        "person",
        ("Its mayor is {o}.", "The mayor of {s} is {o}.", "{o} is the mayor of the city."),
        "the mayor of {x}",
        ("Who is the mayor of {x}?", "Which person is the mayor of {x}?"),
    ),
    Relation(
        "capital",
        "country",
        "city",
        ("{S} is a country whose capital is {o}.", "{S} is a country. Its capital is {o}."),
        "the capital of {x}",
        ("What is the capital of {x}?", "Which city is the capital of {x}?"),
    ),
)
RELATION = {relation.name: relation for relation in RELATIONS}

REMARKS = {
    "person": ("{S} plays the flute.", "{S} likes long walks.", "{S} keeps bees.", "{S} collects old maps."),
    "film": ("It lasts two hours.", "It won a small prize.", "Critics liked the music.", "It was made in a hurry."),
    "firm": ("It has many customers.", "It pays its workers well.", "Its first year was hard.", "It is quite small."),
    "city": ("It lies on a river.", "It has an old market.", "Its streets are narrow.", "Its harbour is deep."),
    "country": ("It is rich in forests.", "Its winters are mild.", "Its coast is long.", "It exports timber."),
}


def describe(rng: random.Random, name: str, kind: str, woman: bool, relations: dict[str, str]) -> str:
    """The passage of one entity in the FlashRAG layout: the title in quotes, a newline, its facts and a remark.

    The first sentence says the name; later ones may say a pronoun instead.
    """
    sentences = []
    templates = [(rng.choice(RELATION[relation].facts), target) for relation, target in relations.items()]
    templates.append((rng.choice(REMARKS[kind]), ""))
    for template, target in templates:
        subject, possessive = _subject(name, kind, woman, named=not sentences or rng.random() < 0.3)
        own = {"person": "her" if woman else "his"}.get(kind, "its")
        sentences.append(template.format(S=subject, P=possessive, p=own, s=name, o=target))
    return f'"{name}"\n' + " ".join(sentences)


def _subject(name: str, kind: str, woman: bool, named: bool) -> tuple[str, str]:
    """What a sentence calls its subject, and the possessive of that."""
    if named:
        return name, f"{name}'s"
    if kind == "person":
        return ("She", "Her") if woman else ("He", "His")
    return "It", "Its"


def ask(rng: random.Random, start: str, relations: tuple[str, ...]) -> str:
    """The question that leads from the entity `start` along `relations`: "Where was the mother of X born?"."""
    phrase = start
    for relation in relations[:-1]:
        phrase = RELATION[relation].phrase.format(x=phrase)
    return rng.choice(RELATION[relations[-1]].questions).format(x=phrase)
