"""Copies the node's log to object storage if the job requests it (`outputs.logs`).

Object stores cannot append, so the log is copied in parts; the newest part is written again as it grows. Errors are
logged and retried, and never affect training.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from perdure.agent.files import KeptFile, LogFile, log_files
from perdure.agent.local_files import open_storage
from perdure.contract import NodeCredentials
from perdure.spec.timing import Timing
from perdure_training.node_api.layout import SHIPPED_LOGS

logger = logging.getLogger(__name__)

_PART_MAX = 4 * 1024 * 1024
"""Bytes of a part, and of the memory that copying uses."""
_INTERVAL = 30.0
"""Seconds between copies; each writes at most one part again."""

FIRST_PARTS, LAST_PARTS = 4, 60
"""Parts that an archive keeps of a node's log: 16 MiB of its beginning, where it starts, and the last 240 MiB."""

COMPLETE = "complete"
"""The file beside the parts that says that nothing follows: the agent has copied the log as it ended."""


class _Position(BaseModel):
    """The position up to which the log was copied."""

    inode: int = 0
    start: int = 0
    """The offset of the current part in the file."""
    part: int = 1
    shipped: int = 0
    """The number of copied bytes of the current part."""


class LogShipper:
    """Copies one node's log into `<url>/<role>-<rank>/<incarnation>/part-NNNNNN.log`."""

    def __init__(
        self,
        run_dir: Path,
        url: str,
        node: NodeCredentials,
        *,
        private_dir: Path | None = None,
        part_max: int = _PART_MAX,
        file_max: int = Timing().processes.log_max_bytes,
        keep_all: bool = True,
    ) -> None:
        """Begins where an earlier agent ended.

        Args:
            run_dir: The node's run directory.
            url: The folder of all nodes' logs, as fsspec takes it.
            node: The node.
            private_dir: Holds how far the log is copied; by default the run directory.
            part_max: Bytes of a part.
            file_max: Bytes of one file of the log, at most. The launcher writes no larger ones; training code could put
                a file without end in their place.
            keep_all: Keep all parts, and not only the first and the last ones.
        """
        self._run_dir = run_dir
        # A folder of its own is what the agent has where it is another user.
        self._contained = private_dir not in (None, run_dir)
        self._url = url
        self._folder = f"{node.role}-{node.rank}/{node.incarnation}"
        self._part_max = part_max
        self._file_max = file_max
        self._keep_all = keep_all
        self._file = KeptFile((private_dir or run_dir) / SHIPPED_LOGS)
        self._position = self._read_position()
        self._files: Any = None
        self._root = ""
        self._failing = False
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Copies new output until cancelled."""
        while True:
            await self.ship()
            await asyncio.sleep(_INTERVAL)

    async def ship(self) -> None:
        """Copies new output; logs errors in the agent's log."""
        async with self._busy:
            try:
                await asyncio.to_thread(self._ship)
            except Exception as error:
                if not self._failing:
                    logger.warning("the log cannot be copied to %s, retrying: %s", self._url, error)
                self._failing = True
            else:
                if self._failing:
                    logger.info("the log is copied to %s again", self._url)
                self._failing = False

    async def finish(self) -> None:
        """Copies the end of the log, and that it is the end."""
        await self.ship()
        if not self._failing and self._files is not None:
            await asyncio.to_thread(self._files.pipe_file, f"{self._root}/{COMPLETE}", b"")

    def _ship(self) -> None:
        files = log_files(self._run_dir)
        if not files:
            return
        # If the current file has been rotated away, the oldest remaining one comes next.
        index = next((i for i, file in enumerate(files) if file.inode == self._position.inode), None)
        if index is None or files[index].size < self._position.start:
            index = index or 0
            self._next_file(files[index])
        while True:
            self._ship_file(files[index])
            if index + 1 == len(files):
                return
            index += 1
            self._next_file(files[index])

    def _ship_file(self, file: LogFile) -> None:
        with file.open() as log:
            while True:
                position = self._position
                log.seek(position.start)
                content = log.read(min(self._part_max, max(self._file_max - position.start, 0)))
                if len(content) > position.shipped:
                    self._upload(position.part, content)
                    self._keep(position.model_copy(update={"shipped": len(content)}))
                if len(content) < self._part_max:
                    return
                self._next_part(inode=position.inode, start=position.start + len(content), part=position.part + 1)

    def _next_file(self, file: LogFile) -> None:
        position = self._position
        self._next_part(inode=file.inode, start=0, part=position.part + (position.shipped > 0))

    def _next_part(self, *, inode: int, start: int, part: int) -> None:
        left_out = part - LAST_PARTS
        if not self._keep_all and left_out > FIRST_PARTS and part > self._position.part:
            with suppress(FileNotFoundError):
                self._open().rm_file(f"{self._root}/part-{left_out:06}.log")
        self._keep(_Position(inode=inode, start=start, part=part))

    def _upload(self, part: int, content: bytes) -> None:
        files = self._open()
        files.pipe_file(f"{self._root}/part-{part:06}.log", content)

    def _open(self) -> Any:
        if self._files is None:
            files, root = open_storage(self._url, contained=self._contained)
            self._root = f"{root}/{self._folder}"
            files.makedirs(self._root, exist_ok=True)
            self._files = files
        return self._files

    def _keep(self, position: _Position) -> None:
        self._position = position
        self._file.write(position.model_dump_json().encode())

    def _read_position(self) -> _Position:
        try:
            return _Position.model_validate_json(self._file.read() or b"{}")
        except ValidationError:
            return _Position()
