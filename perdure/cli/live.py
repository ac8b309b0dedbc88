"""The live view of a job, for `perdure run`, `submit --wait` and `watch`.

On a terminal it redraws a picture and reads keys; to a pipe it prints a line whenever something changes. In both cases
leaving means detaching: the job continues.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from perdure.base.errors import ExitCode, LogsUnavailable, PerdureError
from perdure.cli import text
from perdure.cli.common import Session, continue_without_reader, out, show_link
from perdure.cli.explain import explanation, with_role_named
from perdure.cli.keys import event_of_interrupt, owns_terminal, single_keys
from perdure.cli.terminal import link, printed_line, printed_lines

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.views import JobSnapshot
    from perdure.contract import IncidentView, JobResult, RoleStatus

LINE_INTERVAL = timedelta(seconds=10)
"""The time between two lines of progress on a pipe."""

_LAST_INCIDENTS = 5
_LAST_LOG_LINES = 10
_SPARKS = "▁▂▃▄▅▆▇█"
_WIDE = 70
"""Columns that also have room for the speed over time."""
_BAR = 60
_MOST_NODES = 48
"""Nodes that are shown each; of more, how many are in each state."""
_LOG_PAUSE = 1.0
"""Seconds until a log that cannot be read yet is tried again."""


@dataclass
class View:
    """The live view of one job."""

    name: str
    flag: str
    page: str
    """The job's page in the Temporal UI; empty if it is unknown."""
    snapshot: JobSnapshot | None = None
    incidents: dict[int, IncidentView] = field(default_factory=dict[int, "IncidentView"])
    rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=40))
    panel: str = ""
    """The panel that a key opened: `explain` or `logs`."""
    log_lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_LAST_LOG_LINES))
    keys: bool = False

    def take(self, snapshot: JobSnapshot) -> None:
        self.snapshot = snapshot
        if snapshot.status and (incident := snapshot.status.last_incident):
            self.incidents[incident.number] = incident
        if snapshot.progress and snapshot.progress.steps_per_second and not snapshot.problem:
            self.rates.append(snapshot.progress.steps_per_second)

    @property
    def roles(self) -> tuple[RoleStatus, ...]:
        """The roles of a job with several."""
        return self.snapshot.status.by_role if self.snapshot and self.snapshot.status else ()

    def told(self, number: int) -> IncidentView:
        """An incident, with its role in the title where the job has several."""
        incident = self.incidents[number]
        return with_role_named(incident) if self.roles else incident

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings of the job that are probably not intended."""
        from perdure.client.views import all_warnings

        snapshot = self.snapshot
        return all_warnings(snapshot.nodes, snapshot.status) if snapshot and snapshot.status else ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._shown(options.max_width)

    def _shown(self, width: int) -> RenderableType:
        snapshot = self.snapshot
        parts: list[RenderableType] = [self._headline()]
        if snapshot and snapshot.problem:
            parts.append(Text.from_markup(f"[yellow]AWAY[/]  {escape(snapshot.problem)}; running nodes continue"))
        if snapshot and snapshot.status:
            if snapshot.status.reason:
                parts.append(Text.assemble(("WHY   ", "bold"), snapshot.status.reason))
            parts += map(Text.from_markup, text.tree(self.roles))
            parts += [*self._progress(width), self._nodes()]
        parts += [Text.assemble(("WARN  ", "bold yellow"), warning) for warning in self.warnings]
        for number in sorted(self.incidents)[-_LAST_INCIDENTS:]:
            incident = self.told(number)
            parts.append(
                Text.assemble(("LAST  ", "bold"), f"{text.clock(incident.started_at)} {text.incident_line(incident)}")
            )
        if self.page:
            parts.append(Text.assemble(("UI    ", "bold"), link(self.page, out, width - len("UI    "))))
        if self.panel == "explain" and self.incidents:
            ended = snapshot.result.phase if snapshot and snapshot.result else None
            incident = self.told(max(self.incidents))
            several = bool(self.roles)
            parts.append(explanation(incident, job=self.name, flag=self.flag, ended=ended, several_roles=several))
        if self.panel == "logs":
            parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self.log_lines]
        keys = r"\[e]xplain  \[l]ogs  \[q]uit" if self.keys else "Ctrl-C"
        parts.append(Text.from_markup(f"[dim]{keys} = detach, the job continues[/]"))
        return Group(*parts)

    def _headline(self) -> Text:
        status = self.snapshot.status if self.snapshot else None
        if status is None:
            return Text.from_markup(f"[bold]{escape(self.name)}[/]  waiting for its first report")
        words = [
            f"[bold]{escape(self.name)}[/]  {text.phase(status.phase)}",
            text.nodes(status),
            f"world of {text.count(status.world_size, 'rank')}",
            f"generation {status.generation}",
            text.age(status.started_at),
        ]
        if stalled := text.stall(status, self.snapshot.nodes if self.snapshot else ()):
            words.append(f"[yellow]{stalled}[/]")
        return Text.from_markup("   ".join(words))

    def _progress(self, width: int) -> list[RenderableType]:
        progress = self.snapshot.progress if self.snapshot else None
        if progress is None:
            return [Text.assemble(("STEP  ", "bold"), ("none yet", "dim"))]
        words = [text.step(progress), text.rate(progress)]
        words += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
        words += [f"ETA {left}"] if (left := text.eta(progress)) else []
        line = Text.assemble(("STEP  ", "bold"), "   ".join(word for word in words if word))
        if width >= _WIDE:
            line.append(f"   {_spark(list(self.rates))}", style="dim")
        if progress.source != "REPORTED" or not progress.total_steps:
            return [line]
        bar = ProgressBar(total=progress.total_steps, completed=progress.step, width=min(width - 6, _BAR))
        return [line, Padding(bar, (0, 0, 0, 6))]

    def _nodes(self) -> Text:
        line = Text("NODES ", style="bold")
        if self.roles and self.snapshot and self.snapshot.status:
            line.append(f"{self.snapshot.status.role}  ")
        nodes = self.snapshot.nodes if self.snapshot else ()
        if len(nodes) > _MOST_NODES:
            states = Counter(text.node_state(node) for node in nodes)
            for (symbol, style, word), count in states.most_common():
                line.append(f"{count:,} ", style="not bold")
                line.append(symbol, style=f"not bold {style}")
                line.append(f" {word}   ", style="not bold")
            return line
        for node in nodes:
            symbol, style, word = text.node_state(node)
            line.append(f"{node.rank} ", style="dim not bold")
            line.append(symbol, style=f"not bold {style}")
            line.append(f" {word}   " if word != "stepping" else "  ", style="not bold")
        return line


def _spark(values: list[float]) -> str:
    """Draws the rate over time as a row of bars."""
    if len(values) < 2:
        return ""
    high = max(values)
    return "".join(_SPARKS[round(value / high * (len(_SPARKS) - 1))] for value in values)


async def follow(client: Client, here: Session, name: str, *, keys: bool = False, output: bool = False) -> ExitCode:
    """Shows the job until it ends or the user detaches.

    Args:
        client: Reads the job.
        here: The command's session.
        name: The job's name.
        keys: Read keys, on a terminal.
        output: The command has started the job: it begins with the last lines of the script shown, and stays to the
            job's end although the reader of its own output goes away.

    Returns:
        The job's exit code; `DETACHED` if the user left before.
    """
    if output:
        continue_without_reader()
    page = client.endpoint.workflow_page(f"job/{client.namespace}/{name}")
    view = View(name=name, flag=here.flag, page=page, keys=keys and owns_terminal() and not out.is_dumb_terminal)
    view.panel = "logs" if output and view.keys else ""
    # A dumb terminal cannot move its cursor: rich would draw nothing there before the end.
    by_lines = here.json or not out.is_terminal or out.is_dumb_terminal
    with suppress(PerdureError):
        view.incidents.update({incident.number: incident for incident in await client.incidents(name)})
    async with event_of_interrupt() as detached:
        drawing = (_silent if here.json else _lines) if by_lines else _picture
        # The keys come first: a user who sees them may press one at once.
        async with _key_presses(client, view, detached, enabled=view.keys):
            with drawing(view) as update:
                result = await _until_end(client, name, view, update, detached)
    if result is None:
        if not here.json:
            tell_detached(name, here.flag)
        return ExitCode.DETACHED
    if here.json:
        here.show(result)
    else:
        words = await _last_output(client, name, view.incidents) if result.phase == "FAILED" else []
        tell_result(here, name, result, words, explainable=bool(view.incidents))
    return ExitCode(result.exit_code)


async def _last_output(client: Client, name: str, incidents: dict[int, IncidentView]) -> list[str]:
    """The end of the output of the node where the last failure began: as the job kept it, else from its log."""
    last = incidents[max(incidents)] if incidents else None
    if last and last.log_tail:
        return printed_lines(last.log_tail)[-_LAST_LOG_LINES:]
    with suppress(PerdureError):
        node = last.culprit if last and last.culprit is not None else 0
        role = last.role if last else (await client.status(name)).role
        lines = client.logs(name, node=node, role=role, tail=_LAST_LOG_LINES)
        return [line.text async for line in lines][-_LAST_LOG_LINES:]
    return []


async def _until_end(
    client: Client, name: str, view: View, update: Callable[[], None], detached: asyncio.Event
) -> JobResult | None:
    snapshots = client.watch(name)
    leaving = asyncio.create_task(detached.wait())
    try:
        while not detached.is_set():
            coming = asyncio.ensure_future(anext(snapshots))
            await asyncio.wait([coming, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                return None
            snapshot = coming.result()
            view.take(snapshot)
            update()
            if snapshot.result:
                return snapshot.result
        return None
    finally:
        leaving.cancel()
        await snapshots.aclose()


@contextmanager
def _picture(view: View) -> Generator[Callable[[], None]]:
    with Live(view, console=out, auto_refresh=False, transient=False) as live:
        yield live.refresh


@contextmanager
def _silent(view: View) -> Generator[Callable[[], None]]:
    yield lambda: None


@contextmanager
def _lines(view: View) -> Generator[Callable[[], None]]:
    """Prints a line whenever the job changes, and progress at intervals."""
    reported: tuple[object, ...] = ()
    reported_incidents: dict[int, str] = {}
    reported_roles: dict[str, str] = {}
    reported_warnings: set[str] = set()
    next_line = datetime.now(UTC)

    def update() -> None:
        nonlocal reported, next_line
        snapshot = view.snapshot
        if snapshot is None:
            return
        now = text.clock(snapshot.time)
        for number in sorted(view.incidents):
            line = text.incident_line(view.told(number))
            if reported_incidents.get(number) != line:
                reported_incidents[number] = line
                out.print(f"{now} {line}", markup=False)
        for role in view.roles:
            line = f"{role.name} {text.role(role)}"
            if reported_roles.get(role.name) != line:
                reported_roles[role.name] = line
                out.print(f"{now} {line}", markup=False)
        for warning in view.warnings:
            if warning not in reported_warnings:
                reported_warnings.add(warning)
                out.print(f"{now} warning: {warning}", markup=False)
        status = snapshot.status
        state = (
            snapshot.problem,
            *((status.phase, status.generation, status.nodes, status.reason) if status else ()),
        )
        if state != reported or datetime.now(UTC) >= next_line:
            reported = state
            next_line = datetime.now(UTC) + LINE_INTERVAL
            out.print(f"{now} {line_of(snapshot)}", markup=False)

    if view.page:
        show_link("Temporal UI: ", view.page)
    yield update


def line_of(snapshot: JobSnapshot) -> str:
    """One line about a job, for output that is not a terminal."""
    if snapshot.problem:
        return f"AWAY {snapshot.problem}; running nodes continue"
    status, progress = snapshot.status, snapshot.progress
    if status is None:
        return "waiting for its first report"
    words = [status.phase.value, text.nodes(status), f"generation {status.generation}"]
    if status.phase == "RUNNING" and progress:
        words += [text.step(progress), text.rate(progress)]
        words += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
        words.append(text.stall(status, snapshot.nodes))
    elif status.reason:
        words.append(status.reason)
    return "  ".join(word for word in words if word)


@asynccontextmanager
async def _key_presses(client: Client, view: View, detached: asyncio.Event, *, enabled: bool) -> AsyncGenerator[None]:
    """Reads single keys while the context is open."""
    if not enabled:
        yield
        return
    reading: set[asyncio.Task[None]] = set()

    async def read_log() -> None:
        while True:
            try:
                async for line in client.logs(view.name, tail=_LAST_LOG_LINES, follow=True):
                    place = f"{line.role} " if view.roles else ""
                    view.log_lines.append(f"{place}{line.node:>3} | {printed_line(line.text)}")
                return
            except LogsUnavailable as error:
                view.log_lines.append(str(error))
                return
            except PerdureError:
                await asyncio.sleep(_LOG_PAUSE)  # There is no node yet, or no answer.

    def begin_log() -> None:
        if view.panel == "logs" and all(task.done() for task in reading):
            view.log_lines.clear()
            reading.add(asyncio.create_task(read_log()))

    def on_key(key: str) -> None:
        match key:
            case "q" | "\x04" | "":
                detached.set()
            case "e":
                view.panel = "" if view.panel == "explain" else "explain"
            case "l":
                view.panel = "" if view.panel == "logs" else "logs"
                begin_log()
            case _:
                pass

    begin_log()
    try:
        async with single_keys(on_key, out):
            yield
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def tell_detached(name: str, flag: str) -> None:
    """Prints, after Ctrl-C, how to come back and how to end the job."""
    out.print(f"\nDetached; {name} continues.", markup=False)
    out.print(f"  come back:  perdure watch {name}{flag}", markup=False)
    out.print(f"  end it:     perdure cancel {name}{flag} --wait", markup=False)


def tell_result(here: Session, name: str, result: JobResult, words: list[str], *, explainable: bool) -> None:
    """Prints how a job ended, and where to look if it failed."""
    took = text.duration(result.finished_at - result.started_at)
    counts = f"{text.count(result.generations, 'generation')}, {text.count(result.restarts, 'restart')}"
    at = "" if result.step is None else f", at step {result.step:,}"
    out.print(f"[bold]{escape(name)}[/]  {text.phase(result.phase)} after {took}{at}; {counts}")
    for unprocessed in result.unprocessed:
        out.print(Text.assemble(("WARNING ", "bold yellow"), unprocessed.summary))
    if result.phase == "SUCCEEDED":
        here.hint(f"perdure logs {name}{here.flag}", f"perdure status {name}{here.flag}")
        return
    out.print(result.reason, markup=False)
    for line in words:
        out.print(Text(f"  | {line}", style="dim"))
    explain = [f"perdure explain {name}{here.flag}"] if explainable else []
    here.hint(*explain, f"perdure logs {name}{here.flag}")
