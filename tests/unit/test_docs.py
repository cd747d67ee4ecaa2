"""The pages of the documentation: each is in the site's contents, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import elastic
from elastic.sim.scenario import read_scenario

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def test_each_page_is_in_the_contents() -> None:
    contents = {line for page in PAGES for line in page.read_text().split()}
    names = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES}
    assert names - {"index"} <= contents


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
        assert not path or target.resolve() in PAGES or target.resolve().parent == ROOT, path
        assert not anchor or anchor in anchors(target), (path, anchor)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    lost = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not lost


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    modules = re.findall(r"automodule:: (\S+)", reference)
    others = [name for name in elastic.__all__ if getattr(elastic, name).__module__ not in modules]
    assert [name for name in others if f":: elastic.{name}\n" not in reference] == []


def test_scenarios_in_the_documentation_can_be_read(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "simulator.md").read_text(), re.MULTILINE | re.DOTALL)
    scenarios = [block for block in blocks if re.search(r"^(duration_s|extends) =", block, re.MULTILINE)]
    assert len(scenarios) == 3
    for block in scenarios:
        (tmp_path / "scenario.toml").write_text(block)
        read_scenario(tmp_path / "scenario.toml")
