"""Reads torch's flight recorder, so that a rank can tell which collectives it has called, and when, without any change
of its script.

The recorder keeps the newest 2,000 collectives of a backend (`TORCH_FR_BUFFER_SIZE`). For gloo it has no time at which
a collective ended.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..torch_internals import dump_flight_recorder


class Collective(NamedTuple):
    """A collective that this process has called."""

    group: str
    """The name of its process group, with what the script says of the group."""
    sequence: int
    """Its number in that group, which is the same on all ranks."""
    name: str
    """What it is, such as `gloo:all_reduce`."""
    called_at: int
    """Nanoseconds since the epoch, by this machine's clock."""
    ended: bool
    sizes: Sequence[Sequence[int]] = ()
    """The shapes of the tensors that the rank gives to it."""


_UNDESCRIBED = "undefined"


def read_collectives() -> tuple[Collective, ...] | None:
    """Returns the newest collectives over gloo, the oldest first; None where this torch does not record them.

    That takes about 10 ms for 2,000 collectives, for which no other thread of the process runs Python.
    """
    content = dump_flight_recorder()
    if content is None:
        return None
    entries: list[dict[str, Any]] = pickle.loads(content).get("entries", [])
    return tuple(
        Collective(
            group=_group(*entry["process_group"]),
            sequence=entry["collective_seq_id"],
            name=entry["profiling_name"],
            called_at=entry["time_created_ns"],
            ended=entry["retired"],
            sizes=entry["input_sizes"],
        )
        for entry in entries
        if not entry["is_p2p"]
    )


def _group(name: str, description: str) -> str:
    return name if description in ("", _UNDESCRIBED) else f"{name} ({description})"
