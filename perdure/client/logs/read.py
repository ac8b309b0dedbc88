"""Finds the log of each requested node, and reads all of them together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from perdure.base.errors import ControlPlaneUnreachable, LogsUnavailable, PerdureError
from perdure.client.local_nodes import nodes_here
from perdure.client.logs.agents import AgentLog, Ask
from perdure.client.logs.copies import CopiedLog
from perdure.client.logs.files import FileLog
from perdure.client.logs.lines import LogLine, PrintedLine
from perdure.client.logs.order import merge_by_time
from perdure.client.logs.places import LogPlaces
from perdure.client.views import FINAL_PHASES
from perdure.contract import JobStatus, NodeId, NodePhase, NodeView
from perdure.contract.archive import archived_logs
from perdure.spec.job import Backend

READ_INTERVAL = timedelta(milliseconds=200)
"""The time between two reads of logs that are followed."""

NODES_INTERVAL = timedelta(seconds=2)
"""The time, while following, between two requests for new nodes and for the ends of logs that agents report."""

_SPEAKING = (NodePhase.JOINED, NodePhase.READY)
_GONE = (NodePhase.LOST, NodePhase.REMOVED)
_NOT_READ = "which is not read for others: `perdure logs` reads it, with your own rights"


class NodeLog(Protocol):
    """One incarnation's log, wherever it is kept."""

    def old_lines(self, tail: int | None, since: datetime | None) -> AsyncGenerator[PrintedLine]:
        """Yields the existing lines; called once, and first."""
        ...

    def new_lines(self) -> AsyncGenerator[PrintedLine]:
        """Yields the lines added since the last call."""
        ...

    def last_line(self) -> Sequence[PrintedLine]:
        """The text after the last line break, if there is any."""
        ...


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The logs that are requested."""

    nodes: frozenset[int] | None = None
    """Ranks of the nodes; None for all."""
    incarnation: int | None = None
    """None for all incarnations that this machine keeps, else the newest of each node."""

    def includes(self, rank: int, incarnation: int) -> bool:
        return (self.nodes is None or rank in self.nodes) and self.incarnation in (None, incarnation)


RoleLook = tuple[JobStatus, tuple[NodeView, ...]]
"""The status of one role of the job, and its nodes."""

Look = Callable[[], Awaitable[Sequence[RoleLook]]]
"""Looks at the requested roles; there is at least one."""

_Key = tuple[str, int, int]
"""Role, rank and incarnation of a node."""


async def look_at_roles(look_at: Callable[[str | None], Awaitable[RoleLook]], role: str | None) -> tuple[RoleLook, ...]:
    """Looks at one role, or at each, the leading one first."""
    first = await look_at(role)
    others = [other for other in first[0].roles if role is None and other != first[0].role]
    return (first, *await asyncio.gather(*map(look_at, others)))


async def read_logs(
    look: Look,
    ask: Ask,
    selection: Selection,
    *,
    follow: bool,
    tail: int | None,
    since: datetime | None,
    places: LogPlaces | None = None,
) -> AsyncGenerator[LogLine]:
    """Yields lines of the selected logs in the order of their times.

    Args:
        look: Is called first, and at intervals while the logs are followed.
        ask: Reads a piece of a log through its agent.
        selection: The logs to read.
        follow: Continue until the job ends.
        tail: Begin with this many of each node's last lines.
        since: Begin with what was printed then.
        places: Where logs are looked for, besides asking agents; by default wherever the job names.

    Raises:
        LogsUnavailable: if a log cannot be read; after all others.
    """
    find = _Finder(look, ask, selection, places or LogPlaces())
    status, found, problems = await find()
    logs = dict(found)
    async for line in _old_lines(logs, problems, tail=tail, since=since):
        yield line
    loop = asyncio.get_running_loop()
    ask_at = loop.time() + NODES_INTERVAL.total_seconds()
    open_ = follow and status.phase not in FINAL_PHASES
    while open_:
        await asyncio.sleep(READ_INTERVAL.total_seconds())
        if loop.time() >= ask_at:
            ask_at = loop.time() + NODES_INTERVAL.total_seconds()
            with suppress(ControlPlaneUnreachable, LogsUnavailable):
                status, found, _ = await find()
                open_ = status.phase not in FINAL_PHASES
                for key, log in found.items():
                    known = logs.setdefault(key, log)
                    if isinstance(known, AgentLog) and isinstance(log, AgentLog):
                        known.end = log.end
        new = [_lines_of(key, log.new_lines(), []) for key, log in logs.items()]
        async for line in merge_by_time(new):
            yield line
    for key, log in logs.items():
        for printed in log.last_line():
            yield _line(key, printed)
    if not follow:
        _raise(problems)


async def read_copies(
    logs: Mapping[_Key, NodeLog], *, tail: int | None, since: datetime | None
) -> AsyncGenerator[LogLine]:
    """Yields the lines of logs that do not grow.

    Raises:
        LogsUnavailable: if one cannot be read; after all others.
    """
    problems: list[LogsUnavailable] = []
    async for line in _old_lines(logs, problems, tail=tail, since=since):
        yield line
    _raise(problems)


async def _old_lines(
    logs: Mapping[_Key, NodeLog], problems: list[LogsUnavailable], *, tail: int | None, since: datetime | None
) -> AsyncGenerator[LogLine]:
    old = [_lines_of(key, log.old_lines(tail, since), problems) for key, log in logs.items()]
    async for line in merge_by_time(old):
        yield line


def _raise(problems: Sequence[LogsUnavailable]) -> None:
    if problems:
        # After all readable logs: one silent agent must not hide the others.
        raise LogsUnavailable("; ".join(map(str, problems)), remedy=problems[0].remedy)


def _line(key: _Key, printed: PrintedLine) -> LogLine:
    role, rank, incarnation = key
    return LogLine(role=role, node=rank, incarnation=incarnation, text=printed.text, time=printed.time)


async def _lines_of(
    key: _Key, lines: AsyncGenerator[PrintedLine], problems: list[LogsUnavailable]
) -> AsyncGenerator[LogLine]:
    try:
        async for printed in lines:
            yield _line(key, printed)
    except LogsUnavailable as error:
        problems.append(error)


class _Finder:
    """Finds the logs of one job."""

    def __init__(self, look: Look, ask: Ask, selection: Selection, places: LogPlaces) -> None:
        self._look = look
        self._ask = ask
        self._selection = selection
        self._places = places

    async def __call__(self) -> tuple[JobStatus, dict[_Key, NodeLog], list[LogsUnavailable]]:
        """Finds the job, its requested logs in the order of their roles and nodes, and the reasons why requested logs
        are not among them.

        Raises:
            LogsUnavailable: if none of them can be read here.
            PerdureError: if there is no such node.
        """
        looks = await self._look()
        found: dict[_Key, NodeLog] = {}
        missing: list[str] = []
        for status, views in looks:
            self._find_in_role(status, views, found, missing)
        status = looks[0][0]
        if not found:
            self._refuse_unknown(status.name, {view.rank for _, views in looks for view in views})
            if missing or status.phase in FINAL_PHASES:
                raise _unavailable(status, missing)
        named = self._selection.nodes is not None
        return status, found, [_unavailable(status, missing)] if missing and named else []

    def _find_in_role(
        self, status: JobStatus, views: Sequence[NodeView], found: dict[_Key, NodeLog], missing: list[str]
    ) -> None:
        """Adds the logs of one role to those that were found, and the reasons why others were not."""
        logs: dict[tuple[int, int], NodeLog] = {
            key: FileLog(path) for key, path in self._logs_here(status).items() if self._selection.includes(*key)
        }
        for view in views:
            key = (view.rank, self._selection.incarnation or view.incarnation)
            if self._selection.includes(*key) and key not in logs:
                log = self._log_of(status, view, key[1])
                if isinstance(log, str):
                    missing.append(log)
                elif log is not None:
                    logs[key] = log
        found.update({(status.role, *key): logs[key] for key in sorted(logs)})

    def _log_of(self, status: JobStatus, view: NodeView, incarnation: int) -> NodeLog | str | None:
        """Returns an incarnation's log, or why it cannot be read; None if nothing can have been printed yet."""
        newest = incarnation == view.incarnation
        if newest and self._places.reads_files and view.log_path and Path(view.log_path).parent.is_dir():
            return FileLog(Path(view.log_path))
        node = NodeId(uid=status.uid, role=status.role, rank=view.rank, incarnation=incarnation)
        if newest and view.phase in _SPEAKING and status.phase not in FINAL_PHASES:
            log = AgentLog(self._ask, node)
            log.end = view.log_end
            return log
        if status.logs_url and (incarnation < view.incarnation or view.phase in _GONE or status.phase in FINAL_PHASES):
            copies = self._places.copies_of(status)
            if copies is None:
                return f"the log of node {view.rank}.{incarnation} was copied to {status.logs_url}, {_NOT_READ}"
            return CopiedLog(
                f"{copies.url}/{status.role}-{view.rank}/{incarnation}",
                rank=view.rank,
                incarnation=incarnation,
                in_archive=status.logs_url == archived_logs(status.archive),
                within=copies.within,
            )
        if incarnation > view.incarnation:
            return f"node {view.rank} has no incarnation {incarnation}, its newest is {view.incarnation}"
        if newest and view.phase not in _GONE and status.phase not in FINAL_PHASES:
            return None
        return f"the log of node {view.rank}.{incarnation} was deleted with it"

    def _logs_here(self, status: JobStatus) -> dict[tuple[int, int], Path]:
        """The logs of nodes of this machine, which are kept after the nodes are gone; by rank and incarnation."""
        nodes = nodes_here(status.backend) if self._places.reads_files else None
        if nodes is None:
            return {}
        folders = nodes.of_job(status.uid, status.role)
        return {(record.rank, record.incarnation): folder.log for folder in folders if (record := folder.record)}

    def _refuse_unknown(self, job: str, known: Collection[int]) -> None:
        for rank in sorted(self._selection.nodes or ()):
            if known and rank not in known:
                text = ", ".join(str(one) for one in sorted(known))
                raise PerdureError(f"{job} has no node {rank}; its nodes are: {text}")


def _unavailable(status: JobStatus, missing: list[str]) -> LogsUnavailable:
    if status.backend == Backend.LOCAL:
        return LogsUnavailable(
            f"no log of {status.name} is on this machine, {socket.gethostname()}",
            remedy="They are kept where the nodes ran, for the state folder's retention after the job's end. "
            "outputs.logs in the job's specification has every log copied to a place of your choice.",
        )
    return LogsUnavailable(
        "; ".join(missing[:3]) or f"no log of {status.name} can be read: its nodes are gone",
        remedy="Agents answer for nodes that run; outputs.logs in the job's specification has every log copied to a "
        "place of your choice.",
    )
