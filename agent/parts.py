"""Copies growing files to object storage. Object stores cannot append, so a file is copied in parts; the newest part is
written again as it grows. Errors are logged and retried, and never affect training.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from perdure.agent.files import RotatedFile
from perdure.agent.local_files import open_storage
from perdure.contract.logs import COMPLETE

logger = logging.getLogger(__name__)

_INTERVAL = 30.0
"""Seconds between copies; each writes at most one part of a file again."""

_File = TypeVar("_File", bound=RotatedFile)


class Position(BaseModel):
    """The position up to which a file was copied."""

    inode: int = 0
    start: int = 0
    """The offset of the current part in the file."""
    part: int = 1
    shipped: int = 0
    """The number of copied bytes of the current part."""
    head: int = 0
    """As in `LogPosition`."""


class Storage:
    """A folder of a storage, which is opened when it is first written to."""

    def __init__(self, url: str, folder: str, *, contained: bool) -> None:
        """Opens nothing yet.

        Args:
            url: A folder, as fsspec takes it.
            folder: A folder in it.
            contained: As for `open_storage`.
        """
        self.url = url
        self._folder = folder
        self._contained = contained
        self._files: Any = None
        self._root = ""
        self._made = set[str]()

    @property
    def is_open(self) -> bool:
        """Whether something was written."""
        return self._files is not None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file; the storage raises errors of its own."""
        files = self._open()
        path = f"{self._root}/{name}"
        parent = path.rpartition("/")[0]
        if parent not in self._made:
            files.makedirs(parent, exist_ok=True)
            self._made.add(parent)
        files.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """Removes a file; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._open().rm_file(f"{self._root}/{name}")

    def _open(self) -> Any:
        if self._files is None:
            files, root = open_storage(self.url, contained=self._contained)
            self._files, self._root = files, f"{root}/{self._folder}"
        return self._files


class PartsCopier(Generic[_File]):
    """Copies one file, through its rotations, into files `part-NNNNNN.…` of a storage."""

    def __init__(
        self,
        storage: Storage,
        *,
        suffix: str,
        position: Position,
        keep: Callable[[Position], None],
        part_max: int,
        file_max: int,
        kept: tuple[int, int] | None = None,
        folder: str = "",
        beside: Mapping[str, Callable[[_File, int, bytes], bytes]] | None = None,
    ) -> None:
        """Begins where an earlier agent ended.

        Args:
            storage: Where the parts are written.
            suffix: That of the parts, such as `log`.
            position: How far the file is copied.
            keep: Keeps how far it is.
            part_max: Bytes of a part, and of the memory that copying uses.
            file_max: Bytes of one file, at most.
            kept: How many of the first and of the last parts are kept; None for all.
            folder: The folder of the parts in the storage.
            beside: Makes what is written with a part, by its suffix, from the file, the part's offset and the part;
                nothing where that is empty.
        """
        self._storage = storage
        self._suffix = suffix
        self._position = position
        self._keep_position = keep
        self._part_max = part_max
        self._file_max = file_max
        self._kept = kept
        self._folder = f"{folder}/" if folder else ""
        self._beside = beside or {}

    def copy(self, files: Sequence[_File]) -> None:
        """Copies what is new.

        Args:
            files: The files to which it was rotated, oldest first.
        """
        if not files:
            return
        position = self._position
        copied = position.start + position.shipped
        known = [file.holds(inode=position.inode, offset=copied, head=position.head) for file in files]
        index = known.index(True) if any(known) else 0
        if not any(known):
            # The current file has been rotated away: the oldest remaining one comes next.
            self._next_file(files[index])
        while True:
            self._copy_file(files[index])
            if index + 1 == len(files):
                return
            index += 1
            self._next_file(files[index])

    def _copy_file(self, file: _File) -> None:
        with file.open() as source:
            while True:
                position = self._position
                source.seek(position.start)
                content = source.read(min(self._part_max, max(self._file_max - position.start, 0)))
                if len(content) > position.shipped:
                    self._write_part(position, file, content)
                    head = file.head(position.start + len(content))
                    self._keep(position.model_copy(update={"shipped": len(content), "head": head}))
                if len(content) < self._part_max:
                    return
                self._next_part(file, start=position.start + len(content), part=position.part + 1)

    def _write_part(self, position: Position, file: _File, content: bytes) -> None:
        for suffix, make in self._beside.items():
            if other := make(file, position.start, content):
                self._storage.write(self._name(position.part, suffix), other)
        self._storage.write(self._name(position.part, self._suffix), content)

    def _name(self, part: int, suffix: str) -> str:
        return f"{self._folder}part-{part:06}.{suffix}"

    def _next_file(self, file: _File) -> None:
        position = self._position
        self._next_part(file, start=0, part=position.part + (position.shipped > 0))

    def _next_part(self, file: _File, *, start: int, part: int) -> None:
        if self._kept is not None and part > self._position.part:
            first, last = self._kept
            if part - last > first:
                for suffix in (self._suffix, *self._beside):
                    self._storage.remove(self._name(part - last, suffix))
        self._keep(Position(inode=file.inode, start=start, part=part, head=file.head(start)))

    def _keep(self, position: Position) -> None:
        self._position = position
        self._keep_position(position)


class Shipper(ABC):
    """Copies files of a node now and then, and as they ended."""

    def __init__(self, storage: Storage, *, what: str) -> None:
        self._storage = storage
        self._what = what
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
                    logger.warning("%s cannot be copied to %s, retrying: %s", self._what, self._storage.url, error)
                self._failing = True
            else:
                if self._failing:
                    logger.info("%s is copied to %s again", self._what, self._storage.url)
                self._failing = False

    async def finish(self) -> None:
        """Copies the end, and that it is the end."""
        await self.ship()
        if not self._failing and self._storage.is_open:
            await asyncio.to_thread(self._storage.write, COMPLETE, b"")

    @abstractmethod
    def _ship(self) -> None:
        """Copies new output; the storage raises errors of its own."""
