"""The pages of the documentation: each is in the site's contents, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def test_each_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "index.md").read_text().split()
    assert {page.stem for page in PAGES} - {"index"} <= set(contents)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, of the depths that the site gives names, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#{1,4} (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_into_pages_lead_to_headings(page: Path) -> None:
    """The site knows no other anchors; and it has the README on its first page, and no pages of other folders."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*\.md)?(?:#([^)\s]+))?\)", text):
        target = page.parent / path if path else page
        assert not path or target.resolve().parent in (ROOT, ROOT / "docs"), path
        assert not anchor or anchor in anchors(target), (path, anchor)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    lost = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not lost
