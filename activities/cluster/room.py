"""Tells jobs whose nodes have no machine whether one has room for nodes that request less: `scaling.relax`.

The scheduler says which resource is short, and not how much of it is free. Who watches the machines knows that. A job
that is not told tries it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from temporalio.client import Client
from temporalio.service import RPCError

from perdure.activities.nodes.machines import Machines, Use
from perdure.contract import ClusterJob, RoomSeen
from perdure.contract.names import job_workflow_id
from perdure.spec.quantities import amount

logger = logging.getLogger(__name__)

TOLD_AGAIN: Final = 120.0
"""Seconds after which a job is told again that there is no room: it counts on that for 5 minutes."""
_TOLD_APART: Final = 10.0
"""Seconds between two messages to a job: room comes and goes as other pods do."""
_CALL: Final = timedelta(seconds=10)


def fits_smaller(job: ClusterJob, waiting: Iterable[Use], machines: Machines) -> bool | None:
    """Returns whether a machine has room for a node of the job that requests less; None where that is not asked."""
    use = next((one for one in waiting if one.requests), None)
    if not job.smaller or use is None:
        return None
    requests = {**use.requests, **{what: float(amount(text)) for what, text in job.smaller.items()}}
    return machines.room(use._replace(requests=requests), at_most=1) > 0


class RoomTeller:
    """What each job was told last."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._told: dict[str, tuple[RoomSeen, float]] = {}

    async def tell(self, jobs: Iterable[ClusterJob]) -> None:
        """Tells the jobs for which it has changed."""
        asked = {f"{job.uid}/{job.role}": job for job in jobs if job.fits_smaller is not None}
        self._told = {key: told for key, told in self._told.items() if key in asked}
        for key, job in asked.items():
            seen = RoomSeen(uid=job.uid, role=job.role, requests=job.smaller, fits=bool(job.fits_smaller))
            if self._is_due(key, seen):
                await self._signal(job, seen)
                self._told[key] = (seen, time.monotonic())

    def _is_due(self, key: str, seen: RoomSeen) -> bool:
        told, at = self._told.get(key, (None, 0.0))
        if told is None:
            return True
        return time.monotonic() - at >= (_TOLD_APART if told != seen else TOLD_AGAIN) and not (
            told == seen and seen.fits
        )

    async def _signal(self, job: ClusterJob, seen: RoomSeen) -> None:
        handle = self._client.get_workflow_handle(job_workflow_id(job.namespace, job.job))
        try:
            await handle.signal("room_seen", seen, rpc_timeout=_CALL)
        except RPCError as error:
            # It has ended, or the server is away: the job tries what it may.
            logger.info("%s is not told of the room for its nodes: %s", handle.id, error.message)
