"""What tests of pages do in a real browser (the fixtures ``browser`` and ``visit`` of ``conftest.py``)."""

from pathlib import Path

CHROMIUM = Path("/usr/bin/chromium")

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


def draw(page, plots) -> None:
    """Scrolls to each chart, as a reader would, and waits for it."""
    for i in range(plots.count()):
        plots.nth(i).scroll_into_view_if_needed()
        page.wait_for_function(DRAWN, arg=plots.nth(i).element_handle())


def fits(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def tip(page, plot, points) -> str:
    """What the page tells of the first of these points of a chart that lies on something."""
    box = plot.bounding_box()
    for x, y in points:
        page.mouse.move(box["x"] + x, box["y"] + y)
        page.wait_for_timeout(100)
        if shown := page.evaluate(TIP):
            return shown
    return ""
