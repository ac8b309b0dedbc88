"""One rank's part of a checkpoint: where its bytes are, and the file that is made of them."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from perdure.contract.agents import LARGEST_NUMBER
from perdure.contract.checkpoints import Places

_LENGTH = struct.Struct("<Q")
_MOST_TEXT = 1 << 24
"""Bytes of a recipe: half a million pieces. It is read as a whole, and an agent has little memory."""
_AT_ONCE = 1 << 23
"""Bytes that are read at once."""
Number = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
_PIECES = TypeAdapter(list[tuple[int, int, int]])


class SnapshotChanged(Exception):
    """A snapshot does not have the bytes that the rank saved."""


class Snapshot(BaseModel):
    """The bytes of a rank's snapshot within its file."""

    model_config = ConfigDict(frozen=True)

    offset: Number
    size: Number
    checksum: int
    """CRC-32."""


class PartRequest(BaseModel):
    """A rank's request to store its part of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    folder: str
    """The checkpoint's, which names its step, its run and its generation."""
    rank: Number
    ranks: int = Field(ge=1, le=LARGEST_NUMBER)
    """Ranks of the world, each of which stores a part."""
    name: str
    size: Number
    """The size of the part in bytes."""
    answers: Number = 0
    """The newest request for a checkpoint that this one answers; rank 0 knows it."""
    beside: Places = ()
    """As in `StoredCheckpoint`."""
    snapshot: Snapshot
    reported: Number | None = None
    """The newest step whose loss the rank had reported, where its script counts what it saves otherwise."""
    metrics: dict[str, float] = Field(default={}, max_length=64)
    """What the script measured at this step; rank 0 knows it."""


class Part:
    """The content of a rank's part, read from files that the rank has opened and handed over.

    Invariant: what a rank does with these files cannot end the agent; it reads them, and never maps them.
    """

    def __init__(self, request: PartRequest, files: Sequence[int]) -> None:
        """Reads what the part is made of.

        Args:
            request: The rank's request.
            files: The snapshot, the recipe, and on rank 0 the checkpoint's metadata.

        Raises:
            ValueError: if they are not what the request says.
        """
        if len(files) not in (2, 3) or not all(stat.S_ISREG(os.fstat(file).st_mode) for file in files):
            raise ValueError("expected two or three regular files with the request")
        self.request = request
        self._files = files
        length = _LENGTH.unpack(_read(files[1], 0, _LENGTH.size))[0]
        if length > _MOST_TEXT:
            raise ValueError(f"the recipe has {length:,} bytes; expected at most {_MOST_TEXT:,}")
        try:
            self._pieces = _PIECES.validate_python(json.loads(_read(files[1], _LENGTH.size, length)))
        except ValidationError as error:
            raise ValueError(f"the recipe is not a list of pieces: {error}") from None
        self._others_at = _LENGTH.size + length
        if sum(size for _, _, size in self._pieces) != request.size:
            raise ValueError("the pieces have another size than the part")
        end = max((offset + size for in_place, offset, size in self._pieces if in_place), default=0)
        if end > request.snapshot.size or any(min(piece) < 0 for piece in self._pieces):
            raise ValueError("a piece is outside of the snapshot")

    @property
    def has_metadata(self) -> bool:
        """Whether the rank has handed over the checkpoint's metadata."""
        return len(self._files) == 3

    def verify(self) -> None:
        """Compares the snapshot with its checksum.

        Raises:
            SnapshotChanged: if they differ.
        """
        snapshot, checksum = self.request.snapshot, 0
        for piece in _pieces_of(self._files[0], snapshot.offset, snapshot.size):
            checksum = zlib.crc32(piece, checksum)
        if checksum != snapshot.checksum:
            raise SnapshotChanged(f"the snapshot of rank {self.request.rank} is damaged in memory")

    def metadata(self) -> Iterator[bytes]:
        """The bytes of the checkpoint's metadata, in pieces."""
        return _pieces_of(self._files[2], 0, os.fstat(self._files[2]).st_size)

    def content(self) -> Iterator[bytes]:
        """The bytes of the part, in pieces."""
        for in_place, offset, size in self._pieces:
            file, begin = (
                (self._files[0], self.request.snapshot.offset) if in_place else (self._files[1], self._others_at)
            )
            yield from _pieces_of(file, begin + offset, size)


def _pieces_of(file: int, offset: int, size: int) -> Iterator[bytes]:
    end = offset + size
    while offset < end:
        piece = _read(file, offset, min(_AT_ONCE, end - offset))
        offset += len(piece)
        yield piece


def _read(file: int, offset: int, length: int) -> bytes:
    """Reads exactly `length` bytes.

    Raises:
        SnapshotChanged: if the file has become shorter.
    """
    content = os.pread(file, length, offset)
    while len(content) < length:
        more = os.pread(file, length - len(content), offset + len(content))
        if not more:
            raise SnapshotChanged("a file of the rank ends before its part does")
        content += more
    return content
