"""`make bench-oncall`: plays the events, prints the table, and ends with one line of JSON."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console

from benchmarks.history.__main__ import quieten
from benchmarks.recovery.report import Grid

from .events import EVENTS
from .release import site
from .scene import Event, Verdict, judge

OUT = Path(__file__).with_name("out")


class Headline(BaseModel):
    """The last line of the output."""

    events: int
    as_expected: int
    left: int
    """Objects that outlived their jobs."""
    doubts: list[str]


async def play(events: list[Event], folder: Path, console: Console) -> list[Verdict]:
    """Plays the events one after another; returns the verdicts of those that were played until an interruption."""
    verdicts: list[Verdict] = []
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert running

    def say(line: str) -> None:
        console.print(f"bench: {line}", markup=False, highlight=False, soft_wrap=True)

    def interrupt(number: signal.Signals) -> None:
        # A second signal of the kind ends the benchmark at once.
        loop.remove_signal_handler(number)
        say("interrupted: undoing what was done to the cluster")
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    with suppress(asyncio.CancelledError):
        async with site(say, jobs=len(events)) as where:
            for position, (event, namespace) in enumerate(zip(events, where.job_namespaces, strict=True), start=1):
                verdict = await judge(where, namespace, event, folder / str(position))
                verdicts.append(verdict)
                with (folder / "verdicts.jsonl").open("a", encoding="utf-8") as file:
                    file.write(verdict.model_dump_json() + "\n")
                outcome = "; ".join(verdict.doubts) or f"as expected, {verdict.seconds or 0:.1f} s"
                say(f"{position}/{len(events)} {event.name}: {outcome}")
    return verdicts


TITLE = "An on-call day on a real cluster"


def outcome_grid(verdicts: list[Verdict]) -> Grid:
    """Returns the table for a terminal; what was said is too long for it."""
    rows = [
        (
            verdict.event,
            "-" if verdict.seconds is None else f"{verdict.seconds:.1f}",
            str(verdict.charged),
            str(len(verdict.left)),
            str(len(verdict.doubts)),
        )
        for verdict in verdicts
    ]
    return Grid(TITLE, ("event", "recovery, s", "charged", "left", "doubts"), tuple(rows))


def report_grid(verdicts: list[Verdict]) -> Grid:
    """Returns the whole table."""
    rows = [
        (
            verdict.event,
            verdict.expected,
            "-" if verdict.seconds is None else f"{verdict.seconds:.1f}",
            str(verdict.charged),
            verdict.explained,
            verdict.described,
            ", ".join(verdict.left) or "nothing",
            "; ".join(verdict.doubts) or "none",
        )
        for verdict in verdicts
    ]
    said = ("perdure explain said", "kubectl describe said")
    columns = ("event", "expected", "recovery, s", "charged", *said, "left", "doubts")
    return Grid(TITLE, columns, tuple(tuple(cell.replace("|", "/").replace("\n", " ") for cell in row) for row in rows))


def main(
    event: Annotated[list[str] | None, typer.Option(help="Play only events whose name contains this text.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.")] = None,
) -> None:
    """Plays what a cluster and its administrators do to a job, and judges whether a person on call would be content."""
    quieten()
    chosen = [known for known in EVENTS if not event or any(text in known.name for text in event)]
    if not chosen:
        names = "\n  ".join(known.name for known in EVENTS)
        raise typer.BadParameter(f"no event's name contains {' or '.join(event or [])}; the events are:\n  {names}")
    folder = (out or OUT / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    verdicts = asyncio.run(play(chosen, folder, console))
    report = folder / "report.md"
    report.write_text(report_grid(verdicts).markdown(), encoding="utf-8")
    console.print(outcome_grid(verdicts).draw())
    console.print(f"bench: what was said: {report}", markup=False, highlight=False, soft_wrap=True)
    headline = Headline(
        events=len(verdicts),
        as_expected=sum(not verdict.doubts for verdict in verdicts),
        left=sum(len(verdict.left) for verdict in verdicts),
        doubts=[f"{verdict.event}: {doubt}" for verdict in verdicts for doubt in verdict.doubts],
    )
    print(headline.model_dump_json(), flush=True)
    raise typer.Exit(0 if headline.as_expected == len(chosen) else 1)


if __name__ == "__main__":
    typer.run(main)
