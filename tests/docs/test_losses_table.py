"""Each cell of the table of what is lost is run by a test, and the page begins with it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from scripts import losses
from scripts.losses import LOSSES, Died, Kind
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
CELLS = [(died, kind, stored) for died in Died for kind in Kind for stored in (False, True)]


def parameters(function: object) -> set[str]:
    """The IDs of a test's parameters."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    return {str(one.id) for mark in marks for one in mark.args[1]}


def test_the_table_has_every_cell():
    assert {(died, kind) for died, cells in LOSSES.items() for kind in cells} == {
        (died, kind) for died in Died for kind in Kind
    }


@pytest.mark.parametrize("died", Died, ids=lambda died: died.name.lower())
def test_each_cell_names_a_test_that_is_there(died: Died):
    for _, kind, stored in (cell for cell in CELLS if cell[0] is died):
        file, _, name = losses.tested_by(died, kind, stored=stored).partition("::")
        function, _, parameter = name.removesuffix("]").partition("[")
        assert (ROOT / file).is_file()
        found = getattr(importlib.import_module(".".join(Path(file).with_suffix("").parts)), function)
        assert not parameter or parameter in parameters(found), f"{file} has no {name}"


def test_the_page_begins_with_the_table():
    headings = [line for line in PAGE.splitlines() if line.startswith("## ")]
    assert headings[0] == "## What is lost"
    assert PAGE.count("```python", 0, PAGE.index(headings[0])) == 1
