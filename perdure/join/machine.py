"""The loop of `perdure join`: keeps this machine in a job as one of its nodes until the job has ended.

The job assigns places; the processes on this machine are the same as on every other backend. Between them runs this
loop: it requests a place, stays there, sends a departure notice, and requests another place if the job continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import uuid4

from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.nodes.joined.machine import Machine
from activities.nodes.joined.node_session import NodeSession
from activities.nodes.local.folders import Ending, now
from agent.job_liveness import JobLiveness, query_job_liveness
from perdure.client.client import OUTAGE_LIMIT, UPDATE_TIMEOUT, Client
from perdure.client.connection import CALL_TIMEOUT, payload_encryption
from perdure.client.error_mapping import map_errors
from perdure.client.results import result_of
from perdure.client.views import FINAL_PHASES
from perdure.errors import (
    ControlPlaneUnreachable,
    ExitCode,
    JobAlreadyRunning,
    JobNotFound,
    JoinRefused,
    NotPermitted,
    NoWorker,
    SecretUnavailable,
)
from perdure.spec.job import JobSpec
from workflows.messages import (
    JobPhase,
    JobResult,
    JoinAnswer,
    JoinRefusal,
    JoinRequest,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeRequest,
)
from workflows.names import job_workflow_id

_SOON = 0.2
"""Seconds until a place that is being prepared is requested again: its group and its backend are quick."""
_LATER = 2.0
"""Seconds between two requests for something that others must provide: a server, a job, a place."""
_REFUSAL_IS_FINAL = 5.0
"""Seconds for which a request is repeated if the server denies a permission: a starting server may not know its callers
yet."""
_DEPARTURE_TIMEOUT = timedelta(seconds=10)
"""The time for trying to send the departure notice. Without the notice the lease lapses, and the job learns of the
departure later."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The user's request to `perdure join`."""

    job: str
    namespace: str = "default"
    command: tuple[str, ...] | None = None
    """The command to run; None for the job's own."""
    create: JobSpec | None = None
    """The job to start if there never was one of that name."""
    wait: bool = False
    """Whether to wait for a missing server, job or place, until the job has ended."""


class MachineInJob:
    """The membership of one machine in one job."""

    def __init__(self, client: Client, machine: Machine, options: JoinOptions, *, say: Callable[[str], None]) -> None:
        """Prepares the membership; `run` joins.

        Args:
            client: A client of the job's control plane.
            machine: This machine.
            options: The user's request.
            say: Prints a line for people.
        """
        self._client = client
        self._machine = machine
        self._options = options
        self._say = say
        self._said = ""
        self._session = uuid4().hex
        self._started_at = datetime.now(UTC)
        self._node_sessions = 0
        self._was_in = False
        """This machine has been a node of the job."""
        self._node_session: NodeSession | None = None
        self._signal: signal.Signals | None = None

    async def run(self) -> int:
        """Joins, and returns the job's exit code; 128 + n after signal n; 0 if the job has released this machine.

        Raises:
            JoinRefused: if the job has no place for it, and waiting was not requested or does not help.
            PerdureError: if there is no such job, or no control plane.
        """
        working = asyncio.ensure_future(self._work())
        with _signals(lambda number: self._stop(number, working)):
            try:
                return await working
            except asyncio.CancelledError:
                if self._signal is None:
                    raise
                return 128 + self._signal

    def _stop(self, number: signal.Signals, working: asyncio.Future[int]) -> None:
        self._signal = self._signal or number
        if self._node_session is None:
            working.cancel()
        else:
            self._node_session.stop(self._why_leaving)

    async def _work(self) -> int:
        if self._options.create is not None:
            await self._patiently(self._create)
        while True:
            place = await self._take_place()
            if isinstance(place, JobResult):
                return self._over(place)
            ending = await self._run_as(place)
            if self._signal is not None:
                return 128 + self._signal
            result = await self._patiently(lambda place=place: self._result(place))
            if result is not None:
                return self._over(result)
            if ending.exit_code == 0 and not self._options.wait:
                self._say(f"{self._options.job} continues without this machine: {ending.reason}")
                return ExitCode.OK
            self._say(f"node {place.node.rank} is over: {ending.reason}; requesting a place again")

    async def _create(self) -> None:
        """Starts the job if none has been started; of many machines that try at once, one succeeds."""
        assert self._options.create is not None
        with contextlib.suppress(JobAlreadyRunning):
            await self._client.submit(self._options.create, again=False)
            self._say(f"started the job {self._options.job}")

    # Requesting a place

    async def _take_place(self) -> NodeRequest | JobResult:
        """Returns a place in the job, or the job's result if it has ended."""
        self._node_sessions += 1
        while True:
            try:
                answer = await self._patiently(self._ask)
            except JoinRefused as refused:
                if refused.kind == JoinRefusal.ENDING:
                    return await self._client.wait(self._options.job, namespace=self._options.namespace)
                if refused.kind == JoinRefusal.OVER:
                    self._node_sessions += 1
                elif refused.kind == JoinRefusal.NO_PLACE and self._options.wait:
                    await self._wait(str(refused), _LATER)
                else:
                    raise
            else:
                if isinstance(answer, JobResult):
                    return answer
                if answer.node is not None:
                    return answer.node
                await self._wait(answer.reason, _SOON)

    async def _ask(self) -> JoinAnswer | JobResult:
        """Requests a place once.

        Raises:
            JoinRefused: if the job refuses.
            NoWorker: if no worker answers for it.
        """
        options, machine = self._options, self._machine
        request = JoinRequest(
            node_id=machine.node_id,
            session=self._session,
            stay=self._node_sessions,
            started_at=self._started_at,
            host=machine.host,
            place=machine.place,
            command=options.command,
        )
        temporal = await self._client.connect()
        handle = temporal.get_workflow_handle(job_workflow_id(options.namespace, options.job))
        try:
            async with map_errors(self._client, options.job, options.namespace):
                return await handle.execute_update(  # pyright: ignore[reportUnknownMemberType]
                    "join", request, result_type=JoinAnswer, rpc_timeout=UPDATE_TIMEOUT
                )
        except JobNotFound:
            # An update of a job that has ended is not found either.
            await self._client.describe(options.job, namespace=options.namespace)
            return await self._client.wait(options.job, namespace=options.namespace)
        except WorkflowUpdateFailedError as error:
            cause = error.cause
            kind = cause.type or "" if isinstance(cause, ApplicationError) else ""
            text = cause.message if isinstance(cause, ApplicationError) else str(cause)
            wrong = kind in (JoinRefusal.OTHER_COMMAND, JoinRefusal.OTHER_BACKEND)
            raise JoinRefused(
                f"{options.job} refuses: {text}",
                kind=kind,
                exit_code=ExitCode.USAGE if wrong else ExitCode.INFRASTRUCTURE,
                remedy=_REMEDIES.get(kind, ""),
            ) from error
        except WorkflowUpdateRPCTimeoutOrCancelledError as error:
            raise NoWorker(
                f"{options.job} did not answer within {UPDATE_TIMEOUT.total_seconds():.0f} s; no worker seems to run",
                remedy="`perdure worker` runs one, on any machine that reaches the Temporal server.",
            ) from error

    # Staying and leaving

    async def _run_as(self, place: NodeRequest) -> Ending:
        """Runs the node; returns when this machine is no longer a node of the job, and has reported that."""
        self._was_in = True
        endpoint, node = self._client.endpoint, place.node
        connection = {
            "TEMPORAL_ADDRESS": endpoint.address,
            "TEMPORAL_NAMESPACE": endpoint.namespace,
            **payload_encryption(endpoint).environment,
        }
        try:
            self._node_session = session = NodeSession(place, self._machine, connection=connection)
            self._say(f"{place.spec.name}: node {node.rank} at {self._machine.address}; log: {session.log}")
            ending = await session.run()
        except (OSError, SecretUnavailable) as error:
            await self._report_departure(place, Ending(time=now(), reason=f"{self._machine.host}: {error}"))
            raise
        if self._signal is not None:
            ending = ending.model_copy(update={"reason": self._why_leaving})
        await self._report_departure(place, ending)
        self._node_session = None
        return ending

    @property
    def _why_leaving(self) -> str:
        return f"`perdure join` on {self._machine.host} got {self._signal.name if self._signal else 'no signal'}"

    async def _report_departure(self, place: NodeRequest, ending: Ending) -> None:
        """Reports to the group what a backend's watch would report: that no process of the node runs any more."""
        gone = NodeEvent(
            kind=NodeEventKind.GONE,
            rank=place.node.rank,
            incarnation=place.node.incarnation,
            time=ending.time.astimezone(UTC),
            reason=ending.reason,
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEPARTURE_TIMEOUT.total_seconds()):
                while True:
                    try:
                        group = (await self._client.connect()).get_workflow_handle(place.group_id)
                        await group.signal("node_events", NodeEvents(events=(gone,)), rpc_timeout=CALL_TIMEOUT)
                        return
                    except RPCError as error:
                        if error.status is RPCStatusCode.NOT_FOUND:
                            return
                    except ControlPlaneUnreachable:
                        pass
                    await asyncio.sleep(_SOON)

    async def _result(self, place: NodeRequest) -> JobResult | None:
        """The result of the job that gave the place, if it has ended or is ending; None if it continues."""
        options = self._options
        temporal = await self._client.connect()
        handle = temporal.get_workflow_handle(place.job_id, run_id=place.job_first_run_id, result_type=JobResult)
        async with map_errors(self._client, options.job, options.namespace):
            liveness = await query_job_liveness(
                temporal, job_id=place.job_id, first_run_id=place.job_first_run_id, rpc_timeout=CALL_TIMEOUT
            )
            if liveness is JobLiveness.OPEN:
                phase = (await self._client.status(options.job, namespace=options.namespace)).phase
                ends = phase is JobPhase.STOPPING or phase in FINAL_PHASES
                return await self._client.wait(options.job, namespace=options.namespace) if ends else None
            try:
                return await handle.result(rpc_timeout=CALL_TIMEOUT)
            except WorkflowFailureError as error:
                return await result_of(error, handle)

    def _over(self, result: JobResult) -> int:
        self._say(f"{self._options.job} {result.phase}: {result.reason}")
        return result.exit_code

    # Waiting

    async def _patiently(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Repeats a call that gets no answer: a machine that was in the job tolerates an outage, with or without
        `wait`."""
        loop = asyncio.get_running_loop()
        patience = math.inf if self._options.wait else OUTAGE_LIMIT.total_seconds() if self._was_in else 0
        deadline = loop.time() + patience
        refused_until = loop.time() + _REFUSAL_IS_FINAL
        while True:
            try:
                return await call()
            except NotPermitted as error:
                if loop.time() >= refused_until:
                    raise
                await self._wait(str(error), _SOON)
            except (ControlPlaneUnreachable, JobNotFound) as error:
                if loop.time() >= deadline or (isinstance(error, JobNotFound) and not self._options.wait):
                    raise
                await self._wait(str(error), _LATER)

    async def _wait(self, reason: str, seconds: float) -> None:
        if reason != self._said:
            self._said = reason
            self._say(f"waiting: {reason}")
        await asyncio.sleep(seconds)


_REMEDIES: dict[str, str] = {
    JoinRefusal.NO_PLACE: "With --wait this machine stays ready until there is one; `perdure scale` makes more.",
    JoinRefusal.OTHER_COMMAND: "Leave the command out, or join a job of another name.",
    JoinRefusal.DISPLACED: "Give machines that run at the same time different --node-id.",
}


@contextlib.contextmanager
def _signals(handler: Callable[[signal.Signals], None]) -> Generator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
