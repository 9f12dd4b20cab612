"""The page in a real browser: it draws its charts, asks the network for nothing, and fits a phone."""

import dataclasses
import functools
from pathlib import Path

import pytest
from report_samples import cpu_contents, gpu_contents

from weft.report.page import Contents, render

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium")

DRAWN = """plot => {  // Bokeh draws into canvases that lie in shadow roots
  const seen = [plot];
  while (seen.length) {
    const node = seen.pop();
    if (node.tagName === "CANVAS") return true;
    seen.push(...(node.shadowRoot ? [node.shadowRoot] : []), ...(node.children ?? []));
  }
  return false;
}"""


TIP = "() => [...document.querySelectorAll('.bk-Tooltip')].map(tip => tip.shadowRoot.textContent).join('')"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tool:
        chromium = tool.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Each page is rendered once: made by a function, it is the same every time."""
    return functools.cache(lambda made: render(made(), tmp_path_factory.mktemp("report") / "index.html"))


@pytest.fixture
def visit(browser, rendered):
    """Opens a rendered page; at the end, nothing may have been fetched but the page, and no error have been raised."""
    requests, errors, contexts, pages = [], [], [], []

    def opened(contents, width=1280, **options):
        pages.append(rendered(contents).as_uri())
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
        page.goto(pages[-1])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("data:")] == pages


def draw_all(page):
    """Unfolds everything and scrolls to each chart, as a reader would; returns the charts."""
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    plots = page.locator(".plot")
    for i in range(plots.count()):
        plots.nth(i).scroll_into_view_if_needed()
        page.wait_for_function(DRAWN, arg=plots.nth(i).element_handle())
    return plots


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("width", [390, 1280])
def test_every_chart_is_drawn_explained_and_fits(visit, width):
    page = visit(gpu_contents, width)
    plots = draw_all(page)
    assert plots.count() == 2 + 1 + 2 * 6 + 2
    assert fits(page)
    for i in range(plots.count()):
        plot = plots.nth(i)
        assert len(plot.get_attribute("aria-label")) > 40
        box = plot.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] > 60
    assert (
        page.locator("figure.chart").count()
        == page.locator("figure.chart .meaning b", has_text="What this means.").count()
    )


def test_charts_are_drawn_when_the_reader_comes_near(visit):
    page = visit(gpu_contents)
    page.wait_for_function(DRAWN, arg=page.locator("#ceiling-1").element_handle())
    assert not page.evaluate(DRAWN, page.locator("#training-1").element_handle())


def test_dark_mode_draws_in_dark_colours_and_follows_a_change(visit):
    page = visit(cpu_contents, color_scheme="dark")
    assert draw_all(page).count() > 3 and fits(page)
    colour = "() => Bokeh.documents.at(-1).roots()[0].below[0].major_label_text_color"
    assert "#e8e8e4" in str(page.evaluate(colour))
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"({colour})() === '#1b1e22'")


def test_pointer_shows_all_numbers_of_a_bar(visit):
    page = visit(gpu_contents)
    plot = page.locator("#share-1")
    plot.scroll_into_view_if_needed()
    page.wait_for_function(DRAWN, arg=plot.element_handle())
    box = plot.bounding_box()
    tip = ""
    for y in range(20, 90, 6):  # the first group's bars
        page.mouse.move(box["x"] + 180, box["y"] + y)
        page.wait_for_timeout(100)
        if tip := page.evaluate(TIP):
            break
    assert "implementation" in tip and "share of ceiling" in tip and "µs" in tip


def test_table_sorts_by_number_and_by_name(visit):
    page = visit(gpu_contents)
    page.locator("#measurements summary").click()
    times = "() => [...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.cells[6].dataset.v))"
    page.get_by_role("button", name="time (µs)", exact=True).click()
    assert page.evaluate(times) == sorted(page.evaluate(times))
    page.get_by_role("button", name="time (µs)", exact=True).click()
    assert page.evaluate(times) == sorted(page.evaluate(times), reverse=True)
    page.get_by_role("button", name="to best peer").click()
    assert page.evaluate("document.querySelector('.sortable tbody tr').className") == "ours", (
        "rows without a number come last"
    )
    page.get_by_role("button", name="implementation").click()
    names = page.evaluate("[...document.querySelectorAll('.sortable tbody tr')].map(row => row.cells[3].textContent)")
    assert names == sorted(names)


def hostile_contents():
    contents = gpu_contents()
    hostile = "</script><img src=x onerror='window.hacked=1'>"
    contents.measurements = [
        dataclasses.replace(m, implementation=m.implementation + hostile) for m in contents.measurements[:12]
    ]
    return contents


def test_hostile_records_run_nothing(visit):
    page = visit(hostile_contents)
    box = draw_all(page).nth(3).bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("width", [390, 1280])
def test_empty_page_fits_and_draws_nothing(visit, width):
    page = visit(Contents, width)
    assert fits(page) and page.locator("figure, canvas").count() == 0 and page.locator("section .empty").count() >= 8
