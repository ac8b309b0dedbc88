"""Answers questions about jobs of the past from the history's database."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Table, or_, select

from perdure.activities.history.needs import needs_of
from perdure.activities.history.records import LONGEST_TIME
from perdure.activities.history.schema import CURSORS, INCIDENTS, JOBS, ROLES, WORLDS
from perdure.activities.history.store import HistoryStore
from perdure.contract import (
    FailureClass,
    HistoryAnswer,
    HistoryRequest,
    HostFailures,
    JobPhase,
    JobShape,
    PastJob,
    Peaks,
    RoleShape,
    RoleUse,
)

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

_MOST_READ: Final = 5_000
"""Jobs that one answer rests on, the newest: it is read and summed up within a second or two."""
_MOST_GROUPS: Final = 100
"""Machines, and kinds of roles, in one answer."""
_MOST_BYTES: Final = 1_000_000
"""The server refuses answers of 2 MB."""

_AT_ONCE: Final = 500
"""Runs in one query: SQLite limits the number of its parameters."""


class NoSuchJob(Exception):
    """The history has no job of that name."""


def answer(store: HistoryStore, request: HistoryRequest) -> HistoryAnswer:
    """Answers a question.

    Raises:
        HistoryUnavailable: if the database does not answer.
        NoSuchJob: if the job that others are to be like is unknown.
        ValueError: if a value is none of its column's.
    """
    with store.transaction() as connection:
        store.check(connection)
        jobs = _jobs(connection, store.tenant, request)
        shapes = _shapes(connection, store.tenant, jobs)
        jobs = {run: job for run, job in jobs.items() if run in shapes}
        like = request.shape
        if request.like is not None:
            like = _shape_of(connection, store.tenant, request)
        points = {run: _alike(shapes[run], like) if like is not None else 0 for run in jobs}
        if like is not None:
            jobs = {run: job for run, job in jobs.items() if points[run] > 0}
        if request.image is not None:
            jobs = {run: job for run, job in jobs.items() if _has_image(shapes[run], request.image)}
        roles = _by_run(connection, store.tenant, ROLES, jobs)
        worlds = _by_run(connection, store.tenant, WORLDS, jobs)
        incidents = _by_run(connection, store.tenant, INCIDENTS, jobs)
        recorded = connection.execute(
            select(CURSORS.c.complete_until)
            .where(CURSORS.c.tenant == store.tenant)
            .order_by(CURSORS.c.complete_until)
            .limit(1)
        ).scalar()
    rows = ((job, shapes[run], roles[run], worlds[run], incidents[run], points[run]) for run, job in jobs.items())
    past = [found for row in rows if (found := _readable(_past, *row)) is not None]
    newest = list(past)
    # Sorting keeps the order of equals, the newest first.
    past.sort(key=lambda one: -one.alike)
    return HistoryAnswer(
        jobs=tuple(_within_budget(past[: request.limit])),
        found=len(past),
        hosts=tuple(_hosts(incidents)[:_MOST_GROUPS]),
        needs=tuple(needs_of(newest)[:_MOST_GROUPS]),
        recorded_at=recorded,
    )


def _jobs(connection: Connection, tenant: str, request: HistoryRequest) -> dict[str, Any]:
    query = select(JOBS).where(JOBS.c.tenant == tenant).order_by(JOBS.c.started_at.desc()).limit(_MOST_READ)
    if request.namespace is not None:
        query = query.where(JOBS.c.namespace == request.namespace)
    if request.since is not None:
        query = query.where(or_(JOBS.c.finished_at.is_(None), JOBS.c.finished_at >= request.since))
    return {row.run: row for row in connection.execute(query)}


def _by_run(connection: Connection, tenant: str, table: Table, runs: Iterable[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    wanted = list(runs)
    for start in range(0, len(wanted), _AT_ONCE):
        chosen = table.c.run.in_(wanted[start : start + _AT_ONCE])
        query = select(table).where(table.c.tenant == tenant, chosen).order_by(*table.primary_key.columns)
        for row in connection.execute(query):
            found[row.run].append(row)
    return found


def _shapes(connection: Connection, tenant: str, jobs: dict[str, Any]) -> dict[str, JobShape]:
    roles = _by_run(connection, tenant, ROLES, jobs)
    shapes = {run: _readable(_shape, job, roles[run]) for run, job in jobs.items()}
    return {run: shape for run, shape in shapes.items() if shape is not None}


def _readable(read: Callable[..., _ResultT], job: Any, *rows: Any) -> _ResultT | None:
    """What was read; None, and a warning, where rows that another program has changed make no sense."""
    try:
        return read(job, *rows)
    except ValueError as error:
        logger.warning("the history of %s/%s is left out: it cannot be read: %s", job.namespace, job.name, error)
        return None


def _shape(job: Any, roles: Iterable[Any]) -> JobShape:
    shapes = (RoleShape(role=role.role, image=role.image, command=role.command) for role in roles)
    return JobShape(roles=tuple(shapes), labels=job.labels)


def _shape_of(connection: Connection, tenant: str, request: HistoryRequest) -> JobShape:
    named = select(JOBS).where(JOBS.c.tenant == tenant, JOBS.c.name == request.like)
    if request.namespace is not None:
        named = named.where(JOBS.c.namespace == request.namespace)
    job = connection.execute(named.order_by(JOBS.c.started_at.desc()).limit(1)).first()
    if job is None:
        raise NoSuchJob(f'the history has no job named "{request.like}"')
    return _shape(job, _by_run(connection, tenant, ROLES, [job.run])[job.run])


def _alike(one: JobShape, other: JobShape) -> int:
    """Points for the same image, command and labels; none where neither image nor command is the same."""
    images = {role.image for role in one.roles if role.image} & {role.image for role in other.roles}
    commands = {role.command for role in one.roles if role.command} & {role.command for role in other.roles}
    if not images and not commands:
        return 0
    return bool(images) + bool(commands) + bool(one.labels and one.labels == other.labels)


def _has_image(shape: JobShape, image: str) -> bool:
    return any(role.image == image or role.image.startswith((f"{image}:", f"{image}@")) for role in shape.roles)


def _past(
    job: Any, shape: JobShape, roles: Sequence[Any], worlds: Sequence[Any], incidents: Sequence[Any], alike: int
) -> PastJob:
    spent = (one.nodes * (one.ended_at - one.started_at).total_seconds() for one in worlds if one.ended_at is not None)
    steps = [one.step_seconds for one in worlds if one.step_seconds is not None]
    return PastJob(
        name=job.name,
        namespace=job.namespace,
        uid=job.uid,
        backend=job.backend,
        owner=job.owner,
        shape=shape,
        phase=JobPhase(job.phase),
        reason=job.reason,
        started_at=job.started_at,
        finished_at=job.finished_at,
        nodes=max((one.nodes for one in worlds), default=0),
        worlds=job.worlds,
        restarts=job.restarts,
        step=job.step,
        step_seconds=steps[-1] if steps else None,
        lost_seconds=_lost(incidents),
        node_hours=sum(spent) / 3600,
        use=tuple(_use(role, worlds) for role in roles),
        alike=alike,
    )


def _use(role: Any, worlds: Iterable[Any]) -> RoleUse:
    peaks = Peaks(
        watched=role.watched_seconds or 0.0,
        memory=role.memory_bytes,
        cpu=role.cpu_cores,
        gpu_memory=role.gpu_memory_bytes,
        shm=role.shm_bytes,
    )
    nodes = max((one.nodes for one in worlds if one.role == role.role), default=0)
    return RoleUse(role=role.role, nodes=nodes, peaks=peaks if peaks != Peaks() else None)


def _hosts(incidents: dict[str, list[Any]]) -> list[HostFailures]:
    by_host: dict[str, list[Any]] = defaultdict(list)
    for own in incidents.values():
        for one in own:
            if one.host and one.failure is not None:
                by_host[one.host].append(one)
    found: list[HostFailures] = []
    for host, own in by_host.items():
        classes: dict[FailureClass, int] = defaultdict(int)
        for one in own:
            classes[FailureClass(one.failure)] += 1
        found.append(
            HostFailures(
                host=host,
                failures=len(own),
                jobs=len({one.run for one in own}),
                classes=dict(sorted(classes.items(), key=lambda item: -item[1])),
                lost_seconds=_lost(own),
                last_at=max(one.started_at for one in own),
            )
        )
    return sorted(found, key=lambda one: (-one.failures, one.host))


def _lost(incidents: Iterable[Any]) -> float:
    # No sum over rows of another program may be infinite.
    return sum(min(max(one.lost_seconds or 0, 0), LONGEST_TIME.total_seconds()) for one in incidents)


def _within_budget(jobs: Iterable[PastJob]) -> Iterable[PastJob]:
    left = _MOST_BYTES
    for job in jobs:
        left -= len(job.model_dump_json())
        if left < 0:
            return
        yield job
