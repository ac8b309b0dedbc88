"""Brings one object and its run together: starts it, carries changes to it, mirrors it, ends it.

Everything is decided by what is there now, so it may be repeated, or be cut off at any point. Whether a run is the
object's is written in the run itself, by the object's uid: neither an operator that starts anew nor an object that is
made anew mistakes another's run for its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from activities.nodes.kubernetes.api import KubernetesApi
from perdure.errors import JobAlreadyRunning, PerdureError, Refused
from perdure.operator import status as statuses
from perdure.operator.changes import refusal_of_changes
from perdure.operator.resource import FINALIZER, TrainingJobResource
from perdure.operator.runs import Run, Runs
from perdure.operator.status import ResourceStatus
from perdure.spec.errors import SpecError
from workflows.messages import JobPhase, JobStatus

SOON = 1.0
"""Seconds until the next look at a job with an operation in progress."""
REFRESH = 10.0
"""Seconds until the next look at a job that runs: how old its step may be."""
RETRY = 30.0
"""Seconds until the next look at what only others can change."""

_AT_REST = (JobPhase.RUNNING, JobPhase.SUSPENDED, JobPhase.WAITING, JobPhase.HELD)

logger = logging.getLogger("perdure.operator")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a look came to."""

    resource: TrainingJobResource
    """As it is now."""
    again: float | None = None
    """Seconds until the next look; None is when something happens."""


class Reconciler:
    """Looks at objects, one at a time or several at once, but never twice at the same one."""

    def __init__(self, api: KubernetesApi, runs: Runs) -> None:
        self._api = api
        self._runs = runs

    async def look(self, resource: TrainingJobResource) -> Looked:
        """Brings one object and its run together.

        Raises:
            KubernetesError: if the API server refuses.
            PerdureError: if Temporal does not answer or refuses.
        """
        if resource.deleting:
            return await self._end(resource)
        if resource.status.finished:
            return await self._stay_ended(resource)
        run = await self._runs.find(resource)
        if run is not None and run.object_uid == resource.metadata.uid:
            return await self._mirror(resource, run)
        if resource.status.run_id:
            text = f"Temporal knows nothing of {resource.workflow_id}, run {resource.status.run_id}, any more"
            return await self._show(resource, _unknown(resource, "RunNotFound", text), again=RETRY)
        return await self._begin(resource, run)

    async def doubt(self, resource: TrainingJobResource, error: PerdureError) -> Looked:
        """Shows in the status that no worker answers for the job."""
        text = f"{error} {error.remedy}".strip()
        return await self._show(resource, _unknown(resource, type(error).__name__, text))

    async def _begin(self, resource: TrainingJobResource, other: Run | None) -> Looked:
        generation, now = resource.metadata.generation, _now()
        try:
            job, warnings = resource.job()
        except SpecError as error:
            return await self._refuse(resource, "InvalidSpec", str(error))
        if other is not None and other.open:
            return await self._refuse(resource, "NameTaken", _name_taken(resource), again=RETRY)
        message = "\n".join(str(warning) for warning in warnings)
        status = statuses.accepted(resource.status, message, generation=generation, now=now)
        if resource.suspended:
            return await self._show(resource, statuses.held(status, generation=generation, now=now))
        if FINALIZER not in resource.metadata.finalizers:
            resource = await self._with_finalizers(resource, (*resource.metadata.finalizers, FINALIZER))
        try:
            submission = await self._runs.start(job, resource)
        except JobAlreadyRunning:
            # Since it was looked for; perhaps by another operator.
            return Looked(resource=resource, again=SOON)
        logger.info("%s: started as run %s", submission.workflow_id, submission.run_id)
        status = statuses.changed(
            status,
            phase=JobPhase.STARTING.value,
            workflow_id=submission.workflow_id,
            run_id=submission.run_id,
            page=submission.page,
        )
        return await self._show(resource, status, again=SOON)

    async def _mirror(self, resource: TrainingJobResource, run: Run) -> Looked:
        generation = resource.metadata.generation
        status = statuses.changed(resource.status, workflow_id=run.workflow_id, run_id=run.first_run_id, page=run.page)
        if not run.open:
            result, job = await self._runs.result(resource)
            logger.info("%s: %s", run.workflow_id, result.phase)
            status = statuses.changed(status, observed_generation=generation)
            status = statuses.ended(status, result, job, generation=generation, now=_now())
            return await self._show(resource, status, again=SOON)
        if resource.status.observed_generation != generation:
            status = await self._judge(resource, run, status)
        job = await self._runs.status(resource)
        if status.accepts(generation):
            try:
                if await self._carry(resource, job):
                    job = await self._runs.status(resource)
            except (Refused, SpecError) as error:
                status = statuses.refused(status, "ChangeRefused", str(error), generation=generation, now=_now())
        step = await self._runs.step(job)
        status = statuses.running(status, job, step=step, generation=generation, now=_now())
        return await self._show(resource, status, again=REFRESH if job.phase in _AT_REST else SOON)

    async def _judge(self, resource: TrainingJobResource, run: Run, status: ResourceStatus) -> ResourceStatus:
        """Whether a running job can become what its object says now."""
        generation, now = resource.metadata.generation, _now()
        try:
            wanted, warnings = resource.job()
            refusal = refusal_of_changes(await self._runs.spec_of(run), wanted)
        except SpecError as error:
            return statuses.refused(status, "InvalidSpec", str(error), generation=generation, now=now)
        if refusal:
            return statuses.refused(status, "ChangeRefused", refusal, generation=generation, now=now)
        message = "\n".join(str(warning) for warning in warnings)
        return statuses.accepted(status, message, generation=generation, now=now)

    async def _carry(self, resource: TrainingJobResource, job: JobStatus) -> bool:
        """Changes of a running job what its object says otherwise; returns whether there was anything."""
        if job.phase in (JobPhase.HELD, JobPhase.STOPPING):
            return False
        _, role = resource.job()[0].role
        scales = (role.nodes.min, role.nodes.max) != (job.nodes_min, job.nodes_max)
        switches = resource.suspended != (job.phase is JobPhase.SUSPENDED)
        if scales:
            logger.info("%s: scaled to %s", resource.workflow_id, role.nodes)
            await self._runs.scale(resource, str(role.nodes))
        if switches:
            logger.info("%s: %s", resource.workflow_id, "suspended" if resource.suspended else "resumed")
            await self._runs.suspend(resource, suspended=resource.suspended)
        return scales or switches

    async def _end(self, resource: TrainingJobResource) -> Looked:
        """Ends the job of an object that is being deleted; the object goes when its nodes have."""
        if FINALIZER not in resource.metadata.finalizers:
            return Looked(resource=resource)
        run = await self._runs.find(resource)
        if run is not None and run.object_uid == resource.metadata.uid:
            if run.open:
                await self._runs.cancel(run)
                status = statuses.changed(resource.status, phase=JobPhase.STOPPING.value)
                return await self._show(resource, status, again=SOON)
            if await self._runs.has_nodes(run):
                return Looked(resource=resource, again=SOON)
        logger.info("%s: its object may go", resource.workflow_id)
        left = tuple(one for one in resource.metadata.finalizers if one != FINALIZER)
        return Looked(resource=await self._with_finalizers(resource, left))

    async def _stay_ended(self, resource: TrainingJobResource) -> Looked:
        left = _time_left(resource)
        if left is not None and left <= 0:
            logger.info("%s: its object is deleted, as its ttl_after_finished says", resource.workflow_id)
            await self._api.delete(resource.path, uid=resource.metadata.uid)
            return Looked(resource=resource)
        if resource.status.observed_generation == resource.metadata.generation:
            return Looked(resource=resource, again=left)
        text = "the job has ended, and of its object only ttl_after_finished counts; delete it to apply it again"
        return await self._refuse(resource, "Ended", text, again=left)

    async def _refuse(
        self, resource: TrainingJobResource, reason: str, message: str, *, again: float | None = None
    ) -> Looked:
        generation = resource.metadata.generation
        status = statuses.refused(resource.status, reason, message, generation=generation, now=_now())
        return await self._show(resource, status, again=again)

    async def _show(
        self, resource: TrainingJobResource, status: ResourceStatus, *, again: float | None = None
    ) -> Looked:
        """Writes the status, where it says something new."""
        before = resource.status.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        after = status.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if before == after:
            return Looked(resource=resource, again=again)
        gone = dict.fromkeys(before.keys() - after.keys())
        return Looked(resource=await self._patch(resource, "/status", {"status": {**after, **gone}}), again=again)

    async def _with_finalizers(self, resource: TrainingJobResource, finalizers: tuple[str, ...]) -> TrainingJobResource:
        """The list is written whole, so the write fails if another process has changed it meanwhile."""
        metadata = {"finalizers": list(finalizers), "resourceVersion": resource.metadata.resource_version}
        return await self._patch(resource, "", {"metadata": metadata})

    async def _patch(self, resource: TrainingJobResource, part: str, content: dict[str, Any]) -> TrainingJobResource:
        """The uid keeps an object that was made anew from taking what was meant for the one before."""
        metadata = {**content.get("metadata", {}), "uid": resource.metadata.uid}
        made = await self._api.patch(f"{resource.path}{part}", {**content, "metadata": metadata})
        return resource if made is None else TrainingJobResource.model_validate(made)


def _unknown(resource: TrainingJobResource, reason: str, message: str) -> ResourceStatus:
    generation = resource.metadata.generation
    return statuses.unknown(resource.status, reason, message, generation=generation, now=_now())


def _name_taken(resource: TrainingJobResource) -> str:
    name, namespace = resource.metadata.name, resource.metadata.namespace
    return (
        f'a job named "{name}" that this object did not start runs in the namespace {namespace}; '
        f"it is waited for. End it: perdure cancel {name} -n {namespace} --wait. Or give the object another name"
    )


def _time_left(resource: TrainingJobResource) -> float | None:
    """Seconds for which the object of an ended job still stays; None where it stays indefinitely."""
    lifetime, finished_at = resource.time_to_live, resource.status.finished_at
    return None if lifetime is None or finished_at is None else (lifetime - (_now() - finished_at)).total_seconds()


def _now() -> datetime:
    return datetime.now(UTC)
