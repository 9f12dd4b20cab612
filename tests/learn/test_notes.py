"""docs/notes/learn: pages in both languages with the same headings and code, links that lead somewhere, Python that runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from where import ROOT

from weft.learn.dev import differing

NOTES = ROOT / "docs/notes/learn"
PAGES = sorted(p.name.removesuffix(".en.md") for p in NOTES.glob("*.en.md"))


def python_of(page: Path) -> str:
    """The Python blocks of a page, one after another."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))


def test_every_page_is_in_both_languages():
    assert PAGES and sorted(p.name.removesuffix(".zh.md") for p in NOTES.glob("*.zh.md")) == PAGES
    assert {f"{name}.{language}.md" for name in PAGES for language in ("en", "zh")} <= set(
        re.findall(r"\(([\w.]+\.md)\)", (NOTES / "README.md").read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("page", PAGES)
def test_headings_and_code_agree(page):
    assert list(differing(NOTES, page)) == []


@pytest.mark.parametrize("page", sorted(NOTES.glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("http") and not (NOTES / link).exists()] == []


def test_python_runs():
    """All blocks of all pages in one process, each page with names of its own."""
    pages = {name: code for name in PAGES if (code := python_of(NOTES / f"{name}.en.md"))}
    program = (
        f"import sys\nfor name, code in {pages!r}.items():\n    print(name, file=sys.stderr)\n    exec(code, {{}})\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
