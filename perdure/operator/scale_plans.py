"""Carries out DLRover's ScalePlan objects for TrainingJobs, each once.

Where a cluster has their definition, a plan whose `ownerJob` is a TrainingJob of its namespace changes that job; plans
for others are left alone. What a plan requests is written into the plan before it is sent, with absolute numbers, so
an operator that ends meanwhile sends the same again, and a job takes each request once. The TrainingJob states the new
numbers of nodes: a plan is one more way to say what `kubectl scale` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from perdure.base.backoff import Backoff
from perdure.base.errors import NotPermitted, PerdureError, Refused
from perdure.base.kubernetes import TRANSIENT, Change, Changed, KubernetesApi, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.client.scale_plans import PlanRequest, describe, translate
from perdure.contract import RelaunchRequest, ScaleRequest
from perdure.operator.events import Events, Occurrence, Subject
from perdure.operator.resource import GROUP, SCALED_ROLES, Metadata, ScaledRole, TrainingJobResource
from perdure.operator.status import Part
from perdure.operator.workqueue import Workqueue
from perdure.spec.errors import SpecError
from perdure.spec.importers import scaleplan
from perdure.spec.importers.reader import as_mapping
from perdure.spec.load import SpecDocument

logger = logging.getLogger("perdure.operator")

REQUESTS: Final = f"{GROUP}/requests"
"""The annotation of a plan with what it requests."""
SCALING: Final = "Scaling"
"""The phase of a plan whose requests were written into it. Before that, its author has written what stands there."""
PER_SECOND: Final = 5.0
"""The limit of plans that are looked at: programs write thousands of them."""
AT_ONCE: Final = 4
"""Plans that are carried out at a time: a job may take seconds to answer."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds before a plan is tried again that could not be carried out yet, or the definition is looked for again."""

_REQUESTS: Final[TypeAdapter[tuple[ScaleRequest | RelaunchRequest, ...]]] = TypeAdapter(
    tuple[ScaleRequest | RelaunchRequest, ...]
)
_API_VERSION: Final = f"{scaleplan.GROUP}/{scaleplan.VERSION}"


class PlanStatus(Part):
    """The status of a plan, with the phases of its definition."""

    phase: str = ""
    """`SCALING`, Succeeded or Failed; as DLRover's own operator has it before."""
    create_time: datetime | None = None
    """When its requests were determined."""
    finish_time: datetime | None = None
    """When the job had accepted or refused them."""

    @property
    def is_over(self) -> bool:
        """Whether it was carried out, or refused."""
        return self.phase in ("Succeeded", "Failed")


class PlanResource(Part):
    """One ScalePlan object."""

    metadata: Metadata
    status: PlanStatus = PlanStatus()
    content: dict[str, Any] = Field(default={}, exclude=True)
    """The object as the API server has it."""

    @classmethod
    def of(cls, thing: dict[str, Any]) -> PlanResource:
        """Reads an object."""
        return cls.model_validate({**thing, "content": thing})

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"{collection(self.metadata.namespace)}/{self.metadata.name}"

    @property
    def subject(self) -> Subject:
        """The subject of its Events."""
        return Subject(api_version=_API_VERSION, kind=scaleplan.KIND, metadata=self.metadata)


def collection(namespace: str | None = None) -> str:
    """The path of all plans of a namespace, or of all namespaces."""
    within = f"namespaces/{namespace}/" if namespace else ""
    return f"/apis/{_API_VERSION}/{within}{scaleplan.PLURAL}"


class Jobs(Protocol):
    """The TrainingJobs of an operator."""

    def hold(self, namespace: str, name: str) -> AbstractAsyncContextManager[TrainingJobResource | None]:
        """Yields a job's object, which is not reconciled meanwhile; None where there is none."""
        ...

    def take(self, resource: TrainingJobResource) -> None:
        """Takes in a change of an object, and has it reconciled."""
        ...


class ScalePlans:
    """The plans of one operator."""

    def __init__(self, api: KubernetesApi, client: Client, jobs: Jobs) -> None:
        self._api = api
        self._client = client
        self._jobs = jobs
        self._events = Events(api)
        self._plans: dict[str, PlanResource] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._queue = Workqueue(per_second=PER_SECOND, tenant_of=self._namespace_of, at_once=1)

    async def follow(self, namespace: str | None) -> None:
        """Follows the plans of a namespace, or of all, for as long as it is not cancelled."""
        path, backoff, told = collection(namespace), Backoff(FIRST_PAUSE, LONGEST_PAUSE), ""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                async with contextlib.aclosing(self._api.follow(path)) as changes:
                    async for change in changes:
                        self._take(change, namespace)
            except Exception as error:
                # Most clusters have no such definition, and TrainingJobs are served without it.
                absent = isinstance(error, KubernetesError) and error.status == 404
                if str(error) != told and not absent:
                    logger.warning("ScalePlans are not carried out: %s", error)
                told = str(error)
            self._forget_all_but(set(), namespace)
            await asyncio.sleep(backoff.next_pause(ran=loop.time() - began))

    async def serve(self) -> None:
        """Carries out plans until it is cancelled, those of each namespace one after the other."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._queue.serve(self._look))

    def _take(self, change: Change, namespace: str | None) -> None:
        match change:
            case Listed(objects):
                self._forget_all_but({self._see(thing) for thing in objects}, namespace)
            case Changed(thing):
                self._see(thing)
            case Removed(thing):
                self._forget(thing["metadata"]["uid"])

    def _see(self, thing: dict[str, Any]) -> str:
        uid: str = thing["metadata"]["uid"]
        try:
            plan = PlanResource.of(thing)
        except ValidationError as error:
            logger.error("the ScalePlan %s cannot be read: %s", thing["metadata"].get("name"), error)
            return uid
        if plan.status.is_over:
            self._forget(uid)
        else:
            is_new = uid not in self._plans
            self._plans[uid] = plan
            if is_new:
                self._queue.plan(uid)
        return uid

    def _namespace_of(self, uid: str) -> str:
        plan = self._plans.get(uid)
        return "" if plan is None else plan.metadata.namespace

    def _forget_all_but(self, uids: set[str], namespace: str | None) -> None:
        known = {uid for uid, plan in self._plans.items() if namespace in (None, plan.metadata.namespace)}
        for uid in known - uids:
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        self._plans.pop(uid, None)
        self._backoffs.pop(uid, None)
        self._queue.forget(uid)

    async def _look(self, uid: str) -> None:
        plan = self._plans.get(uid)
        if plan is None:
            return
        try:
            try:
                async with self._jobs.hold(plan.metadata.namespace, _job_of(plan)) as job:
                    if job is None or not job.status.run_id:
                        # It is another system's, or its job is not there yet.
                        self._later(uid)
                        return
                    await self._carry_out(plan, job)
            except NotPermitted:
                raise
            except (SpecError, Refused) as error:
                await self._end(plan, "Failed", str(error))
        except Exception as error:
            # Whatever one plan contains, and the API server answers, the other plans and all jobs are served.
            self._later(uid, error)

    def _later(self, uid: str, error: Exception | None = None) -> None:
        plan = self._plans.get(uid)
        if plan is None:
            # It was deleted meanwhile.
            return
        pause = self._backoffs.setdefault(uid, Backoff(FIRST_PAUSE, LONGEST_PAUSE)).next_pause()
        if error is not None:
            expected = isinstance(error, (PerdureError, KubernetesError, OSError, *TRANSIENT))
            logger.warning("%s: tried again in %.0f s: %s", plan.subject, pause, error, exc_info=not expected)
        self._queue.plan(uid, after=pause)

    async def _carry_out(self, plan: PlanResource, job: TrainingJobResource) -> None:
        requests = await self._requests(plan, job)
        for number, request in enumerate(requests):
            key = f"scale-plan-{plan.metadata.uid}-{number}"
            try:
                if isinstance(request, RelaunchRequest):
                    await self._send(job, request, key)
                else:
                    job = await self._scale(plan, job, request, key)
            except Refused as error:
                if isinstance(error, NotPermitted) or not number:
                    raise
                done = "; ".join(describe(one) for one in requests[:number])
                raise Refused(f"{error}. Carried out before that: {done}") from error
        await self._end(plan, "Succeeded", "; ".join(describe(request) for request in requests))

    async def _requests(self, plan: PlanResource, job: TrainingJobResource) -> tuple[PlanRequest, ...]:
        """Returns what the plan requests, which is written into it."""
        written = plan.metadata.annotations.get(REQUESTS)
        if written and plan.status.phase == SCALING:
            return _written(written, job)
        read = scaleplan.read_scale_plan(SpecDocument(data=plan.content, lines={}, folder=None))
        reason = f"the ScalePlan {plan.metadata.name}"
        requests = await translate(
            self._client, read, job.metadata.name, namespace=job.metadata.namespace, reason=reason
        )
        if read.warnings:
            text = "\n".join(str(warning) for warning in read.warnings)
            await self._events.write(plan.subject, Occurrence(reason="LeftOut", message=text, warning=True))
        await self._patch(plan, "", {"metadata": {"annotations": {REQUESTS: _REQUESTS.dump_json(requests).decode()}}})
        status = plan.status.model_copy(update={"phase": SCALING, "create_time": datetime.now(UTC)})
        await self._patch(plan, "/status", {"status": _dump(status)})
        return requests

    async def _scale(
        self, plan: PlanResource, job: TrainingJobResource, request: ScaleRequest, key: str
    ) -> TrainingJobResource:
        """Has the job take the new number of nodes, and then its object state it."""
        role = request.role or ""
        content = _statement(plan, job, role, int(request.nodes))
        changed = job.model_copy(
            update={
                "spec": {**job.spec, **content.get("spec", {})},
                "metadata": job.metadata.model_copy(
                    update={"annotations": {**job.metadata.annotations, **_annotations(content)}}
                ),
            }
        )
        nodes = str(changed.job()[0].roles[role].nodes)
        await self._send(job, request.replace(nodes=nodes), key)
        made = await self._api.patch(job.path, _guarded(content, job.metadata.uid))
        if made is None:
            return job
        resource = TrainingJobResource.model_validate(made)
        self._jobs.take(resource)
        return resource

    async def _send(self, job: TrainingJobResource, request: PlanRequest, key: str) -> None:
        logger.info("%s: %s, by %s", job.workflow_id, describe(request), request.reason)
        await self._client.change(job.metadata.name, request, namespace=job.metadata.namespace, key=key)

    async def _end(self, plan: PlanResource, phase: str, message: str) -> None:
        now, known = datetime.now(UTC), self._plans.get(plan.metadata.uid, plan)
        ended = {"phase": phase, "create_time": known.status.create_time or now, "finish_time": now}
        await self._patch(plan, "/status", {"status": _dump(plan.status.model_copy(update=ended))})
        logger.info("%s: %s: %s", plan.subject, phase, message)
        await self._events.write(plan.subject, Occurrence(reason=phase, message=message, warning=phase == "Failed"))
        self._forget(plan.metadata.uid)

    async def _patch(self, plan: PlanResource, part: str, content: dict[str, Any]) -> None:
        await self._api.patch(f"{plan.path}{part}", _guarded(content, plan.metadata.uid))


def _written(text: str, job: TrainingJobResource) -> tuple[PlanRequest, ...]:
    """Reads what the operator has written into a plan, which its author can change afterwards.

    Raises:
        Refused: if it is nothing that the operator has written for a plan of this job.
    """
    try:
        requests = _REQUESTS.validate_json(text)
    except ValidationError:
        raise Refused(_CHANGED) from None
    roles = job.job()[0].roles
    for request in requests:
        is_number = isinstance(request, RelaunchRequest) or (
            request.scaling is None and _NUMBER.fullmatch(request.nodes)
        )
        if not is_number or request.role not in roles:
            raise Refused(_CHANGED)
    return requests


_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_CHANGED: Final = (
    f"its annotation {REQUESTS}, which has what the operator determined, was changed meanwhile. Create a new plan"
)


def _statement(plan: PlanResource, job: TrainingJobResource, role: str, nodes: int) -> dict[str, Any]:
    """Returns what makes a job's object state a number of nodes of a role, and changes nobody's ownership."""
    if role == job.leading_role:
        return {"spec": {"replicas": nodes}}
    stated = ScaledRole(stated=job.stated_nodes(role), nodes=nodes, plan=plan.metadata.name)
    scaled = {name: known.model_dump() for name, known in {**job.scaled_roles, role: stated}.items()}
    return {"metadata": {"annotations": {SCALED_ROLES: json.dumps(scaled)}}}


def _annotations(content: dict[str, Any]) -> dict[str, str]:
    return content.get("metadata", {}).get("annotations", {})


def _guarded(content: dict[str, Any], uid: str) -> dict[str, Any]:
    """Returns the content with the uid, which protects an object that was created again under the same name."""
    return {**content, "metadata": {**content.get("metadata", {}), "uid": uid}}


def _dump(status: PlanStatus) -> dict[str, JsonValue]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _job_of(plan: PlanResource) -> str:
    try:
        return scaleplan.read_scale_plan(SpecDocument(data=plan.content, lines={}, folder=None)).job
    except SpecError:
        owner = (as_mapping(plan.content.get("spec")) or {}).get("ownerJob")
        return owner if isinstance(owner, str) else ""
