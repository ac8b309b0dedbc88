"""Tests that each claim of docs/security.md names a test that exists, and each fault that this page closes, too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.support.allocation import REPOSITORY

PAGE = REPOSITORY / "docs" / "security.md"
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)`")


def rows() -> Iterator[tuple[str, str]]:
    """The rows of the tables whose last column names tests: the claim, and that column."""
    wanted = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            wanted = False
        elif cells[-1] == "test":
            wanted = True
        elif wanted and not set(line) <= set("|- "):
            yield cells[0], cells[-1]


def test_each_claim_of_a_table_names_a_test() -> None:
    claims = list(rows())
    assert len(claims) >= 40
    without = [claim for claim, tests in claims if not TEST.search(tests) and tests != "both of these"]
    assert without == []


def test_each_test_that_is_named_exists_and_tests_something() -> None:
    named = {REPOSITORY / path for path in TEST.findall(PAGE.read_text())}
    tests = re.compile(r"^(async )?def test_", re.MULTILINE)
    assert [str(path) for path in sorted(named) if not (path.is_file() and tests.search(path.read_text()))] == []
