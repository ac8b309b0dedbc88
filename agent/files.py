"""Small files that survive the agent, written so that the agent survives a full disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from perdure.base.files import write_private_file
from perdure.contract.logs import LogPosition
from perdure_training.events.files import KEPT
from perdure_training.node_api.layout import EVENTS, LOG_TIMES, LOGS, OUTPUT_LOG, ROTATED_LOGS
from perdure_training.node_api.untrusted_files import NotARegularFile, folder_beneath, open_beneath

logger = logging.getLogger(__name__)

_EVENT_FILE: Final = re.compile(r"\w[\w.-]{0,99}\.jsonl", re.ASCII)
_MOST_EVENT_FILES: Final = 64
"""Files of events of a node: those of its ranks, and three of others."""
_HEAD = 256
"""Bytes of a file's beginning by which it is known."""
_MOST_NAMES: Final = 1000


@dataclass(frozen=True)
class RotatedFile:
    """One of the files that a growing file is rotated to, known by its inode: its name changes."""

    folder: Path
    """A folder that training code cannot replace."""
    path: str
    """The file's path from there."""
    inode: int
    size: int

    def open(self) -> BinaryIO:
        """Opens the file.

        Raises:
            OSError: if something else has taken its place, or it cannot be read.
        """
        file = open_beneath(self.folder, self.path)
        if os.fstat(file.fileno()).st_ino != self.inode:
            file.close()
            raise FileNotFoundError(errno.ENOENT, "it was rotated", self.path)
        return file

    def head(self, end: int) -> int:
        """Returns a checksum of the file's beginning, which tells it from a deleted file whose inode number it has.

        Args:
            end: The offset of a position. What follows may not have been there yet.

        Raises:
            OSError: if it cannot be read.
        """
        with self.open() as file:
            return zlib.crc32(file.read(min(end, _HEAD)))

    def holds(self, *, inode: int, offset: int, head: int) -> bool:
        """Returns whether a position is one in this file."""
        if self.inode != inode or self.size < offset:
            return False
        try:
            return not head or self.head(offset) == head
        except OSError:
            return False


class LogFile(RotatedFile):
    """One file of a node's log."""

    def open_times(self) -> BinaryIO:
        """Opens the index of the times at which its lines were printed.

        Raises:
            OSError: if there is none, or it cannot be read.
        """
        return open_beneath(self.folder, self.path.replace(OUTPUT_LOG, LOG_TIMES))


_File = TypeVar("_File", bound=RotatedFile)


def log_files(run_dir: Path) -> list[LogFile]:
    """Returns the log's files, oldest first."""
    return _rotated(LogFile, run_dir, f"{LOGS}/{OUTPUT_LOG}", ROTATED_LOGS)


def event_files(folder: Path) -> dict[str, list[RotatedFile]]:
    """Returns the files of events in a run directory, oldest first, by the names of the newest."""
    try:
        with folder_beneath(folder, [EVENTS]) as within, os.scandir(within) as found:
            # Training code can put any number of files there.
            names = sorted(entry.name for entry in islice(found, _MOST_NAMES) if _EVENT_FILE.fullmatch(entry.name))
    except OSError:
        return {}
    files = {name: _rotated(RotatedFile, folder, f"{EVENTS}/{name}", KEPT) for name in names[:_MOST_EVENT_FILES]}
    return {name: rotated for name, rotated in files.items() if rotated}


def _rotated(kind: type[_File], folder: Path, path: str, older: int) -> list[_File]:
    files: list[_File] = []
    for name in (*(f"{path}.{number}" for number in range(older, 0, -1)), path):
        with contextlib.suppress(FileNotFoundError, NotARegularFile), open_beneath(folder, name) as file:
            files.append(_known(kind, folder, name, file))
    return files


def _known(kind: type[_File], folder: Path, path: str, file: BinaryIO) -> _File:
    found = os.fstat(file.fileno())
    return kind(folder, path, found.st_ino, found.st_size)


class KeptFile:
    """A file that always has either its previous or its new content, never a part of it.

    If the disk rejects a write, the agent continues from memory, and `stale` is true until a later write succeeds. Only
    an agent that is restarted in between loses the rejected content.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stale = False

    def read(self) -> bytes | None:
        """Returns the content; None if there is none or it cannot be read."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read, so it counts as missing: %s", self._path, error)
            return None

    def write(self, content: bytes) -> bool:
        """Replaces the content; returns False if the disk rejects the write."""
        try:
            write_private_file(self._path, content)
        except OSError as error:
            if not self.stale:
                logger.error("%s cannot be written; continuing from memory: %s", self._path, error)
            self.stale = True
            return False
        if self.stale:
            logger.info("%s can be written again", self._path)
        self.stale = False
        return True

    def set_aside(self, content: bytes) -> Path:
        """Saves unusable content of the file beside it, for users. Only the latest is kept."""
        path = self._path.with_name(f"{self._path.name}.rejected")
        KeptFile(path).write(content)
        return path


def log_tail(run_dir: Path, limit: int, *, since: LogPosition | None = None) -> str:
    """Returns the end of the log's newest file, at most `limit` bytes; empty if there is none.

    Args:
        run_dir: The node's run directory.
        limit: The most bytes.
        since: Leave out what was printed before this position.
    """
    path = f"{LOGS}/{OUTPUT_LOG}"
    try:
        with open_beneath(run_dir, path) as file:
            newest = _known(LogFile, run_dir, path, file)
            begin = max(0, newest.size - limit)
            if since is not None and newest.holds(inode=since.file, offset=since.offset, head=since.head):
                begin = max(begin, since.offset)
            file.seek(begin)
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""
