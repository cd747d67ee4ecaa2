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


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    lost = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not lost
