"""Gives back the memory of launchers and agents that were killed, once nothing will start them again.

The launchers of a machine do the same. But the last job of a machine may be the one that is killed.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path

from perdure_launcher.system.memory_folder import (
    COPIES_PREFIX,
    DELETE_INTERVAL,
    MEMORY_PREFIX,
    ROOT,
    delete_abandoned,
)

logger = logging.getLogger(__name__)


async def keep_free(root: Path = ROOT, *, interval: timedelta = DELETE_INTERVAL) -> None:
    """Deletes folders that were abandoned for long, now and after every interval. Errors are logged, and the next run
    tries again."""
    while True:
        for prefix in (MEMORY_PREFIX, COPIES_PREFIX):
            try:
                await asyncio.to_thread(delete_abandoned, root, prefix=prefix)
            except OSError as error:
                logger.error("the memory of killed nodes cannot be given back: %s", error)
        await asyncio.sleep(interval.total_seconds())
