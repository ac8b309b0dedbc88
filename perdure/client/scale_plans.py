"""Translates a DLRover ScalePlan to requests to a job: the same ones that `perdure scale` and `perdure restart --node`
make. A plan is carried out as a whole, or refused as a whole, with every field that cannot be honoured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perdure.base.errors import Refused
from perdure.client.recorded_spec import recorded_spec
from perdure.contract import JobStatus, RelaunchRequest, ScaleRequest
from perdure.spec.accepted import read_accepted
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.errors import SpecError, format_value
from perdure.spec.fields import one_of
from perdure.spec.importers.reader import Field
from perdure.spec.importers.scaleplan import PlannedPod, PlannedRole, ScalePlan
from perdure.spec.job import JobSpec
from perdure.spec.quantities import amount

if TYPE_CHECKING:
    from perdure.client.client import Client

PlanRequest = ScaleRequest | RelaunchRequest


@dataclass(frozen=True, kw_only=True)
class KnownRole:
    """What a plan is compared with: a role of the job as it runs."""

    nodes: int
    """The nodes that it may have, as scaled last."""
    requests: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each node requests of `cpu` and `memory`, where the specification or a user says it."""
    gpus: int = 0
    chooses_machines: bool = True
    """What nodes request has a meaning: the job's backend finds machines by it."""


def known_roles(job: JobSpec, statuses: Iterable[JobStatus]) -> dict[str, KnownRole]:
    """Returns the roles of a job.

    Args:
        job: Its specification.
        statuses: Its status for each of its roles.
    """
    return {
        status.role: KnownRole(
            nodes=status.nodes_allowed,
            requests=status.requests,
            gpus=job.roles[status.role].resources.gpu,
            chooses_machines=CAPABILITIES[job.backend].chooses_machines,
        )
        for status in statuses
    }


async def translate(
    client: Client, plan: ScalePlan, name: str, *, namespace: str, reason: str = ""
) -> tuple[PlanRequest, ...]:
    """Returns what a plan requests of a job that runs.

    Raises:
        SpecError: if the plan is for another job, or a field cannot be honoured.
        JobNotFound: if there is no such job.
        Refused: if it has ended.
    """
    if plan.job != name:
        plan.source.root["spec"]["ownerJob"].wrong(f'"{name}", the job to change')
        raise SpecError(plan.source.problems)
    status = await client.status(name, namespace=namespace)
    if status.finished_at:
        raise Refused(f"{name} does not run: it has ended as {status.phase}")
    others = [role for role in status.roles if role != status.role]
    statuses = [status, *[await client.status(name, namespace=namespace, role=role) for role in others]]
    job = read_accepted(await recorded_spec(client, name, namespace=namespace))
    return requests_of(plan, known_roles(job, statuses), reason=reason)


def describe(request: PlanRequest) -> str:
    """Returns what a request does, as a clause that follows "would"."""
    amounts = " and ".join(f"{text} of {name}" for name, text in request.resources.items())
    if isinstance(request, RelaunchRequest):
        return f"replace node {request.rank} of {request.role}" + (f" by one with {amounts}" if amounts else "")
    with_ = f", new nodes with {amounts}" if amounts else ""
    return f"scale {request.role} to {request.nodes} node{'' if str(request.nodes) == '1' else 's'}{with_}"


def requests_of(plan: ScalePlan, roles: Mapping[str, KnownRole], *, reason: str = "") -> tuple[PlanRequest, ...]:
    """Returns what a plan requests, in the order in which to send it.

    Args:
        plan: The plan; fields without a meaning for the job are added to its warnings.
        roles: The job's roles.
        reason: The reason that the job keeps.

    Raises:
        SpecError: if a field cannot be honoured, with all such fields.
    """
    named: dict[str, list[Field]] = {name: [stated.place] for name, stated in plan.roles.items()}
    for pod in (*plan.created, *plan.removed, *plan.migrated):
        named.setdefault(pod.role, []).append(pod.place)
    found: list[PlanRequest] = []
    for name, places in named.items():
        known = roles.get(name)
        if known is None:
            for place in places:
                place.refuse(f"the job has no role {format_value(name)}; it has {one_of(list(roles))}")
            continue
        found += _requests_of_role(plan, name, known, reason)
    if not found and not plan.source.problems:
        plan.source.root["spec"].refuse("it states neither a number of nodes nor pods, so there is nothing to do")
    if plan.source.problems:
        raise SpecError(plan.source.problems)
    return (
        *(one for one in found if isinstance(one, ScaleRequest)),
        *(one for one in found if isinstance(one, RelaunchRequest)),
    )


def _requests_of_role(plan: ScalePlan, name: str, known: KnownRole, reason: str) -> list[PlanRequest]:
    stated = plan.roles.get(name)
    created, removed, migrated = (
        [pod for pod in pods if pod.role == name] for pods in (plan.created, plan.removed, plan.migrated)
    )
    # A pod that comes in the place of one that goes replaces it.
    places = {pod.rank: pod for pod in created if pod.rank is not None}
    replaced = [(pod, places[pod.rank]) for pod in removed if pod.rank is not None and pod.rank in places]
    gone = {pod.rank for pod, _ in replaced}
    more = [pod for pod in created if pod.rank is None or pod.rank not in gone]
    fewer = [pod for pod in removed if pod.rank not in gone]
    nodes = known.nodes + len(more) - len(fewer)
    if stated is not None and stated.nodes is not None:
        nodes = stated.nodes
    _check_removed(fewer, known.nodes, nodes)
    resources = {} if stated is None else _changed(stated, known)
    for pod in more:
        own = _changed(pod, known)
        if any(resources.get(what, value) != value for what, value in own.items()):
            pod.place.refuse("it requests other resources than further nodes of its role; new ones request the same")
        resources = {**own, **resources}
    found: list[PlanRequest] = []
    if (stated is not None and stated.nodes is not None) or nodes != known.nodes or resources:
        found.append(ScaleRequest(nodes=str(nodes), role=name, reason=reason, resources=resources))
    for pod, to in (*((pod, pod) for pod in migrated), *replaced):
        rank = pod.rank or 0
        if rank >= min(nodes, known.nodes):
            pod.place.refuse(f"{name} has no node {rank} to replace: its nodes are 0 to {min(nodes, known.nodes) - 1}")
        own = _changed(to, known)
        found.append(RelaunchRequest(rank=rank, role=name, reason=reason, resources=own))
    return found


def _check_removed(pods: Iterable[PlannedPod], before: int, after: int) -> None:
    """Refuses the removal of nodes that the job would keep: what leaves is always the end of its nodes."""
    for pod in pods:
        rank = pod.rank or 0
        if rank >= before:
            pod.place.refuse(f"{pod.role} has no node {rank}: its nodes are 0 to {before - 1}")
        elif after < 1:
            pod.place.refuse(f"{pod.role} would have no node; `perdure suspend` releases all of them")
        elif rank < after:
            pod.place.refuse(
                f"{pod.role} would keep its nodes 0 to {after - 1}, and a job that shrinks releases the others; name "
                "those, or replace this one by migratePods"
            )


def _changed(stated: PlannedRole | PlannedPod, known: KnownRole) -> dict[str, str]:
    """Returns the resources that are not what nodes of the role request anyway."""
    if not stated.resources:
        return {}
    place, changed = stated.place["resource"], dict(stated.resources)
    if not known.chooses_machines:
        place.drop("nodes of the job's backend request no resources of their machine")
        return {}
    gpus = changed.pop("gpu", None)
    if gpus is not None and amount(gpus) not in (0, known.gpus):
        place.refuse(f"gpu: got {gpus}; it is {known.gpus} for each node, which cannot change while the job runs")
    same = [what for what, text in changed.items() if what in known.requests and _equal(known.requests[what], text)]
    return {what: text for what, text in changed.items() if what not in same}


def _equal(one: str, other: str) -> bool:
    return amount(one) == amount(other)
