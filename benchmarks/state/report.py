"""The table and the last line of `make bench-state`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.table import Table

from .records import Change, TrialRecord, Way

Cell = tuple[int, float]
"""Nodes, and megabytes of the state."""


def cells(records: Iterable[TrialRecord]) -> list[Cell]:
    """The jobs that were measured, each by every way."""
    return sorted({(record.nodes, record.megabytes) for record in records})


def median(
    records: Iterable[TrialRecord], cell: Cell, way: Way, value: Callable[[TrialRecord], float | None]
) -> float | None:
    """The median of those that have the value; None if none has."""
    found = [
        one
        for record in records
        if (record.nodes, record.megabytes, record.way) == (*cell, way) and (one := value(record)) is not None
    ]
    return statistics.median(found) if found else None


def new_step(record: TrialRecord) -> float | None:
    """Seconds from the kill to the first new step."""
    return record.shrunk.new if record.shrunk is not None else None


def closing(records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The values of the last line: those of the worst job, as each must reach the goal; None where a trial failed."""
    measured = [record for record in records if record.way is Way.MEMORY]
    if not measured or any(record.grown is None for record in measured):
        return dict.fromkeys(("reshard_s", "reshard_vs_storage", "bytes_ratio", "lost_steps", "bitwise"))
    seconds = {cell: median(records, cell, Way.MEMORY, new_step) for cell in cells(measured)}
    stored = {cell: median(records, cell, Way.STORAGE, new_step) for cell in seconds}
    ratios = [one / of_storage for cell, one in seconds.items() if one and (of_storage := stored[cell])]
    shares = [ratio for record in measured for change in changes(record) if (ratio := bytes_ratio(change))]
    return {
        "reshard_s": round(max(one for one in seconds.values() if one), 2),
        "reshard_vs_storage": round(max(ratios), 3) if len(ratios) == len(seconds) else None,
        "bytes_ratio": round(max(shares), 4) if shares else None,
        "lost_steps": sum(change.lost for record in measured for change in changes(record)),
        "bitwise": all(record.bitwise for record in measured),
    }


def changes(record: TrialRecord) -> list[Change]:
    """The changes of a job's size that were seen."""
    return [change for change in (record.shrunk, record.grown) if change is not None]


def bytes_ratio(change: Change) -> float | None:
    """Bytes that the nodes received by those that they lacked, of the worst node; None if none lacked any."""
    return max((moved.received / moved.lacked for moved in change.moved if moved.lacked), default=None)


def table(records: Sequence[TrialRecord]) -> Table:
    """One row for each job and way."""
    shown = Table(title="A node is killed, then the job grows again", title_justify="left")
    for column in ("nodes", "state", "way"):
        shown.add_column(column)
    for column in (
        "to a step, s",
        "to a new one, s",
        "made again",
        "growth, s",
        "made again",
        "received (lacked), MB",
        "losses",
    ):
        shown.add_column(column, justify="right")
    for cell in cells(records):
        for way in Way:
            of_way = [record for record in records if (record.nodes, record.megabytes, record.way) == (*cell, way)]
            if of_way:
                shown.add_row(f"{cell[0]}", f"{cell[1]:g} MB", way.title, *_figures(of_way))
    return shown


def _figures(records: Sequence[TrialRecord]) -> list[str]:
    shrunk = [record.shrunk for record in records if record.shrunk is not None]
    grown = [record.grown for record in records if record.grown is not None]
    moved = [one for record in records for change in changes(record) for one in change.moved]
    compared = [record.bitwise for record in records if record.bitwise is not None]
    failed = sum(bool(record.error) for record in records)
    return [
        _seconds([change.again for change in shrunk]),
        _seconds([change.new for change in shrunk]),
        _numbers([change.lost for change in shrunk]),
        _seconds([change.new for change in grown]),
        _numbers([change.lost for change in grown]),
        ", ".join(map(_megabytes, changes(records[0]))) if moved else "",
        f"{failed} failed" if failed else "" if not compared else "equal" if all(compared) else "DIFFER",
    ]


def _megabytes(change: Change) -> str:
    """Of all nodes together."""
    received, lacked = (sum(getattr(one, name) for one in change.moved) / 1e6 for name in ("received", "lacked"))
    return f"{received:.1f} ({lacked:.1f})"


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "-"
