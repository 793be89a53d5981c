import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.analyzer import fold, words


@given(st.text(st.characters(max_codepoint=127)))
def test_words_of_ascii_text(text):
    """The vectors of English text depend on them."""
    assert words(text) == re.findall(r"[a-z0-9]+", text.lower())


@given(st.text(), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
def test_the_form_and_the_case_of_a_text_make_no_difference(text, form):
    assert words(unicodedata.normalize(form, text)) == words(text)
    assert words(fold(text)) == words(text)


def test_underscores_separate_words():
    assert words("The _Kestrel_ calls open_valve.") == ["the", "kestrel", "calls", "open", "valve"]
    assert words("das _Schloß_ öffne_tür") == ["das", "schloss", "offne", "tur"]


def test_words_of_other_scripts():
    assert words("東京に") == ["東", "京", "に", "東京", "京に"]
    assert words("カﾞ か") == ["ガ", "か"], "a voiced character is another one"
    assert words("Straße, Ærø, İzmir, e\xadmail, O’Brien") == ["strasse", "aero", "izmir", "email", "o", "brien"]
    assert words("हिन्दी।") == ["हिन्दी"]
    assert words("\u0645\u0640\u0640\u062d\u0645\u062f") == ["\u0645\u062d\u0645\u062f"], "stretched by a tatweel"
