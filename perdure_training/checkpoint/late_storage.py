"""Has the ranks of a world store checkpoints together also where an agent was away when the world began.

All ranks count the checkpoints of a world alike, so none of them stores any before all have reached their agents. Where
one has not, the world trains on, and it is tried again in the background; rank 0 then chooses the step after which all
of them store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torch.distributed import Store

from perdure_training.checkpoint.durable import DurableCheckpoints
from perdure_training.checkpoint.world import RankIdentity

logger = logging.getLogger(__name__)

_REACHED = "durable/reached"
"""Key of the number of ranks that have reached their agents."""
_SINCE = "durable/since"
"""Key of the step after which all ranks store."""


def all_reached(own: RankIdentity, store: Store, *, reached: bool) -> bool:
    """Whether all ranks have reached their agents. Every rank of the world calls it."""
    store.set(f"durable/here/{own.rank}", "1" if reached else "")
    if own.rank == 0:
        here = all(store.get(f"durable/here/{rank}") for rank in range(own.world_size))
        store.set("durable/here", "1" if here else "")
    return bool(store.get("durable/here"))


class LateStorage:
    """One rank's part in the storage of a world that began without it."""

    def __init__(
        self,
        own: RankIdentity,
        store: Store,
        durable: DurableCheckpoints | None,
        *,
        connect: Callable[[], DurableCheckpoints | None],
        on_reached: Callable[[DurableCheckpoints], None],
    ) -> None:
        """Creates the object, and a thread where the agent is to be reached.

        Args:
            own: This rank.
            store: A connection to the generation's store for the training's own thread.
            durable: The checkpoints, if this rank has reached its agent.
            connect: Tries to reach the agent for some time; returns the checkpoints, or None.
            on_reached: Called by the thread once it is reached.
        """
        self._own = own
        self._store = store
        self._durable = durable
        self._connect = connect
        self._on_reached = on_reached
        self._counted = False
        if durable is None:
            threading.Thread(target=self._reach, name="perdure-storage", daemon=True).start()

    def begun(self, step: int) -> DurableCheckpoints | None:
        """Returns the checkpoints if all ranks store from this step on. Called at each step that is saved; other ranks
        have made a step together with rank 0 since it chose."""
        if self._durable is not None and not self._counted:
            self._store.add(_REACHED, 1)
            self._counted = True
        if self._store.check([_SINCE]):
            return self._durable if step > int(self._store.get(_SINCE)) else None
        if self._own.rank == 0 and self._store.add(_REACHED, 0) >= self._own.world_size:
            self._store.set(_SINCE, str(step))
        return None

    def _reach(self) -> None:
        try:
            while (durable := self._connect()) is None:
                pass
        except Exception as error:
            # The store ends with its generation. Nothing here may end the training.
            logger.debug("no step of generation %d is stored: %s", self._own.generation, error)
            return
        self._on_reached(durable)
        self._durable = durable
        logger.warning("perdure: the agent answers again: checkpoints are stored from now on")
