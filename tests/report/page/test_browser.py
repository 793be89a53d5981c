"""The report page in a real browser: filters, keyboard, themes, narrow screens, and untrusted text."""

import json

import pytest

from memsearcher_jax.report.page.html import write_page
from memsearcher_jax.report.word_diff import word_diff
from memsearcher_jax.types import Passage, Query, SearchResult, StopReason, ToolResult, Turn
from tests import browser
from tests.browser import by_id
from tests.http_server import until
from tests.samples import scored, write_shard

pytestmark = pytest.mark.slow
selenium = pytest.importorskip("selenium", reason="no selenium: pip install -e '.[browser]'")

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

COUNT = 5_000
EVIL = '<img src=x onerror="window.hit=1"></script><script>window.hit=2</script><b>bold</b> &lt;i&gt;'
MEMORIES = [
    ("Jaws is a film of 1975", "Jaws is a thriller film of 1975"),
    ("the mayor of Gerhaven is Linmark", "The mayor of Linmark is Gonus Senmun."),
    ("a b c d e f g", "g f e d c b a"),
    ("one two\n three  four", "one two three four five"),
    ("nothing of this stays", "all words are new"),
    ("  leading and trailing  ", "leading and  "),
]


DATASETS = ("nq", "popqa", "hotpotqa")
STOPS = (StopReason.ANSWERED, StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.BAD_MEMORY)


def trajectory(number):
    """Number 0 has untrusted text, the next have pairs of memories, one has a unique word in a passage."""
    text, stop = EVIL if number == 0 else f"text of {number}", STOPS[number % 4]
    before, after = MEMORIES[number % len(MEMORIES)]
    body = "It mentions a Zweibrücken only here." if number == 4_321 else f"Body {number % 40}."
    found = (SearchResult((Passage("1", f'""Title" {text}"\n{body} {text}', 0.5),)),)
    searched = Turn("", f"{text}</think>call", ("c",), (Query(text, 1),), found, "o", "r", before)
    turns = (searched, Turn(before, f"again {text}</think>call", rewrite="r", new_memory=after), Turn(after, "done"))
    question = EVIL if number == 0 else f"Question number {number}?"
    answer = text if stop is StopReason.ANSWERED else ""
    texts = {"question": question, "golden": (text,), "answer": answer, "reason": text, "stop": stop}
    tools = (ToolResult(text, {"of": text}, text=text), ToolResult("shop", {}, error=text)) if number == 0 else ()
    metadata = {"source": DATASETS[number % 3]}
    return scored(number % 4 == 0, turns, id=f"id{number}", metadata=metadata, tool_results=tools, **texts)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_shard(folder, map(trajectory, range(COUNT)))
    (folder / "results.json").write_text(json.dumps({"metrics": {"exact_match": 0.25}}))
    write_page(folder, folder / "page.html")
    return (folder / "page.html").as_uri()


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


@pytest.fixture
def page(chromium, address):
    """The page, newly opened; errors in the browser's log fail the test."""
    chromium.get("about:blank")
    chromium.get(address)
    until(lambda: count(chromium) == COUNT)
    yield chromium
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def count(page):
    """How many trajectories pass the filters; None while the page searches."""
    first = by_id(page, "count").text.partition(" of ")[0].replace(",", "")
    return int(first) if first.isdecimal() else None


def press(page, *keys):
    ActionChains(page).send_keys(*keys).perform()


def focused(page):
    return page.switch_to.active_element


def heading(page):
    """The question of the open trajectory; None if none is open."""
    return page.execute_script("return document.querySelector('#detail h3')?.textContent ?? null")


def test_single_and_combined_filters(page):
    correct = sum(number % 4 == 0 for number in range(COUNT))
    Select(by_id(page, "outcome")).select_by_value("correct")
    until(lambda: count(page) == correct)
    Select(by_id(page, "dataset")).select_by_value("popqa")
    until(lambda: count(page) == sum(number % 12 == 4 for number in range(COUNT)))
    Select(by_id(page, "stop")).select_by_value("max_turns")
    until(lambda: count(page) == 0)
    assert "No trajectory matches these filters." in by_id(page, "rows").text
    assert by_id(page, "detail").text == ""
    page.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
    until(lambda: count(page) == COUNT)
    Select(by_id(page, "stop")).select_by_value("max_turns")
    until(lambda: count(page) == sum(number % 4 == 2 for number in range(COUNT)))
    assert heading(page) == "Question number 2?"


def test_text_search_covers_every_field(page):
    field = by_id(page, "text")
    for text, number in (("zweibrücken", 4_321), ('"number 3777?" question', 3_777), ("linmark id4999", 4_999)):
        field.clear()
        field.send_keys(text)
        until(lambda number=number: heading_is(page, number))
        assert count(page) == 1
    field.clear()
    field.send_keys("onerror=")
    until(lambda: count(page) == 1)
    field.clear()
    field.send_keys("in no trajectory")
    until(lambda: count(page) == 0)


def heading_is(page, number):
    return count(page) is not None and heading(page) == f"Question number {number}?"


def test_only_visible_rows_exist(page):
    assert 5 < len(page.find_elements(By.CSS_SELECTOR, "#rows .row")) < 40
    page.execute_script("document.getElementById('list').scrollTop = 1e9")
    until(lambda: page.find_elements(By.ID, f"row-{COUNT - 1}"))
    assert len(page.find_elements(By.CSS_SELECTOR, "#rows .row")) < 40
    page.find_element(By.ID, f"row-{COUNT - 2}").click()
    assert heading(page) == f"Question number {COUNT - 2}?"


def test_keyboard_navigation(page):
    press(page, "/")
    assert focused(page).get_attribute("id") == "text"
    press(page, "id12", Keys.ARROW_DOWN)
    until(lambda: count(page) == 111)  # 12, 120 to 129, 1200 to 1299
    active = focused(page)
    assert active.get_attribute("id") == "list"
    assert has_visible_focus(page)
    assert heading(page) == "Question number 12?"
    press(page, Keys.ARROW_DOWN)
    assert heading(page) == "Question number 120?"
    assert active.get_attribute("aria-activedescendant") == "row-120"
    press(page, Keys.END)
    assert heading(page) == "Question number 1299?"
    press(page, Keys.PAGE_UP)
    assert heading(page) not in ("Question number 1299?", "Question number 12?")
    press(page, Keys.HOME, Keys.ARROW_UP)
    assert heading(page) == "Question number 12?"
    press(page, Keys.ENTER)
    assert focused(page).tag_name == "h3"
    assert has_visible_focus(page)
    press(page, Keys.ARROW_RIGHT)
    assert focused(page).text == "Question number 120?"
    press(page, Keys.TAB)
    assert focused(page).tag_name == "summary"
    press(page, Keys.ENTER)
    assert page.find_element(By.CSS_SELECTOR, "details.passage").get_attribute("open")
    press(page, Keys.ESCAPE)
    assert focused(page).get_attribute("id") == "list"


def has_visible_focus(page):
    style = "getComputedStyle(document.activeElement)"
    outline = page.execute_script(f"return [{style}.outlineStyle, parseFloat({style}.outlineWidth)]")
    return outline[0] == "solid" and outline[1] >= 2


def test_markup_and_script_are_shown_as_text(page):
    assert heading(page) == EVIL
    text = by_id(page, "detail").text
    assert text.count(EVIL) >= 6
    assert f'1. "Title" {EVIL}' in text
    assert page.find_elements(By.CSS_SELECTOR, "main img, #rows b, #detail h3 *, .prose b, body > b") == []
    assert page.execute_script("return window.hit === undefined")


@pytest.mark.parametrize("number", range(1, len(MEMORIES) + 1))
def test_the_word_diff_equals_the_python_one(page, number):
    before, after = MEMORIES[number % len(MEMORIES)]
    page.execute_script("location.hash = arguments[0]", f"#t{number}")
    until(lambda: heading_is(page, number))
    box = page.find_element(By.CSS_SELECTOR, '#detail section[aria-label="Turn 2"] .diff')
    runs = [(run.tag_name, run.get_attribute("textContent")) for run in box.find_elements(By.CSS_SELECTOR, "*")]

    def words(*tags):
        return " ".join(text for tag, text in runs if tag in tags).split()

    assert words("span", "ins") == after.split()
    assert words("span", "del") == before.split()
    changed = sum(len(run.split()) for change, run in word_diff(before, after) if change != "same")
    assert len(words("ins", "del")) <= changed, "a longest common subsequence keeps at least as much"
    if number % len(MEMORIES) == 0:
        assert runs == [("span", "Jaws is a"), ("ins", "thriller"), ("span", "film of 1975")]


def test_a_narrow_screen_shows_either_the_list_or_the_trajectory(page):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    until(lambda: not by_id(page, "detail").is_displayed())
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    page.find_element(By.ID, "row-3").click()
    assert not by_id(page, "list").is_displayed()
    assert heading(page) == "Question number 3?"
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    page.find_element(By.CSS_SELECTOR, ".back").click()
    assert by_id(page, "list").is_displayed()
    assert page.find_element(By.ID, "row-3").get_attribute("aria-selected") == "true"


def test_a_printed_page_is_light_and_has_the_whole_trajectory(page):
    Select(by_id(page, "theme")).select_by_value("dark")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.execute_script("return detail.scrollHeight <= detail.clientHeight")
