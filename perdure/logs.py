"""Reads what nodes printed, where their backend keeps it as files that this machine sees."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from activities.nodes.joined import JoinedBackend
from activities.nodes.joined.machine import joined_nodes
from activities.nodes.local import LocalBackend, state_folder
from activities.nodes.local.folders import NodeFolders
from perdure.errors import ControlPlaneUnreachable, LogsUnavailable, PerdureError
from perdure.views import FINAL_PHASES, View
from workflows.messages import JobStatus, NodeView

if TYPE_CHECKING:
    from perdure.client import Client

READ_INTERVAL = timedelta(milliseconds=200)
"""Between two looks at a log that is followed."""

NODES_INTERVAL = timedelta(seconds=2)
"""Between two questions for new nodes while following."""


class LogLine(View):
    """One line that a node printed."""

    node: int
    incarnation: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """The log of one incarnation of a node."""

    node: int
    incarnation: int
    path: Path


class _Tailer:
    """Reads one log from where it stopped, through rotations."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._path = source.path
        self._file: BinaryIO | None = None
        self._rest = b""

    def old_lines(self, tail: int | None) -> Iterable[LogLine]:
        """What is there already, rotated files included."""
        lines: deque[LogLine] = deque(maxlen=tail)
        for path in self._rotated():
            with suppress(FileNotFoundError):
                lines.extend(self._line(text) for text in path.read_bytes().splitlines())
        lines.extend(self.new_lines())
        return lines

    def new_lines(self) -> Generator[LogLine]:
        """What was added since the last call."""
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return
            while chunk := self._file.read(65536):
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                yield from (self._line(text) for text in whole)
            if not self._was_rotated(self._file):
                return
            self._file.close()
            self._file = None

    def last_line(self) -> Generator[LogLine]:
        """What stands behind the last line break."""
        if self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _was_rotated(self, file: BinaryIO) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _rotated(self) -> list[Path]:
        numbered = [
            (int(path.suffix[1:]), path)
            for path in self._path.parent.glob(f"{self._path.name}.*")
            if path.suffix[1:].isdecimal()
        ]
        return [path for _, path in sorted(numbered, reverse=True)]

    def _line(self, text: bytes) -> LogLine:
        return LogLine(
            node=self._source.node,
            incarnation=self._source.incarnation,
            text=text.decode(errors="replace").rstrip("\r"),
        )


async def read_logs(
    client: Client, name: str, *, namespace: str | None, node: int | None, follow: bool, tail: int | None
) -> AsyncGenerator[LogLine]:
    """See `Client.logs`."""
    tailers: dict[tuple[int, int], _Tailer] = {}
    try:
        for source in await _sources(client, name, namespace, node):
            tailer = tailers[source.node, source.incarnation] = _Tailer(source)
            for line in tailer.old_lines(tail):
                yield line
        loop = asyncio.get_running_loop()
        ask_at = loop.time()
        open_ = follow
        while open_:
            if loop.time() >= ask_at:
                ask_at = loop.time() + NODES_INTERVAL.total_seconds()
                with suppress(ControlPlaneUnreachable, LogsUnavailable):
                    open_ = (await client.status(name, namespace=namespace)).phase not in FINAL_PHASES
                    for source in await _sources(client, name, namespace, node):
                        tailers.setdefault((source.node, source.incarnation), _Tailer(source))
            for tailer in tailers.values():
                for line in tailer.new_lines():
                    yield line
            await asyncio.sleep(READ_INTERVAL.total_seconds())
        for tailer in tailers.values():
            for line in tailer.last_line():
                yield line
    finally:
        for tailer in tailers.values():
            tailer.close()


async def _sources(client: Client, name: str, namespace: str | None, node: int | None) -> list[Source]:
    """The logs that are asked for, older incarnations and nodes that are gone included where they are kept.

    Raises:
        LogsUnavailable: if one of them is not where this machine can read it.
    """
    status = await client.status(name, namespace=namespace)
    found = {(source.node, source.incarnation): source for source in _kept_here(status)}
    for view in await client.nodes(name, namespace=namespace):
        if view.log_path and (view.rank, view.incarnation) not in found:
            path = Path(view.log_path)
            if not path.parent.is_dir() and (node is None or node == view.rank):
                raise _elsewhere(view)
            found[view.rank, view.incarnation] = Source(node=view.rank, incarnation=view.incarnation, path=path)
    if not found and status.phase in FINAL_PHASES:
        raise LogsUnavailable(
            f"no log of {name} is on this machine, {socket.gethostname()}",
            remedy="They are kept where the nodes ran, for the state folder's retention after the job's end. "
            "outputs.logs in the job's specification has every log copied to a place of your choice.",
        )
    if node is not None and found and all(rank != node for rank, _ in found):
        known = ", ".join(str(rank) for rank in sorted({rank for rank, _ in found}))
        raise PerdureError(f"{name} has no node {node}; its nodes are: {known}")
    return [source for (rank, _), source in sorted(found.items()) if node in (None, rank)]


def _kept_here(status: JobStatus) -> list[Source]:
    """The logs of nodes of this machine, which stay when the nodes have gone."""
    if status.backend == LocalBackend.name:
        nodes = NodeFolders(state_folder())
    elif status.backend == JoinedBackend.name:
        nodes = joined_nodes()
    else:
        return []
    folders = nodes.of_job(status.uid, status.role)
    return [
        Source(node=record.rank, incarnation=record.incarnation, path=folder.log)
        for folder in folders
        if (record := folder.record)
    ]


def _elsewhere(view: NodeView) -> LogsUnavailable:
    here = socket.gethostname()
    where = f"on {view.host}, and this is {here}" if view.host not in ("", here) else "no longer there"
    return LogsUnavailable(
        f"the log of node {view.rank} is {where}: {view.log_path}",
        remedy="outputs.logs in the job's specification has every log copied to a place of your choice.",
    )
