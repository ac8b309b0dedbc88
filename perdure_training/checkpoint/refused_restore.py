"""A restore that only a world of another size can make: the ranks report it, and wait until they are ended for that
world. Nothing of their state or of what was saved has changed, and the script has made no error."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import NoReturn

from torch.distributed import Store

from perdure_training.checkpoint.planned_state import OfAnotherWorld
from perdure_training.checkpoint.state_search import OLDER, REPEATED
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import StorageAway, StorageProblem, find_storage

logger = logging.getLogger(__name__)

_PATIENCE = 3600.0
"""Seconds without an answer of the node's agent after which a rank waits no longer. While it answers, the job decides
how long it waits for nodes, and ends the ranks."""
_KEPT_ALIVE = 10.0
"""Seconds between two reports to the agent that this rank waits, so that its first step is not missed."""
_REPORTED_WITHIN = 60.0
"""Seconds in which the node's agent must take the report."""
_LONGEST_TEXT = 1000
_LOOK = 0.2


def takes_older(own: RankIdentity, store: Store) -> bool:
    """Whether the job continues with an older state where a world of another size would have to come. Every rank of the
    world calls it."""
    if own.rank == 0:
        known = own.known
        accepts = known is not None and (known.accepts_less or known.on_loss == OLDER)
        store.set("takes-older", "yes" if accepts else "no")
    return store.get("takes-older") == b"yes"


def await_other_world(
    own: RankIdentity, error: OfAnotherWorld, *, step: int, source: str, folder: str = ""
) -> NoReturn:
    """Reports, as rank 0, which world can load a state, and waits to be ended. Every rank of the world calls it.

    Args:
        own: This rank.
        error: Why this world cannot load it.
        step: The step that was saved.
        source: "memory" or "storage".
        folder: The checkpoint's folder within the storage.

    Raises:
        OfAnotherWorld: if there is no agent that takes the report, or none has answered for an hour.
    """
    link = find_storage()
    if link is None:
        raise error
    report: Json | None = None
    if own.rank == 0:
        text = str(error.args[0])
        logger.warning(
            "perdure: step %d in %s is not loaded: %s. A world of %d ranks is waited for",
            step,
            source,
            text,
            error.ranks,
        )
        report = {
            "request": "refused",
            "generation": own.generation,
            "step": step,
            "source": source,
            "folder": folder,
            "ranks": error.ranks,
            "refused": text[:_LONGEST_TEXT],
        }
        try:
            link.insist(report, patience=_REPORTED_WITHIN)
        except (StorageAway, StorageProblem) as problem:
            logger.warning("perdure: the job does not learn of it: %s", problem)
            raise error from None
    heard = asked = told = time.monotonic()
    while (now := time.monotonic()) - heard < _PATIENCE:
        if now - asked >= _KEPT_ALIVE:
            asked = now
            with contextlib.suppress(StorageAway, StorageProblem):
                link.ask({"request": "waiting", "generation": own.generation}, within=5.0)
                heard = now
            if report is not None and now - told >= REPEATED:
                # The job alone ends the wait, and may have been reset since.
                told = now
                with contextlib.suppress(StorageAway, StorageProblem):
                    link.ask(report, within=5.0)
        # Signals are handled meanwhile, such as the SIGTERM with which the launcher ends the rank.
        time.sleep(_LOOK)
    raise error
