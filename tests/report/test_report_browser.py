"""The page in a real browser: it draws its charts, asks the network for nothing, and fits a phone."""

import dataclasses
import functools

import pytest
from chromium import DRAWN, draw, fits, tip
from report_samples import cpu_contents, gpu_contents

from weft.report.page import Contents, render


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Each page is rendered once: made by a function, it is the same every time."""
    return functools.cache(lambda made: render(made(), tmp_path_factory.mktemp("report") / "index.html"))


def draw_all(page):
    """Unfolds everything and draws each chart; returns the charts."""
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    draw(page, page.locator(".plot"))
    return page.locator(".plot")


@pytest.mark.parametrize("width", [390, 1280])
def test_every_chart_is_drawn_explained_and_fits(visit, rendered, width):
    page = visit(rendered(gpu_contents), width)
    plots = draw_all(page)
    assert plots.count() == 2 + 1 + 2 * 6 + 2 and fits(page)
    for i in range(plots.count()):
        plot = plots.nth(i)
        assert len(plot.get_attribute("aria-label")) > 40
        box = plot.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] > 60
    explained = page.locator("figure.chart .meaning b", has_text="What this means.")
    assert page.locator("figure.chart").count() == explained.count()


def test_charts_are_drawn_when_the_reader_comes_near(visit, rendered):
    page = visit(rendered(gpu_contents))
    page.wait_for_function(DRAWN, arg=page.locator("#ceiling-1").element_handle())
    assert not page.evaluate(DRAWN, page.locator("#training-1").element_handle())


def test_dark_mode_draws_in_dark_colours_and_follows_a_change(visit, rendered):
    page = visit(rendered(cpu_contents), color_scheme="dark")
    assert draw_all(page).count() > 3 and fits(page)
    colour = "() => Bokeh.documents.at(-1).roots()[0].below[0].major_label_text_color"
    assert "#e8e8e4" in str(page.evaluate(colour))
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"({colour})() === '#1b1e22'")


def test_pointer_shows_all_numbers_of_a_bar(visit, rendered):
    page = visit(rendered(gpu_contents))
    plot = page.locator("#share-1")
    draw(page, plot)
    shown = tip(page, plot, [(180, y) for y in range(20, 90, 6)])  # the first group's bars
    assert "implementation" in shown and "share of ceiling" in shown and "µs" in shown


def test_table_sorts_by_number_and_by_name(visit, rendered):
    page = visit(rendered(gpu_contents))
    page.locator("#measurements summary").click()
    times = "() => [...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.cells[6].dataset.v))"
    page.get_by_role("button", name="time (µs)", exact=True).click()
    assert page.evaluate(times) == sorted(page.evaluate(times))
    page.get_by_role("button", name="time (µs)", exact=True).click()
    assert page.evaluate(times) == sorted(page.evaluate(times), reverse=True)
    page.get_by_role("button", name="to best peer").click()
    first = page.evaluate("document.querySelector('.sortable tbody tr').className")
    assert first == "ours", "rows without a number come last"
    page.get_by_role("button", name="implementation").click()
    names = page.evaluate("[...document.querySelectorAll('.sortable tbody tr')].map(row => row.cells[3].textContent)")
    assert names == sorted(names)


def hostile_contents():
    contents = gpu_contents()
    hostile = "</script><img src=x onerror='window.hacked=1'>"
    some = contents.measurements[:12]
    contents.measurements = [dataclasses.replace(m, implementation=m.implementation + hostile) for m in some]
    return contents


def test_hostile_records_run_nothing(visit, rendered):
    page = visit(rendered(hostile_contents))
    box = draw_all(page).nth(3).bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("width", [390, 1280])
def test_empty_page_fits_and_draws_nothing(visit, rendered, width):
    page = visit(rendered(Contents), width)
    assert fits(page) and page.locator("figure, canvas").count() == 0 and page.locator("section .empty").count() >= 8
