"""Generates the table of `docs/checkpoints.md`: what a training loses, by its state and by what died. The rest of the
page is written by hand.

Each cell names the test that runs it; tests take what they expect from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"
_TABLE = re.compile(r"(<!-- generated: losses -->\n).*?(<!-- end -->)", re.DOTALL)


class Kind(StrEnum):
    """How a training keeps its state."""

    REPLICATED = "`replicated=True`"
    SPLIT = "split over the ranks"
    SEVERAL = "several Checkpointers"
    WATCHED = "`watch`ed folder"
    DCP = "`dcp_writer`"


class Died(StrEnum):
    """What happened to the job."""

    RANK = "a rank died"
    LAUNCHER = "a launcher died, and its machine is left"
    NODE = "a node died, and was replaced"
    SHRINKS = "a node died, and the world shrank"
    GROWS = "the world grew"
    NEIGHBOURS = "two of three nodes died at once"
    ALL = "all nodes died at once"
    CONTROL = "the worker or the Temporal server died"
    SUSPENDED = "it was suspended and resumed"


class Loss(StrEnum):
    """What is made again."""

    NOTHING = "nothing"
    CHECKPOINT = "since the checkpoint"
    SAVE = "since the save"
    WAITS = "nothing, once the world has its size again"
    ALL = "**all**"


class Cell(NamedTuple):
    """What one kind of state loses."""

    without: Loss
    """Where the job has no storage."""
    stored: Loss


_NOTHING = Cell(Loss.NOTHING, Loss.NOTHING)
_SAVE = Cell(Loss.SAVE, Loss.SAVE)
_MEMORY = Cell(Loss.ALL, Loss.CHECKPOINT)
"""Whatever was in memory."""
_STORED = Cell(Loss.ALL, Loss.NOTHING)
"""The ranks wait at the step that is stored."""
_WAITS = Cell(Loss.WAITS, Loss.WAITS)
_ALL = Cell(Loss.ALL, Loss.ALL)

LOSSES: Mapping[Died, Mapping[Kind, Cell]] = {
    died: dict(zip(Kind, cells, strict=True))
    for died, cells in {
        Died.RANK: (_NOTHING, _NOTHING, _NOTHING, _SAVE, _NOTHING),
        Died.LAUNCHER: (_NOTHING, _NOTHING, _NOTHING, _SAVE, _NOTHING),
        Died.NODE: (_NOTHING, _NOTHING, _NOTHING, _SAVE, _NOTHING),
        Died.SHRINKS: (_NOTHING, _NOTHING, _NOTHING, _SAVE, _WAITS),
        Died.GROWS: (_NOTHING, _NOTHING, _NOTHING, _SAVE, _WAITS),
        Died.NEIGHBOURS: (_NOTHING, _MEMORY, _MEMORY, Cell(Loss.ALL, Loss.SAVE), _ALL),
        Died.ALL: (_MEMORY, _MEMORY, _MEMORY, Cell(Loss.ALL, Loss.SAVE), _ALL),
        Died.CONTROL: (_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING),
        Died.SUSPENDED: (_STORED, _STORED, _STORED, Cell(Loss.ALL, Loss.SAVE), _ALL),
    }.items()
}

_PLAYED = "tests/training/test_what_is_lost.py::test_a_state_loses_what_the_guide_says"
_WATCHED = "tests/agent/test_watched_losses.py::test_a_watched_folder_loses_what_the_guide_says"
_CONTROL = "tests/system/test_survival.py::test_worker_and_server_killed_do_not_stop_training"


def name_of(died: Died, kind: Kind, *, stored: bool) -> str:
    """The name of a cell."""
    return f"{died.name.lower()}-{kind.name.lower()}-{'storage' if stored else 'memory'}"


def tested_by(died: Died, kind: Kind, *, stored: bool) -> str:
    """The ID of the test that runs a cell."""
    if died is Died.CONTROL:
        return _CONTROL
    return f"{_WATCHED if kind is Kind.WATCHED else _PLAYED}[{name_of(died, kind, stored=stored)}]"


def reference() -> str:
    """Returns the page's content, with its table as it should be."""
    page = _PAGE.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: f"{found[1]}{_table()}{found[2]}", page)


def _table() -> str:
    rows = ["| what happened | " + " | ".join(Kind) + " |", "|-|" + "-|" * len(Kind)]
    rows += [f"| {died} | " + " | ".join(map(_words, cells.values())) + " |" for died, cells in LOSSES.items()]
    return "\n".join([*rows, ""])


def _words(cell: Cell) -> str:
    return cell.without if cell.without is cell.stored else f"{cell.without}; with storage {cell.stored}"
