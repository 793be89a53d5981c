"""The page in a real browser."""

import time

import pytest

from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.types import Passage
from tests import browser
from tests.browser import by_id
from tests.http_server import until

pytestmark = pytest.mark.slow
selenium = pytest.importorskip("selenium", reason="no selenium: pip install -e '.[browser]'")

from selenium.webdriver.common.by import By  # noqa: E402

EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>'


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


def open_page(page, url):
    page.get("about:blank")
    page.get(url)
    until(lambda: page.execute_script("return document.readyState") == "complete")


def ask(page, question):
    by_id(page, "question").clear()
    by_id(page, "question").send_keys(question)
    by_id(page, "ask").click()


def is_done(page):
    return by_id(page, "ask").is_enabled() and by_id(page, "status").text not in ("", "The agent is at work …")


@pytest.fixture(scope="module")
def question(agent):
    return make_encyclopedia(agent.run.config.data.encyclopedia).test[0].question


def test_a_person_sees_thoughts_searches_memory_answer_and_sources(chromium, url, question):
    open_page(chromium, url)
    until(lambda: by_id(chromium, "model").text == "tiny")
    ask(chromium, question)
    until(lambda: is_done(chromium))
    cards = chromium.find_elements(By.CSS_SELECTOR, "#turns > li")
    assert [card.find_element(By.TAG_NAME, "h2").text for card in cards] == [f"Turn {n + 1}" for n in range(len(cards))]
    for name in ("thought", "action", "query", "rewritten"):
        assert cards[0].find_element(By.CLASS_NAME, name).text
    assert cards[0].find_elements(By.TAG_NAME, "details"), "the passages"
    assert cards[1].find_element(By.CLASS_NAME, "memory").text == cards[0].find_element(By.CLASS_NAME, "rewritten").text
    answer = chromium.find_element(By.CSS_SELECTOR, "#answer > p").text
    source = chromium.find_element(By.CSS_SELECTOR, "#answer details")
    source.click()
    assert answer and answer in source.text
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    assert chromium.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_markup_of_passages_is_shown_as_text_and_errors_are_shown(chromium, url, question, monkeypatch):
    passages = [Passage("1", f'"{EVIL}"\n{EVIL}')]
    monkeypatch.setattr(Searcher, "search", lambda self, queries, top_n: [passages] * len(queries))
    open_page(chromium, url)
    ask(chromium, question)
    until(lambda: is_done(chromium))
    assert EVIL in chromium.find_element(By.CSS_SELECTOR, "#turns summary").text
    assert chromium.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    assert chromium.execute_script("return window.hit === undefined")
    ask(chromium, "x" * 300)
    until(lambda: "at most 32 are allowed" in by_id(chromium, "status").text)
    assert "error" in by_id(chromium, "status").get_attribute("class")


def test_stop_frees_the_slot(chromium, url, agent, question, monkeypatch):
    real = Searcher.search

    def slow(self, queries, top_n):
        time.sleep(2)
        return real(self, queries, top_n)

    monkeypatch.setattr(Searcher, "search", slow)
    open_page(chromium, url)
    ask(chromium, question)
    until(lambda: chromium.find_elements(By.CLASS_NAME, "query"))
    assert agent.active == 1
    by_id(chromium, "stop").click()
    until(lambda: by_id(chromium, "status").text == "Stopped.")
    until(lambda: agent.active == 0)
    until(lambda: not agent._requests)


def test_a_key_is_asked_for(chromium, agent, serving, question):
    with serving(agent, key="s3cret") as url:
        open_page(chromium, url)
        until(lambda: by_id(chromium, "key").is_displayed())
        until(lambda: by_id(chromium, "status").text == "Enter the API key.")
        assert "error" not in by_id(chromium, "status").get_attribute("class")
        by_id(chromium, "key").send_keys("s3cret")
        ask(chromium, question)
        until(lambda: chromium.find_elements(By.CSS_SELECTOR, "#answer > p"))
        assert not by_id(chromium, "answer").text.startswith("No answer")
        chromium.get("about:blank")
