"""What former worlds have left in the memory of a node, and when it is deleted."""

from __future__ import annotations

from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.world import Completeness, RankIdentity
from perdure_training.snapshots.arena import Arena, Header

_AWAITED = 3
"""Steps whose copies are looked for, before what former worlds left is deleted."""


class FormerSnapshots:
    """The snapshots of former worlds, as far as a rank of this one disposes of them.

    Invariants:
        - They are deleted once this world has a step with all its copies and a later one: a step is known to be sound
          when that follows. Not before, unless there is no room for both.
    """

    def __init__(self, own: RankIdentity, arena: Arena, slots: Slots, complete: Completeness, peers: Peers) -> None:
        """Creates the object.

        Args:
            own: This rank.
            arena: The snapshots of the node.
            slots: Those of this rank.
            complete: Counts the ranks that have a step.
            peers: Says whose copies belong here.
        """
        self._own = own
        self._arena = arena
        self._slots = slots
        self._complete = complete
        self._peers = peers
        self.until: list[int] = []
        """The steps of this world of which one must have its copies on other nodes, and a later one be complete, before
        what former worlds left is deleted; empty where nothing is left."""
        self.made_room = False
        """Whether they were deleted for lack of room, and nothing was saved there since."""

    def forget_after(self, step: int) -> None:
        """Deletes what was saved after the step that is loaded: the training makes these steps again.

        Other ranks of the node may already save again, so each deletes its own.
        """
        for slot, header in self._arena.snapshots():
            if header.step > step and (header.rank == self._own.rank or self._is_left_by_others(header)):
                slot.clear()
        self._slots.reload()

    def delete_if_copied(self, step: int) -> None:
        """Deletes what former worlds left if this one has its copies; `step` is saved next."""
        if not self.until:
            return
        refused = self._complete.are_copies_refused()
        has_step = self._complete.is_complete if refused else self._complete.is_settled
        first = next((one for one in self.until if has_step(one)), None)
        if first is None or not any(one > first and self._complete.is_complete(one) for one in self.until):
            # The copies of a later step may succeed where those of the first did not.
            self.until = [*self.until[-_AWAITED:], step]
        elif refused:
            self.make_room()
        else:
            self.delete()

    def make_room(self) -> None:
        """Deletes them as there is no room for this world's."""
        self.delete()
        self.made_room = True

    def delete(self) -> None:
        """Deletes snapshots of ranks that are on other nodes, but not the copies that belong here, and those of worlds
        of other sizes."""
        self.until = []
        copied = self._peers.ranks_that_copy_here()
        for slot, header in self._arena.snapshots():
            fits = header.replicated or header.world_size == self._own.world_size
            if header.rank == self._own.rank:
                is_left = not fits and header.generation < self._own.generation
            else:
                is_left = self._is_left_by_others(header) and not (fits and header.rank in copied)
            if is_left:
                slot.clear()

    def _is_left_by_others(self, header: Header) -> bool:
        """Whether this rank disposes of a snapshot: a rank of another node wrote it, before this world began."""
        foreign = header.rank not in self._own.ranks_of_node
        return foreign and self._own.local_rank == 0 and header.generation < self._own.generation
