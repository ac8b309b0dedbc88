"""The ranks that hold the same parameters, and what they exchange for a check."""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.serialization import default_restore_location

from perdure_training.checkpoint.generators import Generators
from perdure_training.replay.checksums import numbers_in

_MODEL_NAME = "model name"


class Replicas:
    """The data-parallel ranks of one process group, as one of them sees them.

    Invariants:
        - Every method that exchanges something is a collective: all ranks call it at the same time.
        - Only ranks with the same hardware, threads and torch compute for each other: others may round differently.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Creates the object.

        Args:
            device: The device of the parameters.
            group: The ranks; None for all.
        """
        self._device, self._group = device, group
        several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if several else 0
        """This rank's place among the replicas."""
        self.count = dist.get_world_size(group) if several else 1
        self.device_name = name_of(device)
        names: list[Any] = [None] * self.count
        if self.count > 1:
            dist.all_gather_object(names, _kind_of(device), group=group)
        self.alike = [rank for rank, name in enumerate(names) if name == names[self.rank]]
        """The replicas that compute as this one does, itself among them."""
        self.kinds = names

    def global_rank(self, rank: int) -> int:
        """Returns the rank of a replica in the job."""
        if self.count == 1:
            return int(os.environ.get("RANK", "0"))
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def owner(self, distance: int, by: int | None = None) -> int:
        """Returns whose share a replica computes that takes it from so many places before."""
        by = self.rank if by is None else by
        alike = [rank for rank, kind in enumerate(self.kinds) if kind == self.kinds[by]]
        return alike[(alike.index(by) - distance) % len(alike)]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all replicas."""
        if self.count == 1:
            return [list(numbers)]
        own = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(gathered, own, group=self._group)
        return numbers_in(torch.stack(gathered))

    def shift(self, share: Any, distance: int) -> Any:
        """Passes each replica's share on by so many places, and returns the one that this replica receives."""
        source = self.owner(distance)
        if source == self.rank:
            return share
        target = self.alike[(self.alike.index(self.rank) + distance) % len(self.alike)]
        buffer = io.BytesIO()
        torch.save(share, buffer)
        sent = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(sent)], device=self._device)
        received = torch.empty_like(size)
        self._swap(size, target, received, source)
        content = torch.empty(int(received), dtype=torch.uint8, device=self._device)
        self._swap(sent, target, content, source)
        room = bytearray(len(content))
        torch.frombuffer(room, dtype=torch.uint8).copy_(content)
        # Ranks of one process group trust each other.
        return torch.load(io.BytesIO(room), map_location=self._place, weights_only=False)

    def _swap(self, sent: torch.Tensor, target: int, received: torch.Tensor, source: int) -> None:
        operations = [
            dist.P2POp(dist.isend, sent, self.global_rank(target), self._group),
            dist.P2POp(dist.irecv, received, self.global_rank(source), self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _place(self, storage: Any, location: str) -> Any:
        """Puts what was on the other rank's device on this one's."""
        return default_restore_location(storage, location if location == "cpu" else str(self._device))


class DrawnNumbers:
    """The random numbers that a share of a step draws: those of the default generators, and of one device's."""

    def __init__(self) -> None:
        """Remembers the present state."""
        state = Generators().state_dict()
        devices = state.pop("cuda", None)
        self._state = state
        self._device = None if devices is None else devices[torch.cuda.current_device()]

    def draw_again(self) -> None:
        """Goes back to the state; on a rank with another device as well."""
        Generators().load_state_dict(self._state)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device.cpu())


def name_of(device: torch.device) -> str:
    """Names a device for people."""
    if device.type == "cuda":
        properties = cast("Any", torch.cuda.get_device_properties(device))
        uuid = getattr(properties, "uuid", None)
        return f"{properties.name}, GPU-{uuid}" if uuid else str(properties.name)
    return f"{device.type}, {_processor()}"


def _kind_of(device: torch.device) -> str:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return " / ".join(
        (kind, _processor(), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()), torch.__version__)
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(_MODEL_NAME)), platform.machine())
