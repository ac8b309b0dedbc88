"""The job's storage for checkpoints: a folder of any kind that fsspec knows.

All methods block, and raise the errors of the file system: `OSError`, or those of its library.
"""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from perdure.agent.checkpoint.names import METADATA, UNCOMMITTED, record_name
from perdure.agent.local_files import LocalFiles, open_storage
from perdure.contract.checkpoints import CheckpointRef

LARGEST_RECORD = 1 << 24
"""Bytes of a small file: a hundred times those of a save with a thousand files."""

_ABSENT = (errno.ENOENT, errno.ENOTDIR)
"""What says that there is no file. Any other error says nothing about it."""


class Storage:
    """Files below one URL. Any thread may use it."""

    def __init__(self, url: str, *, contained: bool = False) -> None:
        """Creates the object; it contacts the storage when it is used.

        Args:
            url: A folder, as fsspec takes it.
            contained: As in `open_storage`.
        """
        self._contained = contained
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Writes a file, and returns its size and its CRC-32 when it is durable."""
        files, root = self._open()
        target = f"{root}/{path}"
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        size = checksum = 0
        with files.open(target, "wb") as file:
            for piece in pieces:
                file.write(piece)
                size += len(piece)
                checksum = zlib.crc32(piece, checksum)
            _flush_to_disk(file)
        if isinstance(files, LocalFiles):
            files.persist(target)
        return size, checksum

    def read(self, path: str) -> bytes:
        """Reads a small file.

        Raises:
            ValueError: if it is large.
        """
        files, root = self._open()
        with files.open(f"{root}/{path}", "rb") as file:
            content = file.read(LARGEST_RECORD + 1)
        if len(content) > LARGEST_RECORD:
            raise ValueError(f"{path} has more than {LARGEST_RECORD:,} bytes")
        return content

    def pieces(self, path: str, *, offset: int, length: int, piece: int) -> Iterator[bytes]:
        """Reads a part of a file in pieces of so many bytes; ends early if the file does."""
        files, root = self._open()
        with files.open(f"{root}/{path}", "rb") as file:
            file.seek(offset)
            while length > 0 and (content := file.read(min(piece, length))):
                length -= len(content)
                yield content

    def size(self, path: str) -> int:
        """The size of a file."""
        files, root = self._open()
        return int(files.size(f"{root}/{path}"))

    def checksum(self, path: str, *, piece: int) -> tuple[int, int]:
        """Returns the size and the CRC-32 of a file, read in pieces of so many bytes."""
        files, root = self._open()
        size = checksum = 0
        with files.open(f"{root}/{path}", "rb") as file:
            while content := file.read(piece):
                size += len(content)
                checksum = zlib.crc32(content, checksum)
        return size, checksum

    def names(self, folder: str) -> set[str]:
        """The names in a folder; empty if there is no such folder."""
        files, root = self._open()
        files.invalidate_cache()
        try:
            found = files.ls(f"{root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in found}

    def sizes(self, folder: str) -> dict[str, int | None]:
        """The names in a folder, each with its size where the storage lists it; empty if there is no such folder."""
        files, root = self._open()
        files.invalidate_cache()
        try:
            found = files.ls(f"{root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {str(one["name"]).rstrip("/").rpartition("/")[2]: one.get("size") for one in found}

    def saved(self, place: str) -> list[CheckpointRef]:
        """All folders of checkpoints in a place, committed or not, the latest first."""
        found: list[CheckpointRef] = []
        for name in self.names(place):
            try:
                found.append(CheckpointRef.parse(f"{place}/{name}" if place else name))
            except ValueError:
                continue
        return sorted(found, reverse=True)

    def is_committed(self, saved: CheckpointRef) -> bool:
        """Whether a folder is a checkpoint."""
        files, root = self._open()
        return _is_there(files, f"{root}/{saved.folder}/{METADATA}")

    def has_lost_metadata(self, saved: CheckpointRef) -> bool:
        """Whether a folder was complete, and has no metadata any more: rank 0's node stores its record after it."""
        names = self.names(saved.folder)
        return record_name(0) in names and names.isdisjoint((METADATA, UNCOMMITTED))

    def commit(self, saved: CheckpointRef) -> None:
        """Makes a folder a checkpoint. Does nothing if it is one."""
        files, root = self._open()
        folder = f"{root}/{saved.folder}"
        if not _is_there(files, f"{folder}/{UNCOMMITTED}") and _is_there(files, f"{folder}/{METADATA}"):
            return
        # A rename where there are folders; object stores show a copy once it is complete.
        files.mv(f"{folder}/{UNCOMMITTED}", f"{folder}/{METADATA}")

    def delete(self, saved: CheckpointRef) -> None:
        """Deletes a folder; from the first deleted file on it is not a checkpoint."""
        self.remove(saved.folder, first=METADATA)

    def remove(self, folder: str, *, first: str) -> None:
        """Deletes a folder, beginning with the file that makes it count."""
        files, root = self._open()
        path = f"{root}/{folder}"
        if _is_there(files, f"{path}/{first}"):
            files.rm_file(f"{path}/{first}")
        files.rm(path, recursive=True)

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            self._opened = open_storage(self.url, contained=self._contained)
        return self._opened


def _is_there(files: Any, path: str) -> bool:
    """Whether there is a file.

    Not fsspec's `exists`, which takes every error for a no: a checkpoint whose file cannot be looked at for a moment
    would not be one, and be deleted.

    Raises:
        Exception: of the file system, if that is not known.
    """
    try:
        files.info(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        # Some libraries have subclasses of their own.
        if error.errno not in _ABSENT:
            raise
        return False
    return True


def _flush_to_disk(file: Any) -> None:
    """Makes a local file durable; object stores do it when the file is closed."""
    try:
        descriptor = file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return
    file.flush()
    os.fsync(descriptor)
