"""Tests that the glossary is one sorted list without repeated terms."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

TERMS = re.findall(
    r"^\| ([^|]+) \| (\S.*) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
)


def test_terms_are_sorted_and_told_once():
    names = [term for term, _ in TERMS if term not in ("term", "-")]
    assert len(names) > 40
    assert names == sorted(names)
    assert len(names) == len({name.partition(" (")[0] for name in names})


def test_each_meaning_is_short():
    assert [term for term, meaning in TERMS if len(re.sub(r"\]\([^)]*\)", "]", meaning)) > 240] == []
