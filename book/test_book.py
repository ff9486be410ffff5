"""The book as built, in a browser and as files. `bash book/test.sh` builds it first."""

import functools
import html
import http.server
import itertools
import json
import os
import re
import runpy
import threading
import types
from pathlib import Path
from urllib.parse import unquote, urldefrag

import browser
import pytest
from browser import HTML, choose, open_page, open_player, resize, until
from collect import ROOT, reading_order, tracked
from skips import skip_for

PAGES = sorted(str(path.relative_to(HTML)) for path in HTML.rglob("*.html") if "_static" not in path.parts)
LINKS = re.compile(r'<[a-z][^<>]*?\s(?:href|src)="([^"<>]*)"')
TERM = r'<a class="[^"]*term[^"]*" href="([^"]*)" title="([^"]*)">staleness</a>'
# Fills in the form "Which scheme?" as a reader would, and returns the paragraphs of its answer.
ASK = """
const form = document.getElementById("which");
form.reset();
for (const fact of RULES.facts) {
  const input = form.elements[fact.name], value = arguments[0][fact.name] ?? fact.default;
  if (input.type === "checkbox") input.checked = Boolean(value); else input.value = value;
}
form.dispatchEvent(new Event("input"));
return [...document.querySelectorAll("#which-answer p")].map((p) => p.textContent);
"""
# Of a page on a phone: its size, images that lack, tables that are cut, and wide figures whose words would be too small
FITS = """
const { scrollWidth, scrollHeight, clientWidth } = document.documentElement;
for (const folded of document.querySelectorAll(".bd-article details")) folded.open = true;
const start = (element) => element.outerHTML.slice(0, 200);
const of = (selector, isWrong) => [...document.querySelectorAll(selector)].filter(isWrong).map(start);
const width = (element) => element.getBoundingClientRect().width;
const isShown = (element) => element.offsetParent !== null;
return [scrollWidth, scrollHeight, [
  ...of("img", (image) => image.complete && !image.naturalWidth),
  ...of(".bd-article table", (table) => table.getBoundingClientRect().right > clientWidth),
  ...of(".bd-article img", (image) => image.naturalWidth > 700 && isShown(image) && width(image) < 0.55 * image.naturalWidth),
]];
"""
HIGHEST = 48_000  # pixels of a page on a phone
# Where things are: left, top, right, bottom
PLACES = """
return arguments[0].map((selector) => document.querySelector(selector).getBoundingClientRect())
  .map(({ left, top, right, bottom }) => [left, top, right, bottom]);
"""
PANELS = """
return [...document.querySelectorAll(".panels")].map((figure) => [...figure.querySelectorAll(".panel")]
  .map((panel) => panel.getBoundingClientRect()).map(({ left, top, right, bottom }) => [left, top, right, bottom]));
"""
FOUND = "return [...document.querySelectorAll('#search-results li > a')].map((a) => a.getAttribute('href').split(/[?#]/)[0])"
NOTEBOOKS = [path for path in tracked() if path.suffix == ".ipynb"]


@functools.cache
def text_of(page):
    """Returns the HTML of a page."""
    return (HTML / page).read_text()


@functools.cache
def names_in(page):
    """Returns the places of a page that a link may lead to."""
    return set(map(html.unescape, re.findall(r'\s(?:id|name)="([^"]+)"', text_of(page))))


@pytest.fixture(scope="module")
def driver():
    """A browser; where nothing may be skipped, the tests fail without one."""
    skip_for(browser.lacking())  # a reader's machine need not have one
    with browser.chromium() as driver:
        yield driver


@pytest.fixture
def wide(driver):
    resize(driver, 1280)
    errors_of(driver)  # of other tests
    return driver


@pytest.fixture
def laptop(driver):
    resize(driver, 1366, 768)
    errors_of(driver)  # of other tests
    return driver


@pytest.fixture
def phone(driver):
    resize(driver, 390, 844)
    errors_of(driver)  # of other tests
    return driver


def errors_of(driver):
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


# ---------------------------------------------------------------------------------------------------------------------
# What is in it


def test_every_page_of_the_repository_is_there():
    for path in tracked():
        if path.suffix in (".md", ".ipynb"):
            page = "index.html" if path == Path("book/index.md") else str(path.with_suffix(".html"))
            assert page in PAGES


def test_no_link_leads_nowhere():
    broken = []
    for page in PAGES:
        for link in LINKS.findall(text_of(page)):
            target, part = urldefrag(html.unescape(link))
            target = target.partition("?")[0]
            if re.match(r"[a-z]+:", target):
                continue
            path = Path(os.path.normpath((HTML / page).parent / unquote(target))) if target else HTML / page
            if not path.is_file():
                broken.append((page, link))
            elif part and path.suffix == ".html" and unquote(part) not in names_in(str(path.relative_to(HTML))):
                broken.append((page, link))
    assert PAGES and not broken


def test_nothing_comes_from_elsewhere():
    """The book works without a network."""
    for page in PAGES:
        assert not re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//', text_of(page)), page
        assert not re.findall(r'<link[^>]*rel="(?:stylesheet|preload)"[^>]*href="(?:https?:)?//', text_of(page)), page


def test_contents_are_in_reading_order():
    first, others = reading_order((ROOT / "README.md").read_text())
    assert "HogWild" in first and "Simulation" in others
    listed = re.findall(r'href="([\w-]+)/(?:README|\1)\.html"', sidebar())
    assert [folder for folder in dict.fromkeys(listed) if folder in first + others] == first + others
    assert 'href="book/which.html"' in sidebar().split('class="caption"')[1]


def sidebar():
    """The table of contents at the side of the first page."""
    return text_of("index.html").split('class="bd-main', 1)[0]


def test_a_link_named_after_a_scheme_opens_its_notebook():
    schemes = [path.stem for path in NOTEBOOKS if path.stem in reading_order((ROOT / "README.md").read_text())[0]]
    assert {"HogWild", "DiLoCo"} <= set(schemes)
    for scheme in schemes:
        target = f"{scheme}/{scheme}.html"
        assert f'toctree-l1 has-children"><a class="reference internal" href="{target}"' in sidebar()
        assert 'href="README.html"' in text_of(target).split('class="bd-main', 1)[0]  # below the notebook, at the side
        for page in ("README.html", "index.html"):
            [*found] = re.findall(rf'<a class="reference internal" href="([^"#]+)">(?:<[^>]*>)*{scheme}<', text_of(page))
            assert set(found) <= {target} and (found or page == "index.html"), (page, scheme)


def test_the_rule_of_each_scheme_is_coloured():
    coloured = 'highlight-python notranslate"><div class="highlight"><pre><span class="code-line"'
    names = {path: path.stem.lower().replace("-", "_") for path in NOTEBOOKS}
    pages = [path for path, name in names.items() if f"print(inspect.getsource({name}))" in (ROOT / path).read_text()]
    assert len(pages) >= 16 and all(coloured in text_of(str(path.with_suffix(".html"))) for path in pages)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    """Its committed outputs are shown, and the download is the notebook itself."""
    page = text_of(str(path.with_suffix(".html")))
    [link] = re.findall(r'<p class="download"><a href="([^"]+)"', page)
    assert (HTML / path.parent / link).read_bytes() == (ROOT / path).read_bytes()
    outputs = [o for cell in json.loads((ROOT / path).read_text())["cells"] for o in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert len(re.findall(r'<img[^>]*src="[^"]*_images/', page)) >= pictures
    cells = json.loads((ROOT / path).read_text())["cells"]
    hidden = sum(bool(cell["metadata"].get("jupyter", {}).get("source_hidden")) for cell in cells)
    assert len(re.findall(r'<details class="[^"]*hide[^"]*"', page)) == hidden
    streams = ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    shown = " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())
    for line in (line for stream in streams for line in stream.splitlines()):
        assert " ".join(re.sub("\x1b\\[[0-9;]*m", "", line).split()) in shown


def test_numbers_of_the_first_page_are_those_of_the_tables():
    """They come from the table of speeds in guide/results.md, and from the one of Slow-Links."""
    first, speeds = ((ROOT / "book" / name).read_text() for name in ("index.md", "guide/results.md"))
    rows = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in speeds.splitlines() if row.startswith("| ")}
    names = ["one process", "HogWild", "ParameterServerStrategy", "ParameterServerStrategy, 10 steps per call"]
    assert re.findall(r"\d+,\d{3}", first) == [rows[name] for name in names]
    table = (ROOT / "Slow-Links" / "README.md").read_text().split("<!-- until loss:")[1].split("<!-- end")[0]
    times = [float(row.split("|")[4]) for row in table.splitlines()[4:] if row.startswith("| ")]
    assert f"{int(min(times[1:]))} to {int(max(times))} times fewer seconds" in re.sub(r"\[(.*?)\]\(.*?\)", r"\1", first)


@pytest.fixture(scope="module")
def recommend():
    """The module common/cli/recommend.py, without the packages that the rest of `common` needs."""
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / "common" / "cli" / "recommend.py")))


def test_the_form_answers_twenty_questions_as_the_tables_do(wide, recommend):
    """So does `common.advise`, see tests/test_recommend.py."""
    open_page(wide, "book/which.html")
    questions = json.loads((ROOT / "book" / "questions.json").read_text())
    assert len(questions) == 20
    for asked in questions:
        shown = wide.execute_script(ASK, asked["facts"])
        rule, notes = recommend.recommend(asked["facts"])
        given = rule["flags"] or f"({rule['note']})"
        assert rule["scheme"] == asked["scheme"]
        assert shown[0] == f"Begin with {rule['scheme']} {given}: {rule['says']}."
        target = f" In {recommend.rules()['target']}." if rule["support"].endswith(" s") else ""
        assert shown[1].endswith(f"; {rule['why']}.{target}")
        assert shown[2:] == notes
    [said] = wide.execute_script(ASK, {"workers": 1})
    assert said.startswith("Workers: ") and "2" in said
    for folder in {rule["folder"] for rule in recommend.rules()["rules"]}:
        assert f"{folder}/{folder}.html" in PAGES  # where the form links to
    assert not errors_of(wide)


def test_terms_are_linked():
    [link] = re.findall(TERM, text_of("HogWild/README.html"))[:1]
    assert link[0] == "../Basics-Tutorial/GLOSSARY.html#term-staleness" and link[1].startswith("staleness: ")
    without = [page for page in PAGES if page.endswith("/README.html") and 'class="term' not in text_of(page)]
    assert not without


def test_api_has_the_docstrings():
    assert "x̃, the global parameters" in re.sub("<[^>]*>", "", text_of("api/scheme.center.html"))
    assert 'id="common.simulation.engine.Engine"' in text_of("api/simulation.engine.html")


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


def test_every_page_loads_and_fits_a_phone(phone):
    found = []
    for page in PAGES:
        open_page(phone, page)
        width, height, misfits = phone.execute_script(FITS)
        found += [(page, what) for what in errors_of(phone) + misfits]
        if width > 390 or height > HIGHEST:
            found.append((page, f"{width} pixels wide, {height} high"))
    assert not found


def test_the_panels_of_a_figure_stand_below_each_other_on_a_phone(phone):
    open_page(phone, "HogWild/HogWild.html")
    figures = phone.execute_script(PANELS)
    assert figures
    for figure in figures:
        assert len(figure) > 1
        for above, below in itertools.pairwise(figure):
            assert below[1] >= above[3] and below[0] == above[0]
    resize(phone, 1280)
    assert not phone.find_element("css selector", ".panels").is_displayed()


def test_the_first_screen_has_the_player_and_its_picture(laptop):
    open_page(laptop, "index.html")
    until(laptop, "return document.getElementById('player').dataset.trace")
    parts = [f"#player {part}" for part in ("#play", "#scheme", ".cluster svg", ".valley svg", ".loss svg")]
    for left, top, right, bottom in laptop.execute_script(PLACES, parts):
        assert 0 <= left < right - 50 and right <= 1366 and 0 <= top < bottom - 20 and bottom <= 768
    assert laptop.find_elements("css selector", "#player .message")  # the picture shows messages on their way
    press(laptop, " ")  # scrolls, since the player is not in focus
    assert "play" in laptop.find_element("id", "play").text
    laptop.execute_script("document.getElementById('play').focus()")
    press(laptop, " ")  # the button's own key
    until(laptop, "return document.getElementById('play').textContent.includes('pause')")
    assert not errors_of(laptop)


@pytest.mark.parametrize("page", ["HogWild/HogWild", "Asynchronous-DiLoCo/Asynchronous-DiLoCo", "HogWild/hogwild.py"])
def test_no_rule_is_cut(laptop, page):
    open_page(laptop, f"{page}.html")
    widths = "return [...document.querySelectorAll('.highlight-python pre')].map((pre) => [pre.scrollWidth, pre.clientWidth])"
    found = laptop.execute_script(widths)
    assert found and all(shown <= room for shown, room in found)


def test_player_fits_a_phone(phone):
    open_player(phone)
    assert phone.execute_script("return document.documentElement.scrollWidth") <= 390


def search(driver, address):
    driver.get(f"{address}/search.html?q=staleness")
    until(driver, "return document.querySelector('#search-results li a[href*=\"Dynamic-SGD/README\"]')")
    assert not errors_of(driver)


@pytest.mark.parametrize(
    "asked, first",
    [("checkpoint", "book/guide/survival"), ("compression", "book/guide/compression"), ("HogWild", "HogWild/HogWild")],
)
def test_search_finds_titles_before_the_api(wide, asked, first):
    wide.get(f"{HTML.as_uri()}/search.html?q={asked}")
    until(wide, "return document.querySelectorAll('#search-results li').length > 20")
    found = wide.execute_script(FOUND)
    assert found[0] == f"{first}.html"
    assert not [page for page in found[:20] if page.startswith("api/") or page.endswith(".py.html")]


def test_search(wide):
    search(wide, HTML.as_uri())


def test_search_on_a_web_server(wide):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=HTML)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            search(wide, f"http://127.0.0.1:{server.server_port}")
            until(wide, "return document.querySelector('#search-results p.context')?.textContent")
        finally:
            wide.get("about:blank")  # a page that still fetches excerpts would miss the server
            server.shutdown()
            thread.join()


# ---------------------------------------------------------------------------------------------------------------------
# The player


def fact(driver, name):
    return driver.find_element("css selector", f'[data-fact="{name}"]').text


def clock(driver):
    return float(driver.find_element("id", "clock").text.split()[0])


def press(driver, *keys):
    driver.switch_to.active_element.send_keys(*keys)


def test_player_plays_with_the_keyboard(wide):
    open_player(wide)
    assert clock(wide) == 0 and fact(wide, "updates") == "0"
    press(wide, " ")
    until(wide, "return Number(document.querySelector('[data-fact=updates]').textContent) >= 3")
    press(wide, " ")
    stopped = clock(wide)
    assert stopped > 0 and "play" in wide.find_element("id", "play").text
    updates = int(fact(wide, "updates"))
    press(wide, "\ue014")  # right
    assert int(fact(wide, "updates")) == updates + 1 and clock(wide) > stopped - 0.05
    press(wide, "\ue012", "\ue012")  # left
    assert int(fact(wide, "updates")) == updates - 1
    assert not errors_of(wide)


def test_player_ends_and_begins_anew(wide):
    open_player(wide, speed=3)
    choose(wide, "time", 29.5)
    wide.find_element("id", "play").click()
    until(wide, "return document.getElementById('play').textContent.includes('again')")
    assert clock(wide) == 30
    wide.find_element("id", "play").click()
    until(wide, "return !document.getElementById('play').textContent.includes('again')")
    assert clock(wide) < 30


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_player_in_the_light_and_in_the_dark(wide, theme):
    """The minimum's cross is larger than the dot on it, curves name their times, and panels have the theme's brightness."""
    open_player(wide)
    wide.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    width = "return document.querySelector('.player .valley .cross').getBBox().width"
    assert wide.execute_script(width) > 1.5 * 2 * 6.5
    for name in ("staleness", "loss", "accuracy"):
        assert "time 0" in wide.find_element("css selector", f".player .{name} svg").text
    panels = wide.find_elements("css selector", ".player .pictures > div")
    colors = [map(int, re.findall(r"\d+", panel.value_of_css_property("background-color"))[:3]) for panel in panels]
    assert len(colors) == 5 and all(max(color) < 64 if theme == "dark" else min(color) > 192 for color in colors)


@pytest.mark.parametrize("control", ["scheme", "workers", "slowness", "latency", "window", "rate"])
def test_each_control_changes_what_is_shown(wide, control):
    open_player(wide)
    choose(wide, "time", 15)
    names = ["cluster", "valley", "staleness", "loss", "accuracy"]
    pictures = "return arguments[0].map(name => document.querySelector(`.player .${name}`).innerHTML)"
    values = wide.execute_script(
        "const c = document.getElementById(arguments[0]); return c.options ? c.options.length : Number(c.max) + 1", control
    )
    seen = []
    for value in range(values):
        choose(wide, control, value)
        seen.append(wide.execute_script(pictures, names))
    assert values >= 2
    for i, name in enumerate(names):
        if (control, name) not in (("rate", "cluster"), ("rate", "staleness")):  # the clock needs no gradient
            assert len({pictures[i] for pictures in seen}) > 1, name
    assert not errors_of(wide)


def test_all_traces_are_there(wide):
    open_player(wide)
    schemes = wide.execute_script("return document.getElementById('scheme').options.length")
    for scheme in range(schemes):
        choose(wide, "scheme", scheme)
        for workers in range(3):
            choose(wide, "workers", workers)
            choose(wide, "time", 30)
            assert int(fact(wide, "updates")) > 0
    assert schemes == 8 and not errors_of(wide)


def at_the_end(driver, **choices):
    open_player(driver, **choices)
    choose(driver, "time", 30)
    values = {name: fact(driver, name) for name in ("updates", "mean staleness", "loss", "test accuracy")}
    return {name: float("inf") if value == "diverged" else float(value.strip("%")) for name, value in values.items()}


def test_accuracy_grows(wide):
    open_player(wide)
    assert float(fact(wide, "test accuracy").strip("%")) < 20
    assert at_the_end(wide)["test accuracy"] > 90


def test_what_the_page_says_of_the_schemes(wide):
    """The paragraph "What to try"."""
    few, many = (at_the_end(wide, scheme=0, workers=workers) for workers in (0, 2))
    assert 0.9 <= few["mean staleness"] <= 1 and 6.5 <= many["mean staleness"] <= 7
    assert few["loss"] < 0.5 and many["loss"] > 5
    slow = [[at_the_end(wide, scheme=scheme, slowness=k)["updates"] for k in (0, 2)] for scheme in (0, 2, 3)]
    hogwild, semi, synchronous = (after / before for before, after in slow)
    assert hogwild > 0.75 and semi < 0.5 and synchronous < 0.5
    short, long = (at_the_end(wide, scheme=6, latency=1, window=window) for window in (0, 1))
    assert long["updates"] <= short["updates"] / 2 and long["loss"] < short["loss"]
