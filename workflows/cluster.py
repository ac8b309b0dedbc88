"""The workflow of one cluster: it has its machines watched for as long as it runs, and advises jobs that share them.

It keeps sums and what sharing remembers; the detail is with the activity, whose heartbeats add nothing to a history. No
job waits for it: advice is a signal that the job may follow, and without it each job keeps its nodes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import ClusterRef, ClusterSummary
    from perdure.contract.names import CLUSTER, WATCH_CLUSTER, cluster_task_queue, job_workflow_id
    from perdure.workflows import options
    from perdure.workflows.policy.capacity.advice import Advice, SharingState, advise

_HEARTBEAT = timedelta(seconds=30)
"""Another worker takes over after this time."""
_RETRY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(minutes=1))
"""Indefinite: what cannot be seen now may be seen later."""


class ClusterInput(ClusterRef):
    """The argument of a run. A single one: Temporal passes arguments on untyped where the caller leaves some out."""

    carried: SharingState = SharingState()
    """What an earlier run remembers."""


@workflow.defn(name=CLUSTER)
class Cluster:
    """The workflow that watches; see the module."""

    @workflow.init
    def __init__(self, given: ClusterInput) -> None:
        self._state = given.carried
        self._seen: ClusterSummary | None = None
        self._unread = False

    @workflow.run
    async def run(self, given: ClusterInput) -> None:
        watch = workflow.start_activity(
            WATCH_CLUSTER,
            ClusterRef(backend=given.backend),
            task_queue=cluster_task_queue(workflow.info().task_queue, given.backend),
            start_to_close_timeout=options.FOREVER,
            heartbeat_timeout=_HEARTBEAT,
            retry_policy=_RETRY,
            summary=f"watches the machines of {given.backend} until it is cancelled",
        )
        look_at: datetime | None = None
        while not (watch.done() or self._is_full()):
            await self._wait(watch, look_at)
            if not self._unread and (look_at is None or workflow.now() < look_at):
                continue
            look_at = await self._advise()
        workflow.continue_as_new(given.replace(carried=self._state))

    @workflow.signal(description="What the watch has seen of the machines and of the jobs that share them")
    def observed(self, summary: ClusterSummary) -> None:
        self._seen, self._unread = summary, True

    @workflow.query(description="The newest report of the watch")
    def summary(self) -> ClusterSummary | None:
        return self._seen

    def _is_full(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()

    async def _wait(self, watch: workflow.ActivityHandle[None], look_at: datetime | None) -> None:
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._unread or watch.done() or self._is_full(),
                timeout=max(look_at - workflow.now(), timedelta()) if look_at is not None else None,
                timeout_summary="next advice",
            )

    async def _advise(self) -> datetime | None:
        """Advises the jobs, and returns when to look again."""
        self._unread = False
        if self._seen is None:
            return None
        self._state, advice, look_at = advise(self._state, self._seen, workflow.now())
        await asyncio.gather(*(self._send(one) for one in advice))
        return look_at

    async def _send(self, advice: Advice) -> None:
        job = workflow.get_external_workflow_handle(job_workflow_id(advice.namespace, advice.job))
        try:
            await job.signal("suggest_nodes", advice.message)
        except FailureError as error:
            # It has ended meanwhile, and its nodes are free.
            workflow.logger.info("%s/%s takes no advice: %s", advice.namespace, advice.job, error)
