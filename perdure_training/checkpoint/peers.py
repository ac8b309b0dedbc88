"""Copies each snapshot of a rank to other nodes, for states that only one node has."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store

from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.arena import Header, Slot
from perdure_training.snapshots.copies import RACK_VARIABLE, CopySender, ReceiverAddress, Refused

logger = logging.getLogger(__name__)

RECEIVER_VARIABLE = "PERDURE_COPIES"
"""Variable with the address and the token of the node's receiver, which the launcher sets."""


@dataclass(frozen=True)
class _NodeOfWorld:
    ranks: range
    receiver: str
    """`ReceiverAddress` as text; empty if the node takes no copies."""
    rack: str
    """Empty if it is unknown."""


class Peers:
    """The nodes that keep copies of this rank's snapshots: in other racks as far as these are known, else the next
    ones in the order of ranks."""

    def __init__(self, own: RankIdentity, store: Store, *, name: str, copies: int) -> None:
        """Tells the other nodes where this one takes copies.

        Args:
            own: This rank.
            store: A connection that no other thread uses.
            name: The checkpointer's.
            copies: The number of nodes that keep a copy.
        """
        self._own = own
        self._store = store
        self._folder = f"{own.folder.name}/{name}"
        self._copies = copies
        self._nodes: list[_NodeOfWorld] | None = None
        self._senders: list[CopySender] | None = None
        self._warned = False
        self.refused = False
        """Whether a node has not taken a copy."""
        if copies and own.local_rank == 0:
            entry = {
                "ranks": own.local_world_size,
                "receiver": os.environ.get(RECEIVER_VARIABLE, ""),
                "rack": os.environ.get(RACK_VARIABLE, ""),
            }
            store.set(f"receiver/{own.rank}", json.dumps(entry))

    def ranks_that_copy_here(self) -> set[int]:
        """The ranks whose copies belong on this node."""
        return {rank for node in self._neighbors(-1) for rank in node.ranks}

    @property
    def number(self) -> int:
        """The number of nodes that keep a copy."""
        return self._copies

    @property
    def wanted(self) -> bool:
        """Whether snapshots are copied at all."""
        return self._copies > 0

    def copy(self, slot: Slot, header: Header, *, number: int, crc32: int) -> bool:
        """Copies a snapshot; returns whether all have it. If a node cannot be reached or refuses, it warns once and
        continues: the snapshot on this node counts alone then. `refused` tells of a refusal."""
        copied = True
        for sender in self._connected():
            try:
                sender.send(header, slot.read(), slot=number, crc32=crc32)
            except (OSError, Refused) as error:
                log = logger.debug if self._warned else logger.warning
                self._warned = True
                copied = False
                self.refused = self.refused or isinstance(error, Refused)
                log("perdure: rank %d has no copy of its snapshots on another node: %s", self._own.rank, error)
        return copied

    def _connected(self) -> list[CopySender]:
        if self._senders is None:
            receivers = [node.receiver for node in self._neighbors(1) if node.receiver]
            self._senders = [CopySender(ReceiverAddress.load(text), folder=self._folder) for text in receivers]
        return self._senders

    def _neighbors(self, direction: int) -> list[_NodeOfWorld]:
        """The nodes that keep this node's copies (1), or whose copies it keeps (-1)."""
        if not self._copies:
            return []
        if self._nodes is None:
            self._nodes = self._all_nodes()
        nodes = self._nodes
        own = next(index for index, node in enumerate(nodes) if self._own.rank in node.ranks)
        distances = copy_distances([node.rack for node in nodes], copies=self._copies)
        return [nodes[(own + direction * distance) % len(nodes)] for distance in distances]

    def _all_nodes(self) -> list[_NodeOfWorld]:
        nodes: list[_NodeOfWorld] = []
        first = 0
        while first < self._own.world_size:
            entry = json.loads(self._store.get(f"receiver/{first}"))
            ranks = range(first, first + entry["ranks"])
            nodes.append(_NodeOfWorld(ranks, entry["receiver"], entry.get("rack", "")))
            first += entry["ranks"]
        # Those of a rack are in a row. Where none is known, this is the order of ranks.
        return sorted(nodes, key=lambda node: node.rack)


def copy_distances(racks: Sequence[str], *, copies: int) -> list[int]:
    """How far from each node those are that keep its copies, around the row of all nodes.

    All nodes have the same distances, so that each keeps copies of as many nodes as keep its own. A distance of the
    largest rack's size leads out of every rack, unless more than half of the nodes are in one.

    Args:
        racks: The nodes' racks, equal ones in a row; empty for those that are unknown.
        copies: The number of nodes that keep a copy of each.
    """
    others = len(racks) - 1
    largest = max(Counter(filter(None, racks)).values(), default=1)
    return [(largest - 1 + number) % others + 1 for number in range(min(copies, others))]
