"""Reconciles one object with its run: starts it, applies changes to it, mirrors its status, ends it.

Every decision rests on the current state only, so reconciling may be repeated, or be interrupted at any point. The run
itself holds the uid of its object. So neither an operator that restarts nor an object that is created again mistakes
another object's run for its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from perdure.base.errors import JobAlreadyRunning, PerdureError, Refused
from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.views import FINAL_PHASES
from perdure.contract import JobPhase, JobStatus, RoleStatus
from perdure.operator import status as statuses
from perdure.operator.changes import refusal_of_changes
from perdure.operator.definition import Definition
from perdure.operator.events import Events
from perdure.operator.owners import Owners
from perdure.operator.resource import FINALIZER, TrainingJobResource
from perdure.operator.runs import Run, Runs
from perdure.operator.status import Observed, ResourceStatus
from perdure.spec.errors import SpecError, format_value
from perdure.spec.job import Backend, JobSpec
from perdure.spec.running import scaling_mapping

BACKENDS = (Backend.KUBERNETES, Backend.JOINED)
"""The backends that objects may name by default. The API server's rights bound what a job does in pods of its
namespace, and machines that join are given by their own users. Other backends run it with the rights of the worker, or
of a Ray cluster, which the user who wrote the object may not have."""
SOON = 1.0
"""Seconds until the next reconcile of a job with an operation in flight."""
REFRESH = 10.0
"""Seconds until the next reconcile of a running job, which is the age of the step in its status."""
RETRY = 30.0
"""Seconds until the next reconcile if only others can change the situation."""

_OVER = (JobPhase.SUCCEEDED, JobPhase.FAILED)
"""Phases of roles without which the job continues."""
_AT_REST = (JobPhase.RUNNING, JobPhase.SUSPENDED, JobPhase.WAITING, JobPhase.HELD)

logger = logging.getLogger("perdure.operator")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The result of a reconcile."""

    resource: TrainingJobResource
    """The object after the reconcile."""
    again: float | None = None
    """Seconds until the next reconcile; None: after the next event."""


class Reconciler:
    """Reconciles objects, one at a time or several at once, but never the same one twice at once."""

    def __init__(
        self, api: KubernetesApi, runs: Runs, owners: Owners, *, backends: Collection[Backend] = BACKENDS
    ) -> None:
        self._api = api
        self._runs = runs
        self._owners = owners
        self._backends = backends
        self._events = Events(api)
        self._definition = Definition(api)
        self._dropped: Set[str] = frozenset()
        """Fields of statuses that the cluster's definition, of an older release, does not have."""

    async def look(self, resource: TrainingJobResource) -> Looked:
        """Reconciles one object with its run.

        Raises:
            KubernetesError: if the API server refuses.
            PerdureError: if Temporal does not answer or refuses.
        """
        if resource.deleting:
            return await self._end(resource)
        if resource.status.finished:
            return await self._stay_ended(await self._released(resource))
        latest = await self._runs.find(resource)
        if (run := await self._own(resource, latest)) is not None:
            return await self._mirror(resource, run)
        if resource.status.run_id:
            text = f"Temporal no longer has {resource.workflow_id}, run {resource.status.run_id}"
            return await self._show(resource, _unknown(resource, "RunNotFound", text), again=RETRY)
        return await self._begin(resource, latest)

    async def _own(self, resource: TrainingJobResource, latest: Run | None) -> Run | None:
        """The run of the object, by the latest one of its name."""
        if latest is not None and _belongs(latest, resource):
            return latest
        if not resource.status.run_id or (latest is not None and latest.first_run_id == resource.status.run_id):
            return None
        # Since it has ended, a user may have started another job under its name.
        ended = await self._runs.find_ended(resource)
        return ended if ended is not None and _belongs(ended, resource) else None

    async def doubt(self, resource: TrainingJobResource, error: PerdureError | KubernetesError) -> Looked:
        """Shows in the status what keeps the object from being reconciled: who does not answer, or who refuses.

        Of a job that has ended everything is known, and nothing would take the doubt back.
        """
        if resource.status.finished and not resource.deleting:
            return Looked(resource=resource)
        remedy = error.remedy if isinstance(error, PerdureError) else "See docs/kubernetes-resource.md."
        reason = type(error).__name__ if isinstance(error, PerdureError) else error.reason
        return await self._show(resource, _unknown(resource, reason, f"{error}. {remedy}".strip()))

    async def _begin(self, resource: TrainingJobResource, other: Run | None) -> Looked:
        at = _observed(resource)
        try:
            job, warnings = resource.job()
        except SpecError as error:
            return await self._refuse(resource, "InvalidSpec", str(error))
        if job.backend not in self._backends:
            return await self._refuse(resource, "Forbidden", _not_served(job.backend, self._backends))
        adopted, used = other if other is not None and other.open else None, job
        if adopted is not None:
            running = await self._runs.spec_of(adopted) if adopted.object_uid else None
            if running is None or refusal_of_changes(running, job, completed=adopted.continued):
                return await self._refuse(resource, "NameTaken", _name_taken(resource), again=RETRY)
            if await self._is_ending(resource):
                return await self._refuse(resource, "NameTaken", _NAME_IS_FREE_SOON, again=REFRESH)
            # The job of an earlier object, perhaps of another owner, may use more than this object states.
            used = running
        if refusal := await self._owners.refusal(resource, used):
            # Only others can change that: those who grant rights.
            return await self._refuse(resource, "Forbidden", refusal, again=RETRY)
        message = "\n".join(str(warning) for warning in warnings)
        status = statuses.accepted_status(resource.status, message, at)
        if adopted is not None:
            return await self._adopt(resource, adopted, status)
        if resource.suspended:
            return await self._show(resource, statuses.held_status(status, at))
        resource = await self._protected(resource)
        try:
            submission = await self._runs.start(job, resource, owner=self._owners.name_of(resource))
        except JobAlreadyRunning:
            # Another process, perhaps another operator, has started it since the query.
            return Looked(resource=resource, again=SOON)
        logger.info("%s: started as run %s", submission.workflow_id, submission.run_id)
        status = statuses.update_status(
            status,
            phase=JobPhase.STARTING.value,
            workflow_id=submission.workflow_id,
            run_id=submission.run_id,
            page=submission.page,
        )
        return await self._show(resource, status, again=SOON)

    async def _is_ending(self, resource: TrainingJobResource) -> bool:
        """Whether the open run of the object's name trains no more, such as that of a deleted object whose finalizer a
        user has removed: what adopts it would end with it."""
        phase = (await self._runs.status(resource)).phase
        return phase in (JobPhase.HELD, JobPhase.STOPPING) or phase in FINAL_PHASES

    async def _adopt(self, resource: TrainingJobResource, run: Run, status: ResourceStatus) -> Looked:
        """Makes the open run the object's: an earlier object of this name started it with the same specification. That
        object is gone without the end of its job, as when the definition was removed."""
        resource = await self._protected(resource)
        logger.info("%s: adopted run %s of an earlier object", run.workflow_id, run.first_run_id)
        status = statuses.adopted_status(status, run.workflow_id, run.first_run_id, _observed(resource))
        return await self._show(resource, status, again=SOON)

    async def _protected(self, resource: TrainingJobResource) -> TrainingJobResource:
        """Returns the object with the finalizer that keeps it until its job has ended."""
        if FINALIZER in resource.metadata.finalizers:
            return resource
        return await self._with_finalizers(resource, (*resource.metadata.finalizers, FINALIZER))

    async def _mirror(self, resource: TrainingJobResource, run: Run, status: ResourceStatus | None = None) -> Looked:
        if run.open and not resource.deleting:
            # `kubectl replace`, for one, removes finalizers, and the object's deletion would no longer end the job.
            resource = await self._protected(resource)
        generation = resource.metadata.generation
        status = statuses.update_status(
            status or resource.status, workflow_id=run.workflow_id, run_id=run.first_run_id, page=run.page
        )
        judged = status if status.accepts(generation) else await self._judge(resource, run, status)
        if not run.open:
            result, job = await self._runs.result(resource, run)
            logger.info("%s: %s", run.workflow_id, result.phase)
            # Of a change that came too late the next look tells.
            status = judged if judged.accepts(generation) else status
            status = statuses.ended_status(status, result, job, _observed(resource))
            return await self._show(resource, status, again=SOON)
        job = await self._runs.status(resource)
        if judged.accepts(generation):
            try:
                if await self._carry(resource, job, edited=not status.accepts(generation)):
                    job = await self._runs.status(resource)
            except (Refused, SpecError) as error:
                # Perhaps only for now, such as while a role is being suspended: the next look requests it again.
                judged = statuses.refused_status(status, "ChangeRefused", str(error), _observed(resource))
        status = judged
        if job.phase in FINAL_PHASES:
            # It has ended since it was found to run, and the next look has its result.
            return Looked(resource=resource, again=SOON)
        leading = await self._runs.leading_role(resource, job)
        step = await self._runs.step(leading)
        status = statuses.running_status(status, job, step, _observed(resource), leading=leading)
        return await self._show(resource, status, again=REFRESH if job.phase in _AT_REST else SOON)

    async def _judge(self, resource: TrainingJobResource, run: Run, status: ResourceStatus) -> ResourceStatus:
        """Sets the condition that says whether the running job can follow its object's current specification.

        What the object was refused for before its job was started, or by the job itself, may not hold any more.
        """
        at = _observed(resource)
        try:
            desired, warnings = resource.job()
            refusal = refusal_of_changes(await self._runs.spec_of(run), desired, completed=run.continued)
        except SpecError as error:
            return statuses.refused_status(status, "InvalidSpec", str(error), at)
        if refusal:
            return statuses.refused_status(status, "ChangeRefused", refusal, at)
        message = "\n".join(str(warning) for warning in warnings)
        return statuses.accepted_status(status, message, at)

    async def _carry(self, resource: TrainingJobResource, job: JobStatus, *, edited: bool = False) -> bool:
        """Applies the object's changes to the running job; returns whether there were any.

        Args:
            resource: The object.
            job: The job.
            edited: Whether the object was changed since its changes were applied last. Only then a role with
                `nodes: auto`, whose number the job has chosen itself, is set to that number again.
        """
        if job.phase in (JobPhase.HELD, JobPhase.STOPPING) or job.phase in FINAL_PHASES:
            return False
        running = {one.name: (one.nodes_min, one.nodes_allowed) for one in job.by_role}
        running = running or {job.role: (job.nodes_min, job.nodes_allowed)}
        desired = resource.job()[0]
        nodes = {
            name: str(role.nodes)
            for name, role in desired.roles.items()
            if (role.nodes.min, role.nodes.max) != running.get(name) and (edited or not role.nodes.auto)
        }
        goals = _new_goals(resource, desired, job)
        scaled = nodes.keys() | goals.keys()
        switches = resource.suspended != _is_suspended(resource, job)
        for role in sorted(scaled):
            to, goal = nodes.get(role, ""), goals.get(role)
            logger.info(
                "%s: %s scaled to %s", resource.workflow_id, role, " ".join(filter(None, (to, str(goal or ""))))
            )
            await self._runs.scale(resource, role, to, goal)
        if switches:
            logger.info("%s: %s", resource.workflow_id, "suspended" if resource.suspended else "resumed")
            await self._runs.suspend(resource, suspended=resource.suspended)
        role = None if switches else _role_to_switch(resource, job)
        if role is not None:
            suspended = not role.suspended_alone
            logger.info("%s: %s %s", resource.workflow_id, role.name, "suspended" if suspended else "resumed")
            await self._runs.suspend(resource, suspended=suspended, role=role.name)
        return bool(scaled) or switches or role is not None

    async def _end(self, resource: TrainingJobResource) -> Looked:
        """Ends the job of an object that a user deletes; the object is released when the job's nodes are gone.

        Where the definition is being removed, the job continues, and its end releases the object.
        """
        if FINALIZER not in resource.metadata.finalizers:
            return Looked(resource=resource)
        run = await self._runs.find(resource)
        if run is not None and _belongs(run, resource):
            if run.open and await self._definition.deletes(resource):
                kept = statuses.kept_status(resource.status, _observed(resource))
                return await self._mirror(resource, run, kept)
            if run.open:
                await self._runs.cancel(run)
                status = statuses.update_status(resource.status, phase=JobPhase.STOPPING.value)
                return await self._show(resource, status, again=SOON)
        resource = await self._released(resource)
        return Looked(resource=resource, again=SOON if FINALIZER in resource.metadata.finalizers else None)

    async def _released(self, resource: TrainingJobResource) -> TrainingJobResource:
        """Returns the object without its finalizer, unless its job has nodes.

        Once the job has ended nothing is left to do for the object: its deletion, perhaps together with its namespace,
        then needs neither an operator nor the operator's rights.
        """
        if FINALIZER not in resource.metadata.finalizers:
            return resource
        run = await self._own(resource, await self._runs.find(resource))
        if run is not None and (run.open or await self._runs.has_nodes(run)):
            return resource
        logger.info("%s: its object can be deleted", resource.workflow_id)
        return await self._with_finalizers(
            resource, tuple(one for one in resource.metadata.finalizers if one != FINALIZER)
        )

    async def _stay_ended(self, resource: TrainingJobResource) -> Looked:
        if FINALIZER in resource.metadata.finalizers:
            return Looked(resource=resource, again=SOON)
        left = _time_left(resource)
        if left is not None and left <= 0:
            return await self._delete(resource)
        if resource.status.observed_generation == resource.metadata.generation:
            return Looked(resource=resource, again=left)
        text = (
            "the job has ended, and only ttl_after_finished of its object still has an effect; "
            "delete the object to apply it again"
        )
        return await self._refuse(resource, "Ended", text, again=left)

    async def _delete(self, resource: TrainingJobResource) -> Looked:
        """Deletes an object whose time has elapsed; shows there who does not let the operator do it."""
        try:
            await self._api.delete(resource.path, uid=resource.metadata.uid, insist=False)
        except KubernetesError as error:
            if not error.denied:
                raise
            text = (
                f"ttl_after_finished has elapsed, and the operator may not delete the object: {error}. Delete it "
                "yourself, or have an administrator change that"
            )
            return await self._refuse(resource, "NotDeleted", text, again=RETRY)
        logger.info("%s: its object is deleted, because its ttl_after_finished has elapsed", resource.workflow_id)
        return Looked(resource=resource)

    async def _refuse(
        self, resource: TrainingJobResource, reason: str, message: str, *, again: float | None = None
    ) -> Looked:
        status = statuses.refused_status(resource.status, reason, message, _observed(resource))
        return await self._show(resource, status, again=again)

    async def _show(
        self, resource: TrainingJobResource, status: ResourceStatus, *, again: float | None = None
    ) -> Looked:
        """Writes the status if it differs from the current one."""
        before = resource.status.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        after = status.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if before == {name: value for name, value in after.items() if name not in self._dropped}:
            return Looked(resource=resource, again=again)
        gone = dict.fromkeys(before.keys() - after.keys())
        patched = await self._patch(resource, "/status", {"status": {**after, **gone}})
        self._note_dropped(patched, after)
        await self._events.record(resource, resource.status, status)
        return Looked(resource=patched, again=again)

    def _note_dropped(self, patched: TrainingJobResource, written: Mapping[str, Any]) -> None:
        """Takes note of the fields of a status that did not arrive: to write them again and again would not help."""
        arrived = patched.status.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        missing = written.keys() - arrived.keys()
        if new := sorted(missing - self._dropped):
            logger.warning(
                "the definition of TrainingJobs is older than this operator and drops %s: apply "
                "deploy/crds/trainingjobs.yaml of this release",
                ", ".join(f"status.{name}" for name in new),
            )
        self._dropped = (self._dropped | missing) - arrived.keys()

    async def _with_finalizers(self, resource: TrainingJobResource, finalizers: tuple[str, ...]) -> TrainingJobResource:
        """Writes the whole list of finalizers; the write fails if another process has changed it meanwhile."""
        metadata = {"finalizers": list(finalizers), "resourceVersion": resource.metadata.resource_version}
        return await self._patch(resource, "", {"metadata": metadata})

    async def _patch(self, resource: TrainingJobResource, part: str, content: dict[str, Any]) -> TrainingJobResource:
        """Patches the object. The uid in the patch protects an object that was created again under the same name."""
        metadata = {**content.get("metadata", {}), "uid": resource.metadata.uid}
        # In a namespace that is being deleted the right may be gone for good: others are served meanwhile.
        insist = not resource.deleting
        made = await self._api.patch(f"{resource.path}{part}", {**content, "metadata": metadata}, insist=insist)
        return resource if made is None else TrainingJobResource.model_validate(made)


def _new_goals(resource: TrainingJobResource, desired: JobSpec, job: JobStatus) -> dict[str, dict[str, Any]]:
    """The `scaling` of each role that the job has not, as the object states it.

    Where it states none, an administrator's preset may have.
    """
    known = {one.name: one.goal for one in job.by_role} or {job.role: job.goal}
    stated = {name: scaling_mapping(role.scaling) for name, role in desired.roles.items()}
    return {
        name: goal
        for name, goal in stated.items()
        if (running := known.get(name)) is not None and goal != running and (goal or desired.runtime is None)
    }


def _is_suspended(resource: TrainingJobResource, job: JobStatus) -> bool:
    """Whether the whole job is suspended, or is to be; if each of its roles is so by itself, it is what its object
    states."""
    if job.suspending:
        return True
    alone = [role.suspended_alone for role in job.by_role if role.phase not in _OVER]
    return job.phase is JobPhase.SUSPENDED and (resource.suspended or not alone or not all(alone))


def _role_to_switch(resource: TrainingJobResource, job: JobStatus) -> RoleStatus | None:
    """The first role that is suspended and should not be, or the reverse.

    One at a time: a job refuses to suspend a role while another one saves before its own suspension.
    """
    roles = [role for role in job.by_role if role.phase not in _OVER]
    if any(role.suspended_alone and role.phase is not JobPhase.SUSPENDED for role in roles):
        return None
    desired = resource.suspensions
    return next((role for role in roles if desired.get(role.name, role.suspended_alone) != role.suspended_alone), None)


def _belongs(run: Run, resource: TrainingJobResource) -> bool:
    """Whether the run is that of the object, which started or adopted it."""
    adopted = bool(run.object_uid) and run.first_run_id == resource.status.run_id
    return run.object_uid == resource.metadata.uid or adopted


def _unknown(resource: TrainingJobResource, reason: str, message: str) -> ResourceStatus:
    return statuses.unknown_status(resource.status, reason, message, _observed(resource))


def _not_served(backend: Backend, served: Collection[Backend]) -> str:
    return (
        f"backend: got {format_value(backend.value)}; this operator starts jobs on {', '.join(served)} only, because "
        "the rights of the object's owner in the cluster do not bound what a job does elsewhere "
        "(`perdure operator --backend`)"
    )


def _name_taken(resource: TrainingJobResource) -> str:
    name, namespace = resource.metadata.name, resource.metadata.namespace
    return (
        f'a job named "{name}" that this object did not start runs in the namespace {namespace}; '
        f"this object waits until it has ended. End it: perdure cancel {name} -n {namespace} --wait. "
        "Or give the object another name"
    )


_NAME_IS_FREE_SOON = (
    "the job of an earlier object of this name is ending; this object waits until its nodes are gone, and then starts "
    "its own"
)


def _time_left(resource: TrainingJobResource) -> float | None:
    """Seconds for which the object of an ended job is kept; None where it is kept indefinitely."""
    lifetime, finished_at = resource.time_to_live, resource.status.finished_at
    return None if lifetime is None or finished_at is None else (lifetime - (_now() - finished_at)).total_seconds()


def _observed(resource: TrainingJobResource) -> Observed:
    return Observed(resource.metadata.generation, _now())


def _now() -> datetime:
    return datetime.now(UTC)
