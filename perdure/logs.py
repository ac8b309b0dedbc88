"""Reads what nodes printed, where their backend keeps it as files that this machine sees."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from perdure.errors import ControlPlaneUnreachable, LogsUnavailable, PerdureError
from perdure.views import FINAL_PHASES, View
from workflows.messages import NodeView

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


class _Tailer:
    """Reads one log from where it stopped, through rotations."""

    def __init__(self, view: NodeView) -> None:
        self.view = view
        self._path = Path(view.log_path)
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
            node=self.view.rank,
            incarnation=self.view.incarnation,
            text=text.decode(errors="replace").rstrip("\r"),
        )


async def read_logs(
    client: Client, name: str, *, namespace: str | None, node: int | None, follow: bool, tail: int | None
) -> AsyncGenerator[LogLine]:
    """See `Client.logs`."""
    tailers: dict[tuple[int, int], _Tailer] = {}
    try:
        for view in await _readable(client, name, namespace, node):
            tailer = tailers[view.rank, view.incarnation] = _Tailer(view)
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
                    for view in await _readable(client, name, namespace, node):
                        tailers.setdefault((view.rank, view.incarnation), _Tailer(view))
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


async def _readable(client: Client, name: str, namespace: str | None, node: int | None) -> list[NodeView]:
    """The nodes whose logs are asked for.

    Raises:
        LogsUnavailable: if one of them is not where this machine can read it.
    """
    views = await client.nodes(name, namespace=namespace)
    if node is not None:
        known = ", ".join(str(view.rank) for view in views) or "none"
        views = tuple(view for view in views if view.rank == node)
        if not views:
            raise PerdureError(f"{name} has no node {node}; its nodes are: {known}")
    for view in views:
        if view.log_path and not Path(view.log_path).parent.is_dir():
            here = socket.gethostname()
            where = f"on {view.host}, and this is {here}" if view.host not in ("", here) else "no longer there"
            raise LogsUnavailable(
                f"the log of node {view.rank} is {where}: {view.log_path}",
                remedy="outputs.logs in the job's specification has every log copied to a place of your choice.",
            )
    return [view for view in views if view.log_path]
