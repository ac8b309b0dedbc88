"""Prepares the tables for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence

import psutil
from pydantic import BaseModel
from rich.console import Console

from benchmarks.recovery.report import Grid, number
from benchmarks.recovery.summary import median_of
from scripts.cluster.binaries import KUBERNETES

from .records import FaultName, FaultTrial, Thousand


class FaultFigures(BaseModel):
    """All trials of one fault."""

    name: FaultName
    noticed_s: float | None
    stepping_s: float | None
    ok: bool
    """Whether all trials succeeded."""


class Headline(BaseModel):
    """The last line of the output."""

    faults: list[FaultFigures]
    post_1000_s: float | None = None
    post_1000_ratio: float | None = None
    relaunch_30_s: float | None = None
    lease_1000_lost: int | None = None
    worker_cpu_pct: float | None = None
    worker_rss_mb: float | None = None


def headline(trials: Sequence[FaultTrial], thousands: Sequence[Thousand]) -> Headline:
    """Summarizes the trials: medians, and the worst values of figures that should be zero."""
    relaunched = [one.relaunched for one in thousands if one.relaunched]
    held = [one.held for one in thousands if one.held]
    return Headline(
        faults=[
            FaultFigures(
                name=fault,
                noticed_s=_rounded(median_of(trial.noticed for trial in of_fault)),
                stepping_s=_rounded(median_of(trial.stepping for trial in of_fault)),
                ok=all(trial.ok for trial in of_fault),
            )
            for fault in FaultName
            if (of_fault := [trial for trial in trials if trial.fault is fault])
        ],
        post_1000_s=_rounded(median_of(one.job.requested for one in thousands)),
        post_1000_ratio=_rounded(median_of(one.ratio for one in thousands)),
        relaunch_30_s=_rounded(median_of(one.requested for one in relaunched)),
        lease_1000_lost=max((one.lost for one in held), default=None),
        worker_cpu_pct=_rounded(median_of(one.worker_cpu_percent for one in held)),
        worker_rss_mb=_rounded(max((one.worker_rss_mb for one in held), default=None)),
    )


def fault_grid(trials: Sequence[FaultTrial]) -> Grid:
    rows: list[tuple[str, ...]] = []
    for fault in FaultName:
        of_fault = [trial for trial in trials if trial.fault is fault]
        if not of_fault:
            continue
        medians = (median_of(getattr(trial, name) for trial in of_fault) for name in ("noticed", "decided", "stepping"))
        rows.append(
            (
                fault.value,
                *(number(value, digits=2) for value in medians),
                of_fault[-1].action or of_fault[-1].error,
                f"{sum(trial.ok for trial in of_fault)}/{len(of_fault)}",
            )
        )
    return Grid(
        "Two nodes on two kubelets: seconds after the fault, medians",
        ("fault", "noticed", "decided", "all ranks step again", "what was done", "ok"),
        tuple(rows),
        note="Where training need not stop, the third figure is the longest pause between two steps.",
    )


def thousand_grid(thousands: Sequence[Thousand]) -> Grid:
    def seconds(values: Sequence[float]) -> str:
        return number(median_of(values), digits=2)

    nodes = thousands[-1].job.nodes
    rows: list[tuple[str, str, str]] = [
        (f"{nodes} pods requested after submit, s", seconds([one.job.requested for one in thousands]), "< 10"),
        ("... all running, s", seconds([one.job.running for one in thousands]), ""),
        ("a bare loop: requested, s", seconds([one.bare.requested for one in thousands]), ""),
        ("... all running, s", seconds([one.bare.running for one in thousands]), ""),
        ("job / bare loop, until all run", seconds([one.ratio for one in thousands]), "<= 1.3"),
    ]
    if relaunched := [one.relaunched for one in thousands if one.relaunched]:
        lost = f"{relaunched[-1].nodes} nodes lost at once, requested again, s"
        rows.append((lost, seconds([one.requested for one in relaunched]), "< 3"))
        rows.append(("... all in the world again, s", seconds([one.whole for one in relaunched]), ""))
    for held in [one.held for one in thousands if one.held]:
        rows += [
            (f"leases lost of {held.leases} in {held.seconds:.0f} s", str(held.lost), "0"),
            ("worker, % of a core", number(held.worker_cpu_percent), ""),
            ("worker, resident MB", number(held.worker_rss_mb, digits=0), ""),
            ("Temporal server, % of a core", number(held.server_cpu_percent), ""),
            ("Temporal server, resident MB", number(held.server_rss_mb, digits=0), ""),
        ]
    return Grid(f"One job of {nodes} nodes, played by KWOK", ("what", "measured", "goal"), tuple(rows))


def grids(trials: Sequence[FaultTrial], thousands: Sequence[Thousand]) -> list[Grid]:
    """Returns the tables for which there are results."""
    found = [fault_grid(trials)] if trials else []
    return [*found, thousand_grid(thousands)] if thousands else found


def markdown(trials: Sequence[FaultTrial], thousands: Sequence[Thousand]) -> str:
    """Returns the tables as Markdown for the documentation."""
    tables = "\n".join(grid.markdown() for grid in grids(trials, thousands))
    return f"Measured by `make bench-kubernetes` on {machine()}.\n\n{tables}"


def print_report(console: Console, trials: Sequence[FaultTrial], thousands: Sequence[Thousand]) -> None:
    """Prints the tables, the errors, and the headline as one line of JSON."""
    for grid in grids(trials, thousands):
        console.print(grid.draw())
    for trial in trials:
        if trial.error:
            console.print(f"{trial.fault} #{trial.number}: {trial.error}", markup=False)
    print(headline(trials, thousands).model_dump_json(), flush=True)


def machine() -> str:
    """Describes the machine and software of the measurement."""
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "temporalio"))
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, Kubernetes {KUBERNETES}, {versions}; "
        "two ranks of DDP over gloo, 50 ms a step"
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
