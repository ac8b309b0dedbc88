"""The memories of played nodes, what they copy to each other, and what is left of it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from perdure_training.checkpoint.verification import is_intact
from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots import copies
from perdure_training.snapshots.arena import PAGE, Arena, Header, Slot
from perdure_training.snapshots.copies import CopyReceiver, ReceiverAddress, Refused

STAGE = "stage-0"


class Killed(BaseException):
    """The process of a rank ends here."""


class Version(NamedTuple):
    """What snapshots of one step, of one generation, have in common."""

    step: int
    generation: int


class PlayedNode:
    """The memory of one node, and its receiver of copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True)
        self.is_lost = False
        self.refuses = False
        listening: Any = SimpleNamespace(getsockname=lambda: ("", 1))
        with mock.patch.object(copies, "ConnectionThreads"):
            self.receiver = CopyReceiver(folder, listening, host=folder.name)

    def arena(self, name: str = "state") -> Arena:
        """The snapshots of one checkpointer."""
        return Arena(self.folder / STAGE / name)

    def snapshots(self) -> list[tuple[Slot, Header]]:
        return [] if self.is_lost else list(self.arena().snapshots())


class PlayedSender:
    """Brings copies to the receiver of another node, without a socket."""

    def __init__(self, network: Network, address: ReceiverAddress, *, folder: str) -> None:
        self._network = network
        self._address = address
        self._folder = folder

    def send(self, header: Header, content: memoryview, *, slot: int, crc32: int) -> None:
        node = self._network.nodes[self._address.host]
        if node.is_lost:
            raise ConnectionRefusedError(f"{node.folder.name} is lost")
        if node.refuses:
            raise Refused("no room")
        request = copies._Request(
            receiver_token=self._address.token, folder=self._folder, slot=slot, header=header, crc32=crc32
        )
        arrives = bytes(content)
        if torn := self._network.tears_copies:
            arrives = arrives[: len(arrives) // 2]
        answers: list[bytes] = []
        connection: Any = SimpleNamespace(sendall=answers.append)
        incoming: Any = io.BytesIO(arrives)
        line = json.dumps(asdict(request)).encode()
        try:
            refusal = node.receiver._take(line, connection, incoming, lambda: None)
        except ConnectionError:
            refusal = ""
        if torn:
            raise Killed
        if refusal:
            raise Refused(refusal)

    def close(self) -> None:
        """There is no connection."""


@dataclass
class Network:
    """The nodes by the name under which others reach them."""

    nodes: dict[str, PlayedNode] = field(default_factory=dict[str, PlayedNode])
    tears_copies: bool = False
    """Whether the rank that sends a copy is killed meanwhile."""


class Left:
    """What nodes have in memory at one moment, that a world of any size can load."""

    def __init__(
        self, nodes: Sequence[PlayedNode], *, unsound: UnsoundSteps | None = None, since: int = 0, intact: bool = False
    ) -> None:
        """Reads what is there.

        Args:
            nodes: The nodes.
            unsound: What is not loaded.
            since: The first generation whose snapshots count.
            intact: Whether the content counts, too.
        """
        self._parts = [_read(node, unsound, since=since, intact=intact) for node in nodes if not node.is_lost]

    def whole(self) -> dict[Version, int]:
        """The versions that are whole, with the number of ranks that saved each."""
        return _whole(self._parts)

    def newest(self, losses: int, *, at_most: int | None = None) -> int:
        """The newest step, of those up to `at_most`, that is whole whichever of the nodes are lost; -1 for none."""
        left = combinations(self._parts, max(len(self._parts) - losses, 0))
        found = ([version.step for version in _whole(some)] for some in left)
        return min(max((step for step in steps if at_most is None or step <= at_most), default=-1) for steps in found)


_Parts = Mapping[Version, tuple[set[int], int]]
"""The ranks of each version that a node has, and of how many these are."""


def _read(node: PlayedNode, unsound: UnsoundSteps | None, *, since: int, intact: bool) -> _Parts:
    parts: dict[Version, tuple[set[int], int]] = {}
    for slot, header in node.snapshots():
        version = Version(header.step, header.generation)
        if unsound is not None and unsound.has(generation=version.generation, step=version.step):
            continue
        if version.generation < since:
            continue
        if intact and not is_intact(slot, header):
            continue
        ranks, _ = parts.get(version, (set[int](), 0))
        ranks |= set(range(header.world_size)) if header.replicated else {header.rank}
        parts[version] = ranks, header.world_size
    return parts


def _whole(nodes: Sequence[_Parts]) -> dict[Version, int]:
    """Those that these nodes have together, with the number of ranks."""
    ranks: dict[Version, set[int]] = {}
    sizes: dict[Version, int] = {}
    for node in nodes:
        for version, (some, size) in node.items():
            ranks[version] = ranks.get(version, set()) | some
            sizes[version] = size
    return {version: sizes[version] for version, some in ranks.items() if len(some) >= sizes[version]}


def damage(slot: Slot) -> None:
    """Changes a byte of a snapshot."""
    with slot.path.open("r+b") as file:
        file.seek(PAGE)
        [byte] = file.read(1)
        file.seek(PAGE)
        file.write(bytes([byte ^ 255]))
