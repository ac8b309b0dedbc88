"""What a page shows of the jobs, and of one job, read by the client as the commands read it.

A part of the control plane that does not answer hides nothing: the last look is kept, with the reason why it is old.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.base.errors import PerdureError
from perdure.base.payloads import UnreadablePayload
from perdure.client.client import Client
from perdure.client.failing_activities import describe_failing
from perdure.client.hot_nodes import describe_hot_nodes
from perdure.client.pauses import describe_pauses
from perdure.client.recorded_spec import recorded_spec
from perdure.client.resource_use import with_peaks
from perdure.client.task_failures import explain
from perdure.client.views import FINAL_PHASES, JobSummary, all_warnings, closed, overall_progress
from perdure.contract import ArchiveReport, DatasetView, IncidentView, JobPhase, JobStatus, NodeView, Progress
from perdure.contract.names import role_of_group
from perdure.contract.notifications import TargetReport

MOST_JOBS = 500
"""Jobs of one list, the newest ones."""

_AT_ONCE = 4
"""Running jobs of a list that are asked for their steps at a time; the others keep their last answer."""

_SLOWLY = timedelta(seconds=10)
"""Time between two looks at what changes rarely."""

_LONG_AGO = datetime.min.replace(tzinfo=UTC)

_FULLY = timedelta(seconds=10)
"""Time between two questions to a job of which the server tells nothing new. Its steps are read without it."""

_SOON = 0.05
"""Seconds for which what has happened to a job waits for its nodes to be shown, too: a job that is busy with a failure
answers the query for them up to a second after that for its status."""


@dataclass(frozen=True)
class JobRow:
    """One job of the list."""

    summary: JobSummary
    status: JobStatus | None = None
    """Its last answer; None before the first."""
    progress: Progress | None = None
    nodes: tuple[NodeView, ...] = ()
    asked_at: datetime = _LONG_AGO
    """When it was asked itself."""

    def is_known(self, now: datetime) -> bool:
        """Whether its last answer still holds but for its steps: the server tells of each change in its summary."""
        return self.status is not None and now - self.asked_at < _FULLY


@dataclass(frozen=True)
class ListLook:
    """The jobs at one moment."""

    time: datetime
    jobs: Sequence[JobRow] = ()
    problem: str = ""
    """Why this is not fresh."""


class JobList:
    """Looks at the jobs of a namespace, or of all.

    Args:
        client: Reads the jobs.
        everywhere: Jobs of all namespaces.
        at_once: Jobs that one look asks for their steps, by turns.
    """

    def __init__(self, client: Client, *, everywhere: bool, at_once: int = _AT_ONCE) -> None:
        self._client = client
        self._at_once = at_once
        self._everywhere = everywhere
        self._known: dict[str, JobRow] = {}
        self._told: set[str] = set()
        """Runs that have failed and were asked."""
        self._last = ListLook(datetime.now(UTC))
        self._next = 0

    async def look(self) -> ListLook:
        """Looks once."""
        try:
            jobs = await self._client.list(everywhere=self._everywhere, limit=MOST_JOBS)
        except PerdureError as error:
            self._last = replace(self._last, time=datetime.now(UTC), problem=str(error))
            return self._last
        running = [job for job in jobs if job.finished_at is None]
        turn = [running[(self._next + number) % len(running)] for number in range(min(self._at_once, len(running)))]
        self._next += len(turn)
        # Why a job has failed is asked once; the newest ones first.
        failed = [job for job in jobs if job.phase is JobPhase.FAILED and job.run_id not in self._told]
        turn += failed[: self._at_once]
        self._told = {job.run_id for job in jobs if job.run_id in self._told} | {
            job.run_id for job in failed[: self._at_once]
        }
        for row in await asyncio.gather(*(self._ask(job) for job in turn)):
            self._known[row.summary.run_id] = row
        rows = [replace(self._known.get(job.run_id, JobRow(job)), summary=job) for job in jobs]
        self._known = {row.summary.run_id: row for row in rows}
        self._last = ListLook(datetime.now(UTC), rows)
        return self._last

    async def _ask(self, job: JobSummary) -> JobRow:
        """Asks the job; between two answers only its agents' reports are read."""
        known, now = self._known.get(job.run_id, JobRow(job)), datetime.now(UTC)
        try:
            if known.summary == job and known.status and known.is_known(now):
                nodes = await self._client.refreshed(known.nodes, _groups(known.status, known.status.role))
                return replace(known, nodes=nodes, progress=overall_progress(nodes, known.status))
            status, nodes = await self._client.look(job.name, namespace=job.namespace)
        except PerdureError:
            return known
        return JobRow(job, status, overall_progress(nodes, status), nodes, now)


@dataclass(frozen=True)
class JobLook:
    """One job at one moment."""

    time: datetime
    summary: JobSummary
    status: JobStatus | None = None
    nodes: Mapping[str, tuple[NodeView, ...]] = field(default_factory=dict[str, tuple[NodeView, ...]])
    """By role."""
    progress: Progress | None = None
    incidents: tuple[IncidentView, ...] = ()
    warnings: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Mapping[str, DatasetView] = field(default_factory=dict[str, DatasetView])
    """Datasets that its ranks read, by their names."""
    told: tuple[TargetReport, ...] = ()
    """How the deliveries of its notifications are."""
    archive: ArchiveReport | None = None
    """Whether its archive could be written; None where it has none."""
    is_archived: bool = False
    """This is read from its archive, since Temporal does not know the job."""
    problem: str = ""
    """Why this is not fresh."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, so that nothing changes."""
        return self.summary.finished_at is not None and (self.status is None or self.status.phase in FINAL_PHASES)


@dataclass(frozen=True)
class _Rare:
    """What changes rarely of a job."""

    warnings: tuple[str, ...] = ()
    data: Mapping[str, DatasetView] = field(default_factory=dict[str, DatasetView])
    told: tuple[TargetReport, ...] = ()
    archive: ArchiveReport | None = None


class JobWatch:
    """Looks at one job, repeatedly."""

    def __init__(self, client: Client, name: str, namespace: str) -> None:
        self._client = client
        self._name, self._namespace = name, namespace
        self._last: JobLook | None = None
        self._rare = _Rare()
        self._incidents: dict[int, IncidentView] = {}
        """By their numbers."""
        self._looking_around: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Mapping[str, tuple[NodeView, ...]]] | None = None
        """Reads the nodes, where they were not answered soon."""
        self._rare_at = _LONG_AGO
        self._asked_at = _LONG_AGO
        """When the job was asked itself; before all times: it is to be asked next."""
        self._is_listening = False

    async def news(self) -> AsyncGenerator[None]:
        """Yields when the job is to be looked at, as soon as something happens to it."""
        try:
            async for _ in self._client.news(self._name, namespace=self._namespace):
                self._is_listening, self._asked_at = True, _LONG_AGO
                yield
        finally:
            self._is_listening = False

    async def look(self) -> JobLook:
        """Looks once.

        Raises:
            JobNotFound: if the server does not know the job.
            ControlPlaneUnreachable: if the server does not answer the first look.
        """
        now = datetime.now(UTC)
        last = self._last
        if last and last.status and not last.problem and self._is_listening and now - self._asked_at < _FULLY:
            self._last = await self._refreshed(last, last.status, now)
            return self._last
        self._asked_at = now
        return await self._look_fully(now)

    async def _refreshed(self, look: JobLook, status: JobStatus, now: datetime) -> JobLook:
        """The look with the agents' latest reports. The server tells of everything else that happens."""
        if status.finished_at:
            return replace(look, time=now)
        by_role = await asyncio.gather(
            *(self._client.refreshed(nodes, _groups(status, role)) for role, nodes in look.nodes.items())
        )
        nodes = dict(zip(look.nodes, by_role, strict=True))
        own = nodes.get(status.role, ())
        progress = overall_progress(own, status)
        known = with_peaks(status.model_copy(update={"progress": progress}), own)
        return replace(look, time=now, status=known, nodes=nodes, progress=progress)

    async def _look_fully(self, now: datetime) -> JobLook:
        asked = asyncio.create_task(self._client.status(self._name, namespace=self._namespace))
        try:
            try:
                summary = await self._client.describe(self._name, namespace=self._namespace)
            except PerdureError as error:
                if self._last is None:
                    raise
                self._last = replace(self._last, time=now, problem=str(error))
                return self._last
            if self._last is None or self._last.summary.run_id != summary.run_id:
                spec = await self._spec()
                self._last = JobLook(now, summary, spec=spec)
                self._rare_at, self._reading = _LONG_AGO, None
            try:
                self._last = await self._ask(replace(self._last, time=now, summary=summary, problem=""), asked)
            except PerdureError as error:
                problem = f"{error} {error.remedy}".strip()
                self._last = replace(self._last, time=now, summary=summary, problem=problem)
            return self._last
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _spec(self) -> Mapping[str, Any]:
        try:
            return await recorded_spec(self._client, self._name, namespace=self._namespace)
        except UnreadablePayload:
            # What the job says of itself is shown all the same.
            return {}

    async def _ask(self, look: JobLook, asked: Awaitable[JobStatus]) -> JobLook:
        status = closed(await asked, look.summary)
        nodes = await self._nodes(look, status)
        own = nodes.get(status.role, ())
        progress = overall_progress(own, status)
        if self._rare_at == _LONG_AGO:
            self._rare_at = look.time
            self._rare = await self._look_around(status, nodes)
        elif look.time - self._rare_at >= _SLOWLY and (self._looking_around is None or self._looking_around.done()):
            # What happens meanwhile is shown without it.
            self._rare_at = look.time
            self._looking_around = asyncio.create_task(self._look_around_later(status, nodes))
        if status.last_incident is not None:
            # The job's answer has it already; a second query in the same moment was answered a second later.
            if status.last_incident.number > max(self._incidents, default=0) + 1:
                await self._read_incidents()
            self._incidents[status.last_incident.number] = status.last_incident
        rare = self._rare
        warnings = status.left if status.finished_at else (*rare.warnings, *all_warnings(own, status))
        known = with_peaks(status.model_copy(update={"progress": progress, "warnings": warnings}), own)
        return replace(
            look,
            status=known,
            nodes=nodes,
            progress=progress,
            incidents=tuple(incident for _, incident in sorted(self._incidents.items())),
            warnings=warnings,
            data=rare.data,
            told=rare.told,
            archive=rare.archive,
        )

    async def _nodes(self, look: JobLook, status: JobStatus) -> Mapping[str, tuple[NodeView, ...]]:
        """The nodes by role; those of the last look where the job does not answer soon, and it is asked again next."""
        reading, is_earlier = self._reading, self._reading is not None
        if reading is None:
            reading = self._reading = asyncio.create_task(self._read_nodes(status))
            # No page may follow any more when it fails.
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([reading], timeout=_SOON if look.nodes else None)
        if not reading.done() or is_earlier:
            self._asked_at = _LONG_AGO
        if not reading.done():
            return look.nodes
        self._reading = None
        return reading.result()

    async def _read_nodes(self, status: JobStatus) -> Mapping[str, tuple[NodeView, ...]]:
        roles = status.roles or (status.role,)
        others = [role for role in roles if role != status.role]
        own, *by_role = await asyncio.gather(
            self._client.nodes_of(status),
            *(self._client.nodes(self._name, namespace=self._namespace, role=role) for role in others),
        )
        found = dict(zip(others, by_role, strict=True)) | {status.role: own}
        return {role: found[role] for role in roles}

    async def _look_around(self, status: JobStatus, nodes: Mapping[str, tuple[NodeView, ...]]) -> _Rare:
        """Reads what changes rarely, and takes the most time."""
        client = self._client
        await self._read_incidents()
        pauses, failures, failing_activities = await client.troubles(status)
        failing = describe_failing(failing_activities)
        hot = [words for role in nodes if len(nodes) > 1 for words in describe_hot_nodes(role, nodes[role])]
        tasks = (f"{one.workflow_id}: {explain(one)}" for one in failures)
        return _Rare(
            warnings=(*describe_pauses(pauses), *tasks, *failing, *hot),
            data=await client.datasets(status),
            told=(await client.notifications(status)).targets if status.notifies else (),
            archive=await client.archive(status) if status.archive else None,
        )

    async def _read_incidents(self) -> None:
        found = await self._client.incidents(self._name, namespace=self._namespace)
        self._incidents = {incident.number: incident for incident in found}

    async def _look_around_later(self, status: JobStatus, nodes: Mapping[str, tuple[NodeView, ...]]) -> None:
        # A part of the control plane that does not answer is said by the look at the job itself.
        with suppress(PerdureError):
            self._rare = await self._look_around(status, nodes)
            self._asked_at = _LONG_AGO


def _groups(status: JobStatus, role: str) -> list[str]:
    """The workflows of a role's nodes."""
    return [group for group in status.groups if role_of_group(group) == role]
