"""Deletes the folders of old nodes. Users come back for their logs, so this happens long after their job's end.

A job without a process here may be suspended, so the server is queried; only a job that the server does not show as
open is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

from temporalio.client import Client

from perdure.activities.nodes.local.folders import NodeFolder, NodeFolders, now
from perdure.base.executions import find
from perdure.contract.names import uid_of

logger = logging.getLogger(__name__)

KEPT_JOBS = 50
"""Number of ended jobs that are kept regardless of age: a user who trains once a month finds the last logs."""

INTERVAL = timedelta(days=1)
"""Interval between two cleanups, for workers that run for months."""

_CALL_TIMEOUT = timedelta(seconds=5)


async def keep_tidy(
    folders: NodeFolders, client: Client, *, kept_jobs: int = KEPT_JOBS, interval: timedelta = INTERVAL
) -> None:
    """Deletes old folders now and after every interval. Errors are logged, and the next run tries again."""
    while True:
        try:
            if deleted := await delete_old_nodes(folders, client, kept_jobs=kept_jobs):
                logger.info("deleted the folders of %d old jobs", deleted)
        except Exception as error:
            logger.error("folders of old nodes could not be deleted: %s", error)
        await asyncio.sleep(interval.total_seconds())


async def delete_old_nodes(folders: NodeFolders, client: Client, *, kept_jobs: int = KEPT_JOBS) -> int:
    """Deletes the nodes of jobs that ended longer ago than the retention, except the newest jobs.

    Returns:
        The number of jobs whose nodes were deleted.

    Raises:
        ValueError: if the state folder's retention is not a duration.
        RPCError: if the server does not answer; nodes of jobs that it was not queried for stay.
    """
    oldest_kept = now() - folders.retention
    at_rest = sorted(await asyncio.to_thread(_at_rest, folders), key=lambda job: job[0], reverse=True)
    deleted = 0
    for since, nodes in at_rest[kept_jobs:]:
        if since < oldest_kept and not await _is_open(client, nodes):
            await asyncio.to_thread(folders.remove, nodes)
            deleted += 1
    return deleted


def _at_rest(folders: NodeFolders) -> list[tuple[datetime, list[NodeFolder]]]:
    """Returns the jobs without a running process here, each with the time since when that holds."""
    found: list[tuple[datetime, list[NodeFolder]]] = []
    for nodes in folders.by_job().values():
        times = [node.at_rest_since for node in nodes]
        ended = [time for time in times if time is not None]
        if len(ended) == len(nodes):
            found.append((max(ended), nodes))
    return found


async def _is_open(client: Client, nodes: list[NodeFolder]) -> bool:
    """Returns whether the run that these nodes belong to is open; a run that the server has forgotten is not."""
    record = next((record for node in nodes if (record := node.record)), None)
    if record is None:
        return False
    newest = await find(client, record.job_id, rpc_timeout=_CALL_TIMEOUT)
    # The name may belong to another run by now: then this run has closed.
    return newest is not None and uid_of(newest.first_run_id) == record.uid and newest.is_open
