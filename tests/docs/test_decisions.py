"""Tests that each decision has its parts, its place in the index, and a page that leads to it."""

from __future__ import annotations

import re

from tests.docs.pages import PAGES, ROOT, Page

FOLDER = ROOT / "docs" / "decisions"
DECISIONS = [page for page in PAGES if page.path.parent == FOLDER and page.path.name != "README.md"]
PARTS = ["Context", "Decision", "Consequences", "What would change it"]


def title(page: Page) -> str:
    return page.path.read_text(encoding="utf-8").splitlines()[0]


def test_a_decision_has_its_four_parts_and_is_short() -> None:
    for page in DECISIONS:
        lines = page.path.read_text(encoding="utf-8").splitlines()
        assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == PARTS, page.name
        assert len(lines) < 40, page.name


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.path.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    assert [title(page).partition(".")[0] for page in DECISIONS] == [
        f"# {int(page.path.name[:4])}" for page in DECISIONS
    ]


def test_the_index_has_every_decision_under_its_own_title() -> None:
    rows = re.findall(
        r"^\| \[(\d+)\]\(([\w.-]+)\) \| (.*) \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(name, f"# {number}. {decision}") for number, name, decision in rows] == [
        (page.path.name, title(page)) for page in DECISIONS
    ]


def test_a_decision_is_reached_from_the_page_that_describes_its_result() -> None:
    described = {
        (other.path.parent / link.partition("#")[0]).resolve()
        for other in PAGES
        if other.path.parent != FOLDER
        for link in other.links
    }
    assert [page.name for page in DECISIONS if page.path not in described] == []
