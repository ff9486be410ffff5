"""A browser without a window, for the tests of the book and for the picture of the player.

    book/.venv/bin/python book/browser.py       # writes book/player.png
"""

import contextlib
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

HTML = Path(__file__).parent / "_build" / "html"
PLAYER = "book/player.html"
MOMENT = 18.45  # of the picture: messages are on their way


def lacking():
    """Returns what is missing for a browser, in a few words; empty if nothing is."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} (Debian: apt-get install chromium chromium-driver)" if missing else ""


@contextlib.contextmanager
def chromium():
    """Gives a Chromium that selenium drives; it ends with the block. Its pages come from the disk, or from this machine."""
    options = Options()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver, width, height=900):
    """Makes the page so large, in pixels; less than 500 is a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def open_page(driver, page):
    """Opens a page of the book, from the disk."""
    driver.get(f"{HTML.as_uri()}/{page}")


def open_player(driver, **choices):
    """Opens the player, with choices {control: number of its value}, and waits until the trace is there."""
    open_page(driver, PLAYER)
    until(driver, "return document.getElementById('player').dataset.trace")
    for control, value in choices.items():
        choose(driver, control, value)


def choose(driver, control, value):
    """Sets a control of the player as a reader would, to the value of this number, and waits until its trace is shown."""
    driver.execute_script(
        "const c = document.getElementById(arguments[0]); c.value = arguments[1];"
        "c.dispatchEvent(new Event(c.tagName === 'SELECT' ? 'change' : 'input'));",
        control,
        value,
    )
    until(driver, "return document.getElementById('player').dataset.wanted === document.getElementById('player').dataset.trace")


def until(driver, script, seconds=60):
    """Waits until a script returns something true, and returns that."""
    return WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda it: it.execute_script(script))


def main():
    with chromium() as driver:
        resize(driver, 1280, 1400)
        open_player(driver, scheme=0, workers=1, slowness=2, latency=1, rate=1)
        driver.execute_script("document.getElementById('player').classList.add('strip')")  # see static/book.css
        driver.execute_script("window.dispatchEvent(new Event('resize'))")
        choose(driver, "time", MOMENT)
        Path(__file__).with_name("player.png").write_bytes(driver.find_element("id", "player").screenshot_as_png)


if __name__ == "__main__":
    main()
