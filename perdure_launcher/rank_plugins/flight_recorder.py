"""Reads torch's flight recorder, so that a rank can tell which collectives it has called, and when, without any change
of its script.

The recorder keeps the newest 2,000 collectives of each backend (`TORCH_FR_BUFFER_SIZE`). Those over gloo run in the
process, and have no time at which they ended. Those over NCCL run on the device, long after they were called.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..torch_internals import dump_flight_recorders


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
    seconds: float | None = None
    """How long it ran on the device; None where torch has not measured it (`TORCH_NCCL_ENABLE_TIMING`)."""

    @property
    def backend(self) -> str:
        return self.name.partition(":")[0]

    @property
    def on_device(self) -> bool:
        """It runs on the device, in the order of the calls and after all work that it waits for."""
        return self.backend == "nccl"


class Recorded(NamedTuple):
    """What the recorder has of this process."""

    collectives: tuple[Collective, ...]
    """The newest collectives, the oldest first."""
    transfers: tuple[int, ...] = ()
    """When sends to and receives from single ranks were called, in nanoseconds since the epoch, ascending. Over gloo
    torch records none."""


_UNDESCRIBED = "undefined"


def read_collectives() -> tuple[Collective, ...] | None:
    """Returns the newest collectives, the oldest first; None where this torch does not record them."""
    recorded = read_recorder()
    return None if recorded is None else recorded.collectives


def read_recorder() -> Recorded | None:
    """Reads the recorder; returns None where this torch has none.

    That takes about 10 ms for 2,000 collectives over gloo, and 50 ms for as many over NCCL. Meanwhile no other thread
    of the process runs Python.
    """
    dumps = dump_flight_recorders()
    if not dumps:
        return None
    entries = [entry for dump in dumps for entry in _entries(dump)]
    recorded = [_collective(entry) for entry in entries if not entry["is_p2p"]]
    transfers = sorted(entry["time_created_ns"] for entry in entries if entry["is_p2p"])
    return Recorded(tuple(sorted(_without_parts(recorded), key=lambda one: one.called_at)), tuple(transfers))


def _entries(dump: bytes) -> list[dict[str, Any]]:
    return pickle.loads(dump).get("entries", [])


def _collective(entry: dict[str, Any]) -> Collective:
    milliseconds = entry.get("duration_ms")
    return Collective(
        group=_group(*entry["process_group"]),
        sequence=entry["collective_seq_id"],
        name=entry["profiling_name"],
        called_at=entry["time_created_ns"],
        # NCCL's are retired by a thread that looks ten times a second.
        ended=entry["retired"] or entry["state"] == "completed",
        sizes=entry["input_sizes"],
        seconds=None if milliseconds is None else milliseconds / 1000,
    )


def _without_parts(collectives: Iterable[Collective]) -> list[Collective]:
    """Leaves out the parts of coalesced collectives: they have its number, it follows them, and they never end."""
    newest = {(one.group, one.sequence) if one.on_device else position: one for position, one in enumerate(collectives)}
    return list(newest.values())


def _group(name: str, description: str) -> str:
    return name if description in ("", _UNDESCRIBED) else f"{name} ({description})"
