"""Copies each snapshot of a rank to other nodes, for states that only one node has."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        """The ranks whose copies belong on this node; all of them where nodes say what cannot be understood: copies
        that are here are not given up for it."""
        if self._copies and not self._known():
            return set(range(self._own.world_size))
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
            except (OSError, Refused, ValueError, OverflowError) as error:
                # The latter two where an address of the other node is none.
                copied = False
                self.refused = self.refused or isinstance(error, Refused)
                self._warn(str(error))
        return copied

    def _warn(self, problem: str) -> None:
        log = logger.debug if self._warned else logger.warning
        self._warned = True
        log("perdure: rank %d has no copy of its snapshots on another node: %s", self._own.rank, problem)

    def _connected(self) -> list[CopySender]:
        if self._senders is None:
            self._senders = []
            for text in (node.receiver for node in self._neighbors(1) if node.receiver):
                try:
                    self._senders.append(CopySender(ReceiverAddress.load(text), folder=self._folder))
                except ValueError as error:
                    self._warn(str(error))
        return self._senders

    def _neighbors(self, direction: int) -> list[_NodeOfWorld]:
        """The nodes that keep this node's copies (1), or whose copies it keeps (-1)."""
        if not self._copies or not (nodes := self._known()):
            return []
        own = next(index for index, node in enumerate(nodes) if self._own.rank in node.ranks)
        distances = copy_distances([node.rack for node in nodes], copies=self._copies)
        return [nodes[(own + direction * distance) % len(nodes)] for distance in distances]

    def _known(self) -> list[_NodeOfWorld]:
        """All nodes; none where one of them says what cannot be understood, as a later release might."""
        if self._nodes is None:
            try:
                self._nodes = self._all_nodes()
            except ValueError as error:
                self._nodes = []
                self._warn(str(error))
        return self._nodes

    def _all_nodes(self) -> list[_NodeOfWorld]:
        nodes: list[_NodeOfWorld] = []
        first, size = 0, self._own.world_size
        while first < size:
            nodes.append(_read_node(self._store.get(f"receiver/{first}"), first=first, most=size - first))
            first += len(nodes[-1].ranks)
        # Those of a rack are in a row. Where none is known, this is the order of ranks.
        return sorted(nodes, key=lambda node: node.rack)


def _read_node(text: bytes, *, first: int, most: int) -> _NodeOfWorld:
    """Reads what a node says of itself.

    Raises:
        ValueError: if it is anything else.
    """
    try:
        entry: dict[str, Any] = dict(json.loads(text))
        ranks, receiver, rack = entry["ranks"], entry["receiver"], entry.get("rack", "")
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the node of rank {first} does not say where it takes copies: {error!r}") from None
    if (
        not isinstance(ranks, int)
        or not 1 <= ranks <= most
        or not isinstance(receiver, str)
        or not isinstance(rack, str)
    ):
        raise ValueError(f"the node of rank {first} does not say where it takes copies: {text[:120]!r}")
    return _NodeOfWorld(range(first, first + ranks), receiver, rack)


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
