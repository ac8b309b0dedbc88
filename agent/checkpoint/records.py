"""Sizes and checksums of a checkpoint's files, which are stored beside them, and the damage that they show."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from perdure.agent.checkpoint.names import METADATA, is_record, part_name, record_name
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointRef

_AT_ONCE = 1 << 23


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


def damage(storage: Storage, saved: CheckpointRef, *, share: tuple[int, int]) -> str:
    """Looks at a share of a checkpoint's files; returns what is wrong with them, empty if nothing is.

    Args:
        storage: The storage.
        saved: The checkpoint.
        share: The number of this share, and how many there are: every node of a world looks at some.
    """
    names = storage.names(saved.folder)
    if METADATA not in names:
        return f"{METADATA} is missing"
    records: dict[str, FileRecord] = {}
    ranks = 0
    for name in sorted(filter(is_record, names)):
        try:
            record = NodeFiles.model_validate_json(storage.read(f"{saved.folder}/{name}"))
        except ValueError:
            return f"{name} is damaged"
        records |= record.files
        ranks = max(ranks, record.ranks)
    if ranks > len(names):
        return f"the files of some of {ranks:,} ranks are missing"
    expected = {METADATA, *map(part_name, range(ranks))}
    if missing := sorted(expected - (records.keys() & names)):
        return f"{', '.join(missing[:4])} {'is' if len(missing) == 1 else 'are'} missing"
    number, shares = share
    return "; ".join(_damage_of(storage, saved, records, name) for name in sorted(expected)[number::shares]).strip("; ")


def _damage_of(storage: Storage, saved: CheckpointRef, records: Mapping[str, FileRecord], name: str) -> str:
    expected = records[name]
    size, checksum = storage.checksum(f"{saved.folder}/{name}", piece=_AT_ONCE)
    if size != expected.size:
        return f"{name} has {size:,} bytes, and had {expected.size:,} when it was stored"
    return "" if checksum == expected.checksum else f"{name} has other bytes than were stored"
