"""Reads files of committed checkpoints for ranks: only what agents stored, as far as its record tells.

A rank chooses what it asks for, and a job chooses its storage, so a path there may lead to a file that only the agent
can read, such as one that is mounted below the storage. A file of the size of such secrets is handed out only if it has
the checksum of its record. Larger ones have only their size compared: ranks verify them together before they load any.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

from perdure.agent.checkpoint.connections import Refused
from perdure.agent.checkpoint.records import FileRecord, files_of
from perdure.agent.checkpoint.storage import LARGEST_RECORD, Storage
from perdure.contract.checkpoints import CheckpointRef

_AT_ONCE = 1 << 22


class CheckedReads:
    """The reads of one node's ranks. Any thread may use it.

    Invariant: of a file of at most `LARGEST_RECORD` bytes no byte is returned before all of them were compared with its
    record, and what is returned are the bytes that were compared.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._records: tuple[CheckpointRef, dict[str, FileRecord]] | None = None
        """The checkpoint that was read last. A committed one does not change."""
        self._checked: tuple[str, bytes] | None = None
        """The path and content of the small file that was read last: ranks read one tensor after another."""

    def forget(self) -> None:
        """Frees what is remembered: the ranks have their state."""
        with self._lock:
            self._records = self._checked = None

    def read(self, saved: CheckpointRef, name: str, *, offset: int, length: int | None) -> tuple[int, Iterator[bytes]]:
        """Returns the number of bytes of a part of a file, and these; to the file's end if `length` is None.

        Raises:
            Refused: if the folder is no committed checkpoint, or the file is not as it was stored.
        """
        record, path = self._record(saved, name), f"{saved.folder}/{name}"
        left = max(record.size - offset, 0)
        size = left if length is None else min(left, max(length, 0))
        if record.size <= LARGEST_RECORD:
            content = memoryview(self._whole(path, record))[offset : offset + size]
            return size, (bytes(content[at : at + _AT_ONCE]) for at in range(0, size, _AT_ONCE))
        if self._storage.size(path) != record.size:
            raise Refused(f"{path} has not the size that was stored")
        return size, self._storage.pieces(path, offset=offset, length=size, piece=_AT_ONCE)

    def _record(self, saved: CheckpointRef, name: str) -> FileRecord:
        with self._lock:
            known = self._records
        if known is None or known[0] != saved:
            files = files_of(self._storage, saved)
            if isinstance(files, str):
                raise Refused(f"{saved.folder} is no committed checkpoint: {files}")
            known = saved, files
            with self._lock:
                self._records = known
        if name not in known[1]:
            raise Refused(f"{saved.folder} has no file {name}")
        return known[1][name]

    def _whole(self, path: str, record: FileRecord) -> bytes:
        with self._lock:
            checked = self._checked
        if checked is not None and checked[0] == path:
            return checked[1]
        content = self._storage.read(path)
        if (len(content), zlib.crc32(content)) != (record.size, record.checksum):
            raise Refused(f"{path} is not what was stored")
        with self._lock:
            self._checked = path, content
        return content
