"""The form of passages, answers and queries."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.canonical import canonical


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Besanc\u0327on", "Besan\xe7on"),
        ("Donau\xaddampf\u200bschiff\ufeff", "Donaudampfschiff"),
        ("o\ufb03cer \ufb01nished the \ufb02at of Ste\ufb03", "officer finished the flat of Steffi"),
        ("\u0645\u0640\u0640\u0640\u062d\u0645\u062f", "\u0645\u062d\u0645\u062f"),
        ("\ufee3\ufea4\ufee4\ufeaa \ufefb", "\u0645\u062d\u0645\u062f \u0644\u0627"),
        ("\uff28\uff50\uff2f\uff11\uff0c\u7b54", "HpO1\uff0c\u7b54"),
        ("\uff76\uff9e\uff97\uff7d", "\u30ac\u30e9\u30b9"),
        ("\U0001d400\U0001d41a", "Aa"),
        ("\u0132sselmeer", "IJsselmeer"),
        ("10\xb2 m\xb3, \xbd, \u2122, na\xefve\xa0x", "10\xb2 m\xb3, \xbd, \u2122, na\xefve\xa0x"),
        (
            "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
            "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        ),
        ("a\ud800", "a?"),
    ],
)
def test_spellings_of_a_text_become_one(text, expected):
    assert canonical(text) == expected


@given(st.text())
def test_the_form_is_idempotent_and_composed(text):
    once = canonical(text)
    assert canonical(once) == once
    assert unicodedata.is_normalized("NFC", once)
