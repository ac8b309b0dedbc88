"""The Python client: does what `perdure` does on the command line, asynchronously; `sync` has a blocking variant.

A client only sends requests and reads answers; jobs run whether or not a client exists. All state is in the workflows.

What only one call needs is imported by that call: the command line makes a client for every question.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from temporalio.exceptions import WorkflowAlreadyStartedError

from perdure.base.credentials.tickets import digest_of, id_of, new_secret
from perdure.base.errors import ControlPlaneUnreachable, JobAlreadyRunning, NoWorker, Refused
from perdure.base.executions import OPEN, ExecutionStatus, describe_all, quoted
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.error_mapping import map_errors
from perdure.client.nodes import RunningNode, read_nodes, require_one_role, running_nodes
from perdure.client.notifications import NotificationCalls
from perdure.client.pauses import describe_pauses, pause_of
from perdure.client.results import await_result
from perdure.client.scaling import ScalingCalls
from perdure.client.task_failures import failures_among
from perdure.client.views import (
    IssuedTicket,
    JobSnapshot,
    JobSummary,
    Submission,
    TaskFailure,
)
from perdure.client.visibility import newest_jobs, phase_of
from perdure.contract import (
    Accepted,
    IncidentView,
    JobResult,
    JobStatus,
    NodeChecks,
    NodeStacks,
    NodeView,
    PauseRequest,
    ReasonRequest,
    RelaunchRequest,
    RestartRequest,
    RoleRequest,
    Ticket,
    TicketRef,
    TicketRequest,
)
from perdure.contract.names import job_workflow_id
from perdure.spec.job import JobSpec

if TYPE_CHECKING:
    from perdure.client.logs import LogLine
    from perdure.client.logs.places import LogPlaces
    from perdure.client.uploads import Report

WATCH_INTERVAL = timedelta(seconds=1)
"""The time between two snapshots; agents report progress every two seconds."""

OUTAGE_LIMIT = timedelta(minutes=10)
"""The time for which waiting for a job tolerates an outage of the control plane, before it raises an error."""

TICKET_LIFETIME = timedelta(days=1)
"""The default lifetime of tickets: that of one allocation of machines."""


class Client(NotificationCalls, ScalingCalls):
    """Submits, watches and changes jobs.

        async with Client() as client:
            job = await client.submit("job.yaml")
            result = await client.wait(job.name)

    Every method that names a job also takes its `namespace`; the client's own is the default. All raise
    `ControlPlaneUnreachable` if the server does not answer, and `JobNotFound` if the job is unknown.
    """

    _log_places: LogPlaces | None = None
    """Where logs are looked for, besides asking agents; None: wherever jobs name."""

    # Starting jobs

    async def submit(
        self,
        spec: JobSpec | Mapping[str, Any] | str | Path,
        *,
        overrides: Mapping[str, Any] | None = None,
        again: bool = True,
        memo: Mapping[str, Any] | None = None,
        upload: bool = True,
        owner: str = "",
        report: Report | None = None,
    ) -> Submission:
        """Starts a job; if its nodes need a folder of this machine, uploads that first.

        Args:
            spec: A specification: a model, plain data, a file's path, or a text in YAML or JSON.
            overrides: Top-level fields that replace the file's.
            again: Allow a name that an ended job has used.
            memo: Additional memo of the workflow, by which programs that start jobs can recognize them.
            upload: Allow sending folders of this machine; a client that submits for others must not send its own.
            owner: The user that lists of jobs show; by default the one that this process runs as.
            report: Is called with lines about the progress, for people.

        Raises:
            SpecError: if the specification is wrong, or the folder cannot be uploaded.
            JobAlreadyRunning: if a job of that name runs, or has run and the name may not be used again.
            NoWorker: if a folder has to be uploaded and no worker takes it.
        """
        from perdure.client.submission import start_job
        from perdure.client.uploads import upload_workdir
        from perdure.spec.load import validate_file
        from perdure.spec.validate import validate_spec, validate_started

        if isinstance(spec, str | Path):
            job, warnings = validate_file(spec, overrides=overrides)
        else:
            job, warnings = validate_spec(spec if isinstance(spec, JobSpec) else {**spec, **(overrides or {})})
        if not upload:
            validate_started(job)
        workflow_id = job_workflow_id(job.namespace, job.name)
        temporal = await self.connect()
        async with map_errors(self, job.name, job.namespace):
            try:
                queue = self.endpoint.task_queue
                async with upload_workdir(temporal, job, task_queue=queue, report=report) as complete:
                    handle = await start_job(
                        temporal, complete, workflow_id, task_queue=queue, again=again, memo=memo or {}, owner=owner
                    )
            except WorkflowAlreadyStartedError:
                flag = "" if job.namespace == "default" else f" -n {job.namespace}"
                raise JobAlreadyRunning(
                    f'a job named "{job.name}" is already running in the namespace {job.namespace}',
                    remedy=f"Watch it: perdure watch {job.name}{flag}. End it: perdure cancel {job.name}{flag} --wait. "
                    "Or give this job another name (--name, or name: in its file).",
                ) from None
        run_id = handle.first_execution_run_id or ""
        return Submission(
            name=job.name,
            namespace=job.namespace,
            workflow_id=workflow_id,
            run_id=run_id,
            page=self.endpoint.workflow_page(workflow_id, run_id),
            warnings=tuple(str(warning) for warning in warnings),
        )

    # Queries

    async def status(self, name: str, *, namespace: str | None = None, role: str | None = None) -> JobStatus:
        """The phase, size, restarts and next action of the job, or of one role of several.

        Raises:
            NoWorker: if no worker runs to answer for it.
            Refused: if the job has no such role.
        """
        status = await self._query(name, namespace, "status", JobStatus)
        if role is None or role == status.role:
            return status
        if role not in status.roles:
            from perdure.workflows.policy.state.job import UnknownRole

            # The job would refuse the query in the same words, and not all servers deliver them.
            raise Refused(f"{name} refuses: {UnknownRole(role, status.roles)}")
        return await self._query(name, namespace, "status", JobStatus, role)

    async def incidents(self, name: str, *, namespace: str | None = None) -> builtins.list[IncidentView]:
        """Every interruption, with its evidence, decision and cost.

        Raises:
            NoWorker: if no worker runs to answer for it.
        """
        return await self._query(name, namespace, "incidents", list[IncidentView])

    async def nodes(self, name: str, *, namespace: str | None = None, role: str | None = None) -> tuple[NodeView, ...]:
        """The nodes of the job, or of one role of several, with their latest progress.

        Raises:
            NoWorker: if no worker runs to answer for them.
            Refused: if the job has no such role.
        """
        _, nodes = await self.look(name, namespace=namespace, role=role)
        return nodes

    async def look(
        self, name: str, *, namespace: str | None = None, role: str | None = None
    ) -> tuple[JobStatus, tuple[NodeView, ...]]:
        """The status and the nodes of the job, or of one role of several.

        Raises:
            NoWorker: if no worker runs to answer for them.
            Refused: if the job has no such role.
        """
        status = await self.status(name, namespace=namespace, role=role)
        return status, await self.nodes_of(status)

    async def nodes_of(self, status: JobStatus) -> tuple[NodeView, ...]:
        """The nodes of the role that a status is about, with their latest progress.

        Raises:
            NoWorker: if no worker runs to answer for them.
        """
        return await read_nodes(self, status.name, status.namespace, status)

    async def list(
        self, *, namespace: str | None = None, everywhere: bool = False, running: bool = False, limit: int = 100
    ) -> builtins.list[JobSummary]:
        """Lists jobs, the newest first; of several runs with one name, the newest.

        Args:
            namespace: Only jobs of this namespace.
            everywhere: Jobs of all namespaces.
            running: Only jobs that have not closed.
            limit: The most jobs to return.
        """
        conditions: list[str] = []
        if not everywhere:
            conditions.append(f"WorkflowId STARTS_WITH {quoted(job_workflow_id(namespace or self.namespace, ''))}")
        if running:
            conditions.append(OPEN)
        temporal = await self.connect()
        found: dict[str, JobSummary] = {}
        paused: list[str] = []
        async with map_errors(self):
            async for execution, summary in newest_jobs(temporal, *conditions, limit=limit):
                found[execution.id] = summary
                if execution.status is ExecutionStatus.PAUSED:
                    paused.append(execution.id)
            failing = await failures_among(temporal, [job.workflow_id for job in found.values() if not job.finished_at])
            pauses = {one.id: pause_of(one) for one in await describe_all(temporal, paused, rpc_timeout=CALL_TIMEOUT)}
        return [
            job.model_copy(update={"task_failure": failing.get(job.workflow_id), "pause": pauses.get(job.workflow_id)})
            for job in found.values()
        ]

    async def task_failures(self, name: str, *, namespace: str | None = None) -> tuple[TaskFailure, ...]:
        """Workflow tasks of the job or its groups that fail again and again, and so keep it from making decisions.

        Raises:
            NoWorker: if no worker runs to answer for the job; `WorkflowTaskFails` if failing tasks are the reason.
        """
        status = await self.status(name, namespace=namespace)
        workflows = [job_workflow_id(status.namespace, name), *status.groups]
        return tuple((await failures_among(await self.connect(), workflows)).values())

    async def wait(
        self, name: str, *, namespace: str | None = None, outage: timedelta | None = OUTAGE_LIMIT
    ) -> JobResult:
        """Waits for the job to end.

        Args:
            name: The job's name.
            namespace: The job's namespace.
            outage: The longest tolerated outage of the control plane; None: no limit.

        Raises:
            ControlPlaneUnreachable: if an outage lasts longer.
            SpecError: if the job was started by plain JSON with a wrong specification.
        """
        away_since: float | None = None
        while True:
            try:
                async with map_errors(self, name, namespace):
                    handle = await self._handle(name, namespace)
                    return await await_result(await self.connect(), handle, rpc_timeout=timedelta(seconds=30))
            except NoWorker:
                away_since = None  # The server answered; the long poll merely ended.
            except ControlPlaneUnreachable:
                now = time.monotonic()
                away_since = away_since or now
                if outage is not None and now - away_since > outage.total_seconds():
                    raise
                await asyncio.sleep(WATCH_INTERVAL.total_seconds())

    def watch(
        self, name: str, *, namespace: str | None = None, interval: timedelta = WATCH_INTERVAL
    ) -> AsyncGenerator[JobSnapshot]:
        """Yields snapshots of the job until it ends, through outages of the control plane; the last one holds its
        result. One that is late is preceded by the last one with the `problem`.

        Raises:
            JobNotFound: if there is no such job.
        """
        from perdure.client.watching import watch_job

        return watch_job(self, name, namespace, interval)

    def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        node: int | Collection[int] | None = None,
        role: str | None = None,
        incarnation: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
    ) -> AsyncGenerator[LogLine]:
        """Returns lines of the nodes' output in the order of their times: from files of this machine; else from the
        nodes' agents while they run; else from the copies at `outputs.logs`.

        Args:
            name: The job's name.
            namespace: The job's namespace.
            node: Only logs of this node or these nodes.
            role: Only this role, of a job with several.
            incarnation: Only this incarnation of each node; by default all that this machine keeps, and the newest of
                other nodes.
            follow: Continue until the job ends.
            tail: Begin with this many of each node's last lines; None: all lines, or the last 1,000 from agents.
            since: Begin with what was printed then; agents then send all of it.

        Raises:
            LogsUnavailable: if a log cannot be read; after all others.
        """
        from perdure.client.logs import Selection, ask_agent, look_at_roles, read_logs

        nodes = (node,) if isinstance(node, int) else node
        return read_logs(
            partial(look_at_roles, lambda which: self.look(name, namespace=namespace, role=which), role),
            partial(ask_agent, self, job_workflow_id(namespace or self.namespace, name)),
            Selection(nodes=None if nodes is None else frozenset(nodes), incarnation=incarnation),
            follow=follow,
            tail=tail,
            since=since,
            places=self._log_places,
        )

    async def stacks(
        self,
        name: str,
        *,
        namespace: str | None = None,
        node: int | Collection[int] | None = None,
        role: str | None = None,
    ) -> tuple[NodeStacks, ...]:
        """Asks each running node where its ranks are: the calls of their threads, and what the kernel says of them. The
        ranks go on.

        Args:
            name: The job's name.
            namespace: The job's namespace.
            node: Only this node, or these nodes.
            role: The role whose nodes are meant, for a job with several.

        Raises:
            Refused: if no such node runs.
        """
        from perdure.client.stacks import read_stacks

        running = await self._running(name, namespace, role, node, one_role=False)
        return await read_stacks(self, job_workflow_id(namespace or self.namespace, name), [one.id for one in running])

    async def check(
        self,
        name: str,
        *,
        namespace: str | None = None,
        node: int | Collection[int] | None = None,
        role: str | None = None,
        full: bool = False,
    ) -> tuple[NodeChecks, ...]:
        """Checks the machines of these running nodes, or of all, beside each other; `full` adds devices and links.

        Raises:
            Refused: if no such node runs, or the job has several roles and none is named.
        """
        from perdure.client.checks import check_nodes

        running = await self._running(name, namespace, role, node, one_role=True)
        return await check_nodes(self, job_workflow_id(namespace or self.namespace, name), running, full=full)

    async def replay(
        self, name: str, *, namespace: str | None = None, role: str | None = None
    ) -> tuple[NodeChecks, ...]:
        """Has other ranks compute the next step of a running job again, where its script can replay steps
        (`perdure_training.replay`); returns a check for each rank. What differs, the job handles as always.

        Raises:
            Refused: if no node runs, or the job has several roles and none is named.
        """
        from perdure.client.checks import replay_step

        running = await self._running(name, namespace, role, None, one_role=True)
        return await replay_step(self, job_workflow_id(namespace or self.namespace, name), running)

    # Changing jobs

    async def suspend(
        self, name: str, *, namespace: str | None = None, role: str | None = None, reason: str = ""
    ) -> Accepted:
        """Releases all nodes, or those of one role; the job keeps its history and can be resumed."""
        return await self._update(name, namespace, "suspend", RoleRequest(role=role, reason=reason), Accepted)

    async def resume(
        self, name: str, *, namespace: str | None = None, role: str | None = None, reason: str = ""
    ) -> Accepted:
        """Requests nodes for a suspended job again, but for roles that were suspended alone; or for one such role."""
        return await self._update(name, namespace, "resume", RoleRequest(role=role, reason=reason), Accepted)

    async def restart(
        self,
        name: str,
        *,
        namespace: str | None = None,
        role: str | None = None,
        reason: str = "",
        older: bool = False,
    ) -> Accepted:
        """Restarts all ranks in place, as a new generation; in a job with several roles, those of this role.

        Args:
            name: The job.
            namespace: Its namespace; None: that of the client.
            role: The role.
            reason: The reason that the job keeps.
            older: The ranks wait for a newer state than they can load, and are to continue with the older one.
        """
        request = RestartRequest(role=role, reason=reason, older=older)
        return await self._update(name, namespace, "restart", request, Accepted)

    async def pause_repairs(
        self, name: str, *, duration: timedelta, namespace: str | None = None, reason: str = ""
    ) -> Accepted:
        """Has hangs, slow ranks, bad numbers and wrong results shown and not repaired for a while; what dies is."""
        request = PauseRequest(duration=duration, reason=reason)
        return await self._update(name, namespace, "pause_repairs", request, Accepted)

    async def resume_repairs(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """Has them repaired again."""
        return await self._update(name, namespace, "resume_repairs", ReasonRequest(reason=reason), Accepted)

    async def save_checkpoint(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """Has the ranks make a checkpoint in storage at one of their next steps; returns before that has happened."""
        return await self._update(name, namespace, "save_checkpoint", ReasonRequest(reason=reason), Accepted)

    async def relaunch_node(
        self, name: str, rank: int, *, namespace: str | None = None, role: str | None = None, reason: str = ""
    ) -> Accepted:
        """Replaces one node by a new one; in a job with several roles, a node of this role."""
        request = RelaunchRequest(rank=rank, role=role, reason=reason)
        return await self._update(name, namespace, "relaunch_node", request, Accepted)

    async def cancel(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """Requests that the job ends; its nodes are stopped within their grace period. Returns before that has
        happened. The server keeps the request for a job that is paused in Temporal; the message names the remedy."""
        async with map_errors(self, name, namespace):
            handle = await self._handle(name, namespace)
            found = await self._described(name, namespace)
            if not found.is_open:
                raise Refused(f"{name} does not run: it has ended as {phase_of(found)}")
            await handle.cancel(reason=reason, rpc_timeout=CALL_TIMEOUT)
        if pause := pause_of(found):
            return Accepted(message=f"{name} is cancelled once it is unpaused: {describe_pauses([pause])[0]}")
        return Accepted(message=f"{name} is being cancelled; its nodes are stopped within their grace period")

    async def issue_ticket(
        self, name: str, *, nodes: int = 1, lifetime: timedelta = TICKET_LIFETIME, namespace: str | None = None
    ) -> IssuedTicket:
        """Makes a ticket, with which machines that do not reach Temporal join the job through the gateway.

        Machines with it may have that many places at a time. Those that joined before it expires stay.
        """
        secret = new_secret()
        digest = digest_of(secret)
        request = TicketRequest(id=id_of(digest), digest=digest, nodes=nodes, lifetime=lifetime)
        ticket = await self._update(name, namespace, "issue_ticket", request, Ticket)
        return IssuedTicket(id=ticket.id, secret=SecretStr(secret), nodes=nodes, expires_at=ticket.expires_at)

    async def revoke_ticket(self, name: str, ticket: str, *, namespace: str | None = None) -> Accepted:
        """Withdraws a ticket: its machines lose their places, and get no others."""
        return await self._update(name, namespace, "revoke_ticket", TicketRef(id=ticket), Accepted)

    async def _running(
        self, name: str, namespace: str | None, role: str | None, node: int | Collection[int] | None, *, one_role: bool
    ) -> tuple[RunningNode, ...]:
        """The nodes whose agents can be asked: these, or all; with `one_role` of no more than one role."""
        status, views = await self.look(name, namespace=namespace, role=role)
        if one_role:
            require_one_role(status, role)
        return running_nodes(status, views, node)
