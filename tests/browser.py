"""Chromium without a window, for the tests of both pages; the extra `browser` has selenium."""

import contextlib
import shutil

import pytest

FLAGS = """
    headless no-sandbox disable-gpu disable-quic window-size=1300,900 no-first-run disable-background-networking
    disable-component-update disable-sync
"""


@contextlib.contextmanager
def chromium():
    """A browser whose log is read; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install -e '.[browser]'")
    program = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    driver = shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("there is no Chromium with its chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def by_id(page, name):
    return page.find_element("id", name)
