"""Jobs of the policy's scenarios, answered as a client answers, so that pages are tested without a server."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.base.errors import ControlPlaneUnreachable, JobNotFound, Refused
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.client.logs import LogLine
from perdure.client.views import FailingActivity, JobSummary, Pause, TaskFailure
from perdure.contract import (
    Accepted,
    DatasetView,
    IncidentView,
    JobStatus,
    NodePhase,
    NodeView,
    Progress,
    ProgressSource,
    ResourceUse,
)
from perdure.contract.notifications import NotifierReport, TargetReport
from perdure.spec.accepted import read_accepted
from perdure.spec.running import with_scaling
from perdure.spec.scaling import Scaling
from perdure.workflows.policy.capacity.new_goal import difference
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.facts.events import ScalingChanged
from perdure.workflows.policy.record.projections import status_of
from tests.policy.scenario import Scenario, reported

HOSTILE = (
    '<img src=x onerror="document.title=1">\x1b[31m\x1b]0;title\x07\u202e\u2066'
    "</script><script>document.title=1</script>"
)


class PlayedJob:
    """One job: what its workflow and its agents would answer."""

    def __init__(self, scenario: Scenario, *, name: str = "llama", namespace: str = "default") -> None:
        self.scenario = scenario
        self.name, self.namespace = name, namespace
        # Scenarios begin at a time of their own, and pages show what is recent.
        self.shift = datetime.now(UTC) - scenario.now - timedelta(seconds=1)
        self.lines = ["step 1 loss 2.0"]
        self.step = 0
        self.uid = ""
        self.fields: dict[str, Any] = {}
        """Fields of its status that are not the scenario's."""
        self.data: dict[str, DatasetView] = {}
        self.told: tuple[TargetReport, ...] = ()

    def moved(self, value: Any) -> Any:
        """The value, with all times moved to the present."""
        if isinstance(value, datetime):
            return value + self.shift
        if isinstance(value, dict):
            return {key: self.moved(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.moved(item) for item in value)
        return value

    @property
    def summary(self) -> JobSummary:
        status = self.status
        return JobSummary(
            name=self.name,
            namespace=self.namespace,
            workflow_id=f"job/{self.namespace}/{self.name}",
            run_id=f"{self.namespace}/{self.name}",
            phase=status.phase,
            owner="ana",
            world_size=status.world_size,
            restarts=status.restarts,
            started_at=status.started_at,
            finished_at=status.finished_at,
        )

    @property
    def status(self) -> JobStatus:
        scenario = self.scenario
        status = status_of(scenario.state, scenario.job, groups=(), phase=scenario.state.phase, now=scenario.now)
        fields = self.moved(status.model_dump()) | {"name": self.name, "namespace": self.namespace}
        fields |= {"uid": self.uid or status.uid} | self.fields
        return JobStatus.model_validate(fields)

    @property
    def incidents(self) -> list[IncidentView]:
        return [IncidentView.model_validate(self.moved(one.model_dump())) for one in self.scenario.state.incidents]

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        if self.status.finished_at or self.scenario.state.world is None:
            return ()
        self.step += 1
        members = self.scenario.group_ranks
        return tuple(
            NodeView(
                rank=rank,
                incarnation=node.incarnation,
                phase=node.phase,
                host=f"gpu-{rank}",
                since=self.moved(self.scenario.now),
                group_rank=members.get(rank),
                progress=Progress(
                    step=100 + self.step,
                    total_steps=1000,
                    steps_per_second=2.0,
                    loss=2.0 / self.step,
                    source=ProgressSource.REPORTED,
                    last_step_at=datetime.now(UTC),
                )
                if node.phase is NodePhase.READY
                else None,
                usual_step=timedelta(seconds=0.5 + 0.1 * (rank == 1)),
                metrics=ResourceUse(cpu_cores=1.5, memory_bytes=2**30),
            )
            for rank, node in self.scenario.state.nodes.items()
        )


class PlayedClient(Client):
    """A client of such jobs, which records what it was asked to change."""

    def __init__(self, *jobs: PlayedJob) -> None:
        super().__init__(endpoint=Endpoint(address="127.0.0.1:1", ui="http://127.0.0.1:8233"))
        self.jobs = {(job.namespace, job.name): job for job in jobs}
        self.changed: list[tuple[Any, ...]] = []
        self.away = False
        self.happened = asyncio.Condition()
        self.listed = 0
        self.asked = 0
        """How often jobs were listed, and themselves asked."""
        self.answers_nodes = asyncio.Event()
        """Its jobs answer the query for their nodes."""
        self.answers_nodes.set()
        self.refreshed_nodes = 0
        """How often only the agents' reports were read."""

    def job(self, name: str, namespace: str | None) -> PlayedJob:
        if self.away:
            raise ControlPlaneUnreachable("the Temporal server does not answer")
        try:
            return self.jobs[namespace or self.namespace, name]
        except KeyError:
            raise JobNotFound(f'no job named "{name}"') from None

    async def list(self, **_: Any) -> builtins.list[JobSummary]:
        if self.away:
            raise ControlPlaneUnreachable("the Temporal server does not answer")
        self.listed += 1
        return [job.summary for job in self.jobs.values()]

    async def describe(self, name: str, *, namespace: str | None = None) -> JobSummary:
        return self.job(name, namespace).summary

    async def look(
        self, name: str, *, namespace: str | None = None, role: str | None = None
    ) -> tuple[JobStatus, tuple[NodeView, ...]]:
        job = self.job(name, namespace)
        self.asked += 1
        return job.status, job.nodes

    async def news(self, name: str, *, namespace: str | None = None) -> AsyncGenerator[None]:
        self.job(name, namespace)
        while True:
            async with self.happened:
                yield
                await self.happened.wait()

    async def tell(self) -> None:
        """Has all pages learn that something has happened to jobs."""
        async with self.happened:
            self.happened.notify_all()

    async def refreshed(self, nodes: Sequence[NodeView], groups: Iterable[str]) -> tuple[NodeView, ...]:
        self.refreshed_nodes += 1
        return tuple(nodes)

    async def datasets(self, status: JobStatus) -> Mapping[str, DatasetView]:
        return self.job(status.name, status.namespace).data

    async def notifications(self, job: JobStatus) -> NotifierReport:
        return NotifierReport(targets=self.job(job.name, job.namespace).told)

    async def status(self, name: str, *, namespace: str | None = None, role: str | None = None) -> JobStatus:
        self.asked += 1
        return self.job(name, namespace).status

    async def nodes_of(self, status: JobStatus) -> tuple[NodeView, ...]:
        await self.answers_nodes.wait()
        return self.job(status.name, status.namespace).nodes

    async def nodes(self, name: str, *, namespace: str | None = None, role: str | None = None) -> tuple[NodeView, ...]:
        return self.job(name, namespace).nodes

    async def incidents(self, name: str, *, namespace: str | None = None) -> builtins.list[IncidentView]:
        return self.job(name, namespace).incidents

    async def troubles(
        self, status: JobStatus
    ) -> tuple[tuple[Pause, ...], tuple[TaskFailure, ...], tuple[FailingActivity, ...]]:
        return (), (), ()

    async def logs(self, name: str, *, namespace: str | None = None, **chosen: Any) -> AsyncGenerator[LogLine]:
        for line in self.job(name, namespace).lines:
            yield LogLine(role="worker", node=0, incarnation=1, text=line, time=datetime.now(UTC))

    async def _update(
        self, name: str, namespace: str | None, update: str, request: Any, kind: Any, key: str | None = None
    ) -> Any:
        self.job(name, namespace)
        if getattr(request, "nodes", "") == "99":
            raise Refused(f"{name} refuses: 99 nodes are more than there are")
        self.changed.append((update, name, request.model_dump(exclude_defaults=True)))
        return Accepted(message=f"{name} will {update}")

    async def preview_scale(
        self, name: str, nodes: str, *, scaling: Mapping[str, Any], namespace: str | None, role: str | None
    ) -> JobStatus:
        """What the policy makes of another goal, of whose time is told as that of the scenario."""
        played = self.job(name, namespace)
        scenario, view = played.scenario, played.scenario.state
        goal = dict(scaling)
        try:
            Scaling.model_validate(goal)
        except ValueError as error:
            raise Refused(f"{name} refuses: {error}") from None
        if "finish_by" in goal:
            goal["finish_by"] = (datetime.fromisoformat(goal["finish_by"]) - played.shift).isoformat()
        job = read_accepted(with_scaling(scenario.job, view.role, goal))
        change = difference(scenario.job.roles[view.role].scaling, job.roles[view.role].scaling)
        then = user_requests.apply(view, ScalingChanged(change=change, reason=""), job, scenario.now)
        return status_of(then, job, groups=(), phase=then.phase, now=scenario.now)

    async def cancel(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        self.changed.append(("cancel", name, {"reason": reason}))
        return Accepted(message=f"{name} is being cancelled")


def interrupted() -> Scenario:
    """A job whose rank was killed and that steps again."""
    job = Scenario("2:4").running()
    job.wait(60)
    job.rank_killed(1, progress=reported(120)).wait(3)
    return job.steps().wait(60)


def failed() -> Scenario:
    """A job that has failed with an exception of its script."""
    job = Scenario("2", retry={"max_restarts": 0}).running().wait(30)
    job.rank_raised(1, HOSTILE, progress=reported(7))
    return job
