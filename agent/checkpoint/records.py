"""Sizes and checksums of a checkpoint's files, which are stored beside them, and the damage that they show."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from perdure.agent.checkpoint.names import METADATA, UNCOMMITTED, is_record, part_name, record_name
from perdure.agent.checkpoint.storage import Storage
from perdure.contract.checkpoints import CheckpointRef

_AT_ONCE = 1 << 23
_RECORDS_AT_ONCE = 16
_NAMED = 4
"""Files that are named as missing or damaged."""


class FileRecord(BaseModel):
    """One file."""

    model_config = ConfigDict(frozen=True)

    size: int
    checksum: int
    """CRC-32."""


class NodeFiles(BaseModel):
    """The files that one node stored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    ranks: int
    """Ranks of the world: each has a file."""
    files: dict[str, FileRecord]
    metrics: dict[str, float] = {}
    """What the script measured at this step; in the record of rank 0's node."""


def read_metrics(storage: Storage, saved: CheckpointRef) -> dict[str, float]:
    """Reads what the script measured at the step of a checkpoint; empty if that is not known."""
    try:
        content = storage.read(f"{saved.folder}/{record_name(0)}")
        return NodeFiles.model_validate_json(content).metrics
    except (FileNotFoundError, ValueError):
        return {}


@dataclass(frozen=True)
class _Listed:
    """A checkpoint's files: as they were stored, and as the storage lists them."""

    expected: dict[str, FileRecord]
    """By name: the metadata, and the part of each rank."""
    sizes: dict[str, int | None]
    """What the storage lists; None for a size that it does not."""

    def problem_of(self, name: str) -> str:
        """What is wrong with a file as far as it is listed; empty if nothing is."""
        if name not in self.sizes:
            return f"{name} is missing"
        size, expected = self.sizes[name], self.expected[name].size
        if size is None or size == expected:
            return ""
        return f"{name} has {size:,} bytes, and had {expected:,} when it was stored"


def lost(storage: Storage, saved: CheckpointRef) -> str:
    """Says what the storage lacks of a checkpoint that all nodes have stored and that is to be committed; empty if that
    is nothing. Only the records are read, and sizes listed.

    Raises:
        FileNotFoundError: if the storage has nothing of it, as a folder that is not mounted any more.
    """
    sizes = storage.sizes(saved.folder)
    if not sizes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), saved.folder)
    if UNCOMMITTED in sizes:
        sizes[METADATA] = sizes[UNCOMMITTED]
    elif METADATA in sizes:
        # It is committed.
        return ""
    listed = _list(storage, saved, sizes)
    if isinstance(listed, str):
        return listed
    return _join([problem for name in sorted(listed.expected) if (problem := listed.problem_of(name))])


def files_of(storage: Storage, saved: CheckpointRef) -> dict[str, FileRecord] | str:
    """Returns the files of a committed checkpoint, by name, as they were stored; or why there are none."""
    sizes = storage.sizes(saved.folder)
    if METADATA not in sizes:
        return f"{METADATA} is missing"
    listed = _list(storage, saved, sizes)
    return listed if isinstance(listed, str) else listed.expected


def damage(storage: Storage, saved: CheckpointRef, *, share: tuple[int, int]) -> str:
    """Looks at a share of a checkpoint's files; returns what is wrong with them, empty if nothing is.

    Args:
        storage: The storage.
        saved: The checkpoint.
        share: The number of this share, and how many there are: every node of a world looks at some.
    """
    sizes = storage.sizes(saved.folder)
    if METADATA not in sizes:
        return f"{METADATA} is missing"
    listed = _list(storage, saved, sizes)
    if isinstance(listed, str):
        return listed
    number, shares = share
    problems = (_damage_of(storage, saved, listed, name) for name in sorted(listed.expected)[number::shares])
    return "; ".join(filter(None, problems))


def _list(storage: Storage, saved: CheckpointRef, sizes: dict[str, int | None]) -> _Listed | str:
    """Reads the records of a checkpoint; or says why they do not tell which files it has."""

    def read(name: str) -> NodeFiles | str:
        try:
            return NodeFiles.model_validate_json(storage.read(f"{saved.folder}/{name}"))
        except ValueError:
            return f"{name} is damaged"

    names = sorted(filter(is_record, sizes))
    records: dict[str, FileRecord] = {}
    ranks = 0
    # A job of a thousand nodes has as many records, and a request takes some milliseconds.
    with ThreadPoolExecutor(_RECORDS_AT_ONCE, thread_name_prefix="records") as threads:
        found = list(threads.map(read, names))
    for record in found:
        if isinstance(record, str):
            return record
        records |= record.files
        ranks = max(ranks, record.ranks)
    if not names:
        return f"{record_name(0)} is missing"
    if ranks > len(sizes):
        return f"the files of some of {ranks:,} ranks are missing"
    expected = {METADATA, *map(part_name, range(ranks))}
    if missing := sorted(expected - (records.keys() & sizes)):
        return _join([f"{name} is missing" for name in missing])
    return _Listed({name: records[name] for name in expected}, sizes)


def _join(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _NAMED:,} more files" if len(problems) > _NAMED else ""
    return "; ".join(problems[:_NAMED]) + more


def _damage_of(storage: Storage, saved: CheckpointRef, listed: _Listed, name: str) -> str:
    if problem := listed.problem_of(name):
        return problem
    expected = listed.expected[name]
    size, checksum = storage.checksum(f"{saved.folder}/{name}", piece=_AT_ONCE)
    if size != expected.size:
        return f"{name} has {size:,} bytes, and had {expected.size:,} when it was stored"
    return "" if checksum == expected.checksum else f"{name} has other bytes than were stored"
