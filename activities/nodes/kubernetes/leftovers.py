"""Finds and deletes objects of closed jobs that were left in a cluster.

A job's group normally ends only after nothing of it remains. A group that was terminated, or whose workers never came
back, cannot ensure that. All objects of a job belong to its anchor, which names the job's workflow and run. If that
workflow is closed and none of its groups runs, no other process will delete the anchor, so this module does; the
cluster's garbage collector then deletes the other objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.activities.nodes.kubernetes.naming import OURS, UID, selector
from perdure.agent.job_liveness import JobLiveness, has_groups, query_job_liveness
from perdure.base.executions import list_executions, quoted
from perdure.base.kubernetes import TRANSIENT, KubernetesApi, Object, core_path
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract.names import TRAINING_JOB, job_workflow_id

logger = logging.getLogger(__name__)

INTERVAL = timedelta(minutes=10)
"""Interval between two searches. Each queries Temporal once for its jobs, and the API server once for each of their
namespaces."""

YOUNG = timedelta(minutes=5)
"""Minimum age of a leftover: visibility lags, and may not show a group that has just begun."""

JOBS_AT_ONCE = 1000
"""Jobs that are listed together; after them only those of other namespaces are."""

_MOST_LISTS = 100

_AT_ONCE = 8
"""Jobs that are asked about at a time."""

_CALL_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Leftover:
    """The anchor of a closed job."""

    namespace: str
    name: str
    uid: str
    """The anchor object's uid."""
    job_id: str

    @property
    def path(self) -> str:
        """The API's path of the object."""
        return f"{core_path(self.namespace, 'configmaps')}/{self.name}"


async def keep_tidy(
    api: KubernetesApi, client: Client, *, interval: timedelta = INTERVAL, young: timedelta = YOUNG
) -> None:
    """Deletes leftovers now and after every interval. Errors are logged, and the next run tries again."""
    while True:
        try:
            for leftover in await find_leftovers(api, client, young=young):
                await _delete(api, leftover)
        except Exception as error:
            logger.warning("leftovers of closed jobs could not be deleted: %s", error)
        await asyncio.sleep(interval.total_seconds())


async def _delete(api: KubernetesApi, leftover: Leftover) -> None:
    """Deletes one leftover; a namespace that forbids it keeps its own only."""
    logger.warning("%s is closed: deleting its ConfigMap %s", leftover.job_id, leftover.name)
    try:
        await api.delete(leftover.path, uid=leftover.uid)
    except (KubernetesError, *TRANSIENT) as error:
        logger.warning("%s is not deleted: %s", leftover.path, error or type(error).__name__)


async def find_leftovers(
    api: KubernetesApi, client: Client, namespaces: Iterable[str] | None = None, *, young: timedelta = YOUNG
) -> list[Leftover]:
    """Returns the anchors of jobs of this Temporal namespace that are closed and have no group left.

    Args:
        api: the cluster's API server.
        client: a client of the Temporal namespace whose jobs count; anchors of other jobs are ignored.
        namespaces: the namespaces of pods to search; by default those of the jobs that Temporal remembers.
        young: the minimum age of an anchor.

    Raises:
        RPCError: if Temporal does not answer.
    """
    found: list[Leftover] = []
    for namespace in await _namespaces(client) if namespaces is None else namespaces:
        try:
            anchors = await api.list(core_path(namespace, "configmaps"), labels=f"{selector(OURS)},{UID}")
        except (KubernetesError, *TRANSIENT) as error:
            logger.info("the leftovers in namespace %s are unknown: %s", namespace, error or type(error).__name__)
            continue
        found += await _left_over_of(anchors, client, young=young)
    return found


async def _left_over_of(anchors: Iterable[Object], client: Client, *, young: timedelta) -> list[Leftover]:
    """Those of a namespace's anchors that are left over."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def look_at(anchor: Object) -> Leftover | None:
        async with slots:
            try:
                return _leftover(anchor) if await _is_left_over(anchor, client, young=young) else None
            except RPCError as error:
                # Users can write such a ConfigMap, too. One that names no workflow must keep no other from being
                # found, and neither must a job of which the server does not tell.
                if error.status is RPCStatusCode.UNAVAILABLE:
                    raise
                metadata = anchor["metadata"]
                logger.info("%s/%s may be no anchor: %s", metadata["namespace"], metadata["name"], error)
                return None

    found = await asyncio.gather(*map(look_at, anchors))
    return [leftover for leftover in found if leftover is not None]


async def _namespaces(client: Client) -> set[str]:
    """The namespaces of all jobs that Temporal remembers, those with the newest jobs first."""
    found: set[str] = set()
    for _ in range(_MOST_LISTS):
        others = "".join(f" AND WorkflowId NOT STARTS_WITH {quoted(job_workflow_id(one, ''))}" for one in sorted(found))
        query = f"WorkflowType = '{TRAINING_JOB}' AND WorkflowId STARTS_WITH 'job/'{others}"
        jobs = list_executions(client, query, limit=JOBS_AT_ONCE, rpc_timeout=_CALL_TIMEOUT)
        new = {job.id.split("/")[1] async for job in jobs} - found
        if not new:
            break
        found |= new
    return found


async def _is_left_over(anchor: Object, client: Client, *, young: timedelta) -> bool:
    metadata = anchor["metadata"]
    made = datetime.fromisoformat(metadata["creationTimestamp"])
    if metadata.get("deletionTimestamp") or datetime.now(UTC) - made < young:
        return False
    job_id, run_id = (metadata.get("annotations", {}).get(f"perdure.dev/{key}", "") for key in ("workflow", "run"))
    if not (job_id and run_id):
        return False
    liveness = await query_job_liveness(client, job_id=job_id, first_run_id=run_id, rpc_timeout=_CALL_TIMEOUT)
    if liveness is not JobLiveness.CLOSED:
        # A job that this Temporal namespace does not know may be another namespace's.
        return False
    return not await has_groups(client, job_id, metadata["labels"][UID], rpc_timeout=_CALL_TIMEOUT)


def _leftover(anchor: Object) -> Leftover:
    metadata = anchor["metadata"]
    return Leftover(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job_id=metadata["annotations"]["perdure.dev/workflow"],
    )
