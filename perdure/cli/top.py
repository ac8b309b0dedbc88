"""`perdure top`: all jobs at one glance, live on a terminal."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from perdure.cli import text
from perdure.cli.common import NamespaceOption, ServerSession, out

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.page.looks import JobRow, ListLook

_INTERVAL = timedelta(seconds=2)
_WIDE = 100
"""Columns that have room for everything."""
_WIDEST = 400
"""Columns that rows are spread over; a pipe has more."""
_NARROW = 60
"""Columns below which only phases and steps are shown."""
_OTHER_LINES = 4
"""Lines of the view besides its jobs."""
_AT_ONCE = 16


def top(
    *,
    namespace: NamespaceOption = "default",
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    here: ServerSession,
) -> None:
    """Show what all jobs do, those that run first, until you leave by q or Ctrl-C. A pipe gets them once.

    [dim]perdure top · perdure top -A · perdure top -o json[/]
    """
    here = replace(here, namespace=namespace)
    live = out.is_terminal and not out.is_dumb_terminal and not here.json
    look = here.run(lambda client: _follow(client, everywhere) if live else _once(client, everywhere))
    if here.json:
        here.show([{**row.summary.model_dump(mode="json"), **_facts(row)} for row in look.jobs])
    elif not live:
        out.print(View(look, everywhere, most=len(look.jobs)))


async def _once(client: Client, everywhere: bool) -> ListLook:
    from perdure.page.looks import MOST_JOBS, JobList

    return await JobList(client, everywhere=everywhere, at_once=MOST_JOBS).look()


async def _follow(client: Client, everywhere: bool) -> ListLook:
    """Draws the jobs until the user leaves."""
    from perdure.cli.keys import event_of_interrupt, owns_terminal, single_keys
    from perdure.page.looks import JobList

    jobs = JobList(client, everywhere=everywhere, at_once=_AT_ONCE)
    async with AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(event_of_interrupt())
        if owns_terminal():
            await stack.enter_async_context(
                single_keys(lambda key: leaving.set() if key in ("q", "\x04", "") else None, out)
            )
        look = await jobs.look()
        live = stack.enter_context(Live(View(look, everywhere), console=out, auto_refresh=False, transient=False))
        while not leaving.is_set():
            live.update(View(look, everywhere), refresh=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL.total_seconds()):
                    await leaving.wait()
            look = look if leaving.is_set() else await jobs.look()
    return look


@dataclass
class View:
    """The table of jobs."""

    look: ListLook
    everywhere: bool
    most: int | None = None
    """Jobs that are shown; None: as many as the terminal has lines for."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max((options.height or console.height) - _OTHER_LINES, 1) if self.most is None else self.most
        jobs = sorted(self.look.jobs, key=lambda row: row.summary.finished_at is not None)
        running = sum(row.summary.finished_at is None for row in jobs)
        yield Text.assemble((text.count(len(jobs), "job"), "bold"), f", {running} open")
        if self.look.problem:
            yield Text.assemble(("AWAY", "yellow"), f"  {self.look.problem}; running nodes continue")
        yield self._table(jobs[:most], options.max_width)
        if len(jobs) > most:
            yield Text(f"and {len(jobs) - most:,} more: perdure list", style="dim")

    def _table(self, jobs: list[JobRow], width: int) -> Table:
        table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.expand = width <= _WIDEST
        names = ["NAME", *(["NAMESPACE"] if self.everywhere and width >= _NARROW else []), "PHASE"]
        names += ["STEP"] if width < _NARROW else ["RANKS", "STEP", "SPEED", "ETA"]
        names += ["RESTARTS", "LAST INCIDENT"] if width >= _WIDE else []
        for name in names:
            # A row is a line; a long name or incident is cut, and no figure.
            cut = name in ("NAME", "LAST INCIDENT")
            table.add_column(name, no_wrap=True, overflow="ellipsis" if cut else "fold", ratio=1 if cut else None)
        for row in jobs:
            words = _facts(row) | {
                "name": row.summary.name,
                "namespace": row.summary.namespace,
                "ranks": "" if row.summary.world_size is None else str(row.summary.world_size),
                "restarts": "" if row.summary.restarts is None else str(row.summary.restarts),
            }
            words = {key: escape(word) for key, word in words.items()}
            words["phase"] = text.phase(row.summary.phase or (row.status.phase if row.status else "RUNNING"))
            table.add_row(*(words[name.lower().replace(" ", "_")] for name in names))
        return table


def _facts(row: JobRow) -> dict[str, str]:
    """What is known of a job besides its summary."""
    progress = row.progress
    is_open = row.summary.finished_at is None
    incident = row.status.last_incident if row.status else None
    step = ""
    if progress:
        step = text.step(progress).removeprefix("step ") if progress.source == "REPORTED" else f"{progress.step:,}"
    return {
        "step": step,
        "speed": text.rate(progress) if progress and is_open else "",
        "eta": text.eta(progress) if progress and is_open else "",
        "last_incident": text.incident_line(incident) if incident else "",
    }
