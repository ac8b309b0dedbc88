"""The snapshots of one rank: files on tmpfs, each with one step's state.

Files of the process's own, not `multiprocessing.SharedMemory`, which is deleted with the process that created it.

A file begins with a header of one page, then has the state's bytes. The header is cleared before the state is written,
and written again when all bytes and their checksum are known. A process may be killed at any time: a file without a
valid header is free.

A process that copies a snapshot elsewhere pins it: a shared lock on the open file, which the kernel releases when that
process ends, however it ends. The lock can be passed on to another process together with the open file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from perdure_training.snapshots.private_map import PrivateMap

PAGE = 4096
"""Bytes of the header, and the alignment of what follows it."""
_MAGIC = b"PDSNAP03"
"""Also the version of the format: a file of another one is not a snapshot."""
_FRAME = struct.Struct("<8sII")
"""Magic number, length of the header's text, checksum of that text."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_CHECKED_AT_ONCE = 1 << 24
"""Bytes of a piece of the CRC-32: other threads run between two pieces."""
_NAME = re.compile(r"rank-(\d+)(?:-of-\d+)?\.(\d+)")
"""A replicated state's file has no size of the world in its name, nor has any of an earlier release."""


class NoRoom(OSError):
    """The memory folder takes no snapshot, of this size or, without free inodes, of any; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a snapshot is, and how its bytes can be verified."""

    step: int
    rank: int
    world_size: int
    generation: int
    """The generation of the world that wrote it."""
    replicated: bool
    """Every rank's state is the same, so that it may replace a missing one of another rank."""
    index_at: int
    """Offset of the description of the state within the bytes; tensors come before it."""
    size: int
    """Number of bytes."""
    checksum: int
    """Checksum of the bytes, which the ranks compute: `checkpoint.verification.fingerprint`."""
    restores: int = 0
    """The number of worlds that have loaded it."""
    reported: int | None = None
    """The newest step whose loss had been reported, where the script counts what it saves otherwise; None where it
    counts both the same."""

    def fields(self) -> dict[str, Any]:
        """The header as JSON. Earlier releases read it, unless the script counts what it saves otherwise."""
        fields = asdict(self)
        if self.reported is None:
            del fields["reported"]
        return fields


class SnapshotPin:
    """Keeps a snapshot from being overwritten until it is released, or until all processes that have the file open are
    gone."""

    def __init__(self, descriptor: int) -> None:
        """Takes over an open file that is locked."""
        self.descriptor = descriptor

    def release(self) -> None:
        """Frees the slot, also where another process still has the file open. Releasing it twice does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class Mapping(mmap.mmap):
    """The mapping of a snapshot's file."""

    before_end: Callable[[], None] | None = None
    """Called before the memory is unmapped, for a driver that knows its address."""

    def __del__(self) -> None:
        if self.before_end is not None:
            self.before_end()


class Slot:
    """One file, mapped into memory while it is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: Mapping | None = None

    def header(self) -> Header | None:
        """Reads the header; None if there is no complete snapshot."""
        try:
            with self.path.open("rb") as file:
                page, size = file.read(PAGE), os.fstat(file.fileno()).st_size
        except OSError:
            return None
        header = _decode(page)
        return header if header is not None and PAGE + header.size <= size else None

    def pin(self) -> SnapshotPin:
        """Keeps the snapshot as it is until the pin is released. The rank that writes the slot pins it, between writes.

        Raises:
            OSError: if there is no such file.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        # It waits for `is_pinned` at most, which holds the lock for microseconds.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return SnapshotPin(descriptor)

    @property
    def is_pinned(self) -> bool:
        """Whether a process copies the snapshot elsewhere, so that it must not be overwritten.

        Raises:
            OSError: if that is not known, as without a free descriptor.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def begin(self, size: int) -> memoryview:
        """Returns room for a snapshot of so many bytes. The slot has no snapshot until `finish`.

        Raises:
            NoRoom: if the memory folder is too small.
            OSError: if the file cannot be opened or mapped for another reason, which may pass.
        """
        with self._open() as descriptor:
            try:
                os.pwrite(descriptor, bytes(_FRAME.size), 0)
                self._allocate(descriptor, size)
                if self._map is None:
                    self._map = Mapping(descriptor, 0)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                os.ftruncate(descriptor, 0)
                raise self._no_room(size, error) from error
        return memoryview(self._map)[PAGE : PAGE + size]

    def reserve(self, size: int) -> None:
        """Takes the room that `begin` needs; a snapshot in the slot stays as it is.

        Raises:
            NoRoom: if the memory folder is too small.
            OSError: if the file cannot be opened for another reason, which may pass.
        """
        with self._open() as descriptor:
            try:
                self._allocate(descriptor, size)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                raise self._no_room(size, error) from error

    @contextlib.contextmanager
    def _open(self) -> Generator[int]:
        with _without_inodes(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _allocate(self, descriptor: int, size: int) -> None:
        if os.fstat(descriptor).st_size < PAGE + size:
            self._map = None
            # Without it, a full tmpfs would end the process with SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, PAGE + size)

    def _no_room(self, size: int, error: OSError) -> NoRoom:
        return NoRoom(f"{size:,} bytes do not fit into {self.path.parent}: {error.strerror}")

    def finish(self, header: Header) -> None:
        """Makes the snapshot whose bytes were written after `begin` valid."""
        _write_header(self.path, header)

    def read(self) -> memoryview:
        """Maps the bytes of a complete snapshot.

        Raises:
            OSError: if the file cannot be read.
        """
        header = self.header()
        if header is None:
            raise OSError(f"{self.path} has no complete snapshot")
        if self._map is None:
            with self.path.open("r+b") as file:
                # All pages at once, which takes half as long as one by one.
                self._map = Mapping(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return memoryview(self._map)[PAGE : PAGE + header.size]

    def take_mapping(self, of: Slot) -> None:
        """Takes over the mapping of another object of the same slot: to end it, and to map the file again for the next
        snapshot, takes as long as to verify the snapshot."""
        if of.path == self.path:
            self._map = of._map

    def map_privately(self) -> PrivateMap:
        """Maps a complete snapshot so that what is written there does not change it. Its bytes begin at `PAGE`.

        Raises:
            OSError: if the file cannot be read.
        """
        return PrivateMap(self.path)

    def move(self, path: Path, *, rank: int, world_size: int) -> None:
        """Makes a complete snapshot another rank's, under that one's name, in place of what is there.

        Raises:
            OSError: if there is no complete snapshot.
        """
        header = self.header()
        if header is None:
            raise OSError(f"{self.path} has no complete snapshot")
        self.path.replace(path)
        _write_header(path, replace(header, rank=rank, world_size=world_size))

    def clear(self) -> None:
        """Gives up the snapshot, and its memory."""
        self._map = None
        self.path.unlink(missing_ok=True)


class Arena:
    """All snapshots in a node's memory folder."""

    was_made = False
    """Whether the folder was there for this object."""

    def __init__(self, folder: Path, *, required: bool = True) -> None:
        """Creates the folder, if need be.

        Args:
            folder: The snapshots of one checkpointer and stage, `stage-N/NAME` in the node's memory folder.
            required: Whether it is an error if it cannot be created. Otherwise there are no snapshots until `make` has
                created it.

        Raises:
            OSError: if it cannot be created, and is required.
        """
        self.folder = folder
        try:
            self.make()
        except OSError:
            if required:
                raise

    @property
    def is_there(self) -> bool:
        """Whether the folder is still there."""
        return self.folder.exists()

    def make(self) -> None:
        """Creates the folder, and the node's memory folder around it: the launcher locks that one again.

        Raises:
            NoRoom: if the memory folder is full.
            OSError: if it cannot be created for another reason.
        """
        for folder in (*reversed(self.folder.parents[:2]), self.folder):
            with _without_inodes(folder):
                # Not `parents`, which gives only the last one the mode.
                folder.mkdir(mode=0o700, exist_ok=True)
        self.was_made = True

    def slot(self, rank: int, number: int, *, world_size: int | None = None) -> Slot:
        """Returns the slot of a rank with this number, whether or not it has a snapshot.

        Args:
            rank: The rank.
            number: The number of the slot.
            world_size: The size of the rank's world; None if its state is replicated, so that it serves any world.
                Worlds of other sizes have other slots: what such a one saved stays until this one has it.
        """
        of_world = "" if world_size is None else f"-of-{world_size}"
        return Slot(self.folder / f"rank-{rank}{of_world}.{number}")

    def snapshots(self) -> Iterator[tuple[Slot, Header]]:
        """All complete snapshots of this node, also of ranks that are on another node now."""
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            slot = Slot(path)
            header = slot.header() if match else None
            if match and header is not None and header.rank == int(match[1]):
                yield slot, header

    def count_restore(self, slot: Slot, number: int = 1) -> None:
        """Records that a world has loaded a snapshot; with -1, that it has not."""
        header = slot.header()
        if header is not None:
            _write_header(slot.path, replace(header, restores=header.restores + number))


def crc32(content: memoryview) -> int:
    """Computes the CRC-32 of a snapshot's bytes, for processes without torch that get or read them."""
    value = 0
    for start in range(0, len(content), _CHECKED_AT_ONCE):
        value = zlib.crc32(content[start : start + _CHECKED_AT_ONCE], value)
    return value


@contextlib.contextmanager
def _without_inodes(path: Path) -> Generator[None]:
    """Names what a full file system does not take: it has inodes for so many files and folders only."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise NoRoom(f"{path} cannot be created: {error.strerror}") from error


def _write_header(path: Path, header: Header) -> None:
    text = json.dumps(header.fields()).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(descriptor, _FRAME.pack(_MAGIC, len(text), zlib.crc32(text)) + text, 0)
    finally:
        os.close(descriptor)


def _decode(page: bytes) -> Header | None:
    if len(page) < PAGE:
        return None
    magic, length, check = _FRAME.unpack_from(page)
    text = page[_FRAME.size : _FRAME.size + length]
    if magic != _MAGIC or zlib.crc32(text) != check:
        return None
    try:
        return Header(**cast("dict[str, Any]", json.loads(text)))
    except (ValueError, TypeError):
        return None
