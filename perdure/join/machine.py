"""The loop of `perdure join`: keeps this machine in a job as one of its nodes until the job has ended.

The job assigns places; the processes on this machine are the same as on every other backend. Between them runs this
loop: it requests a place, stays there, sends a departure notice, and requests another place if the job continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from perdure.activities.nodes.joined.machine import Machine
from perdure.activities.nodes.joined.node_session import NodeSession
from perdure.activities.nodes.local.folders import Ending, now
from perdure.activities.nodes.local.spawn import boot_id
from perdure.base.backoff import Backoff
from perdure.base.errors import (
    ControlPlaneOverloaded,
    ControlPlaneUnreachable,
    ExitCode,
    JobNotFound,
    JoinRefused,
    NotPermitted,
    PerdureError,
    SecretUnavailable,
)
from perdure.client.client import OUTAGE_LIMIT
from perdure.client.joining import JobConnection
from perdure.contract import (
    JobResult,
    JoinAnswer,
    JoinRefusal,
    JoinRequest,
    LossCause,
    NodeRequest,
)
from perdure.join.commands import MachineCommands
from perdure.spec.job import JobSpec
from perdure_launcher.system.user_signals import USER_SIGNALS

_SOON = 0.2
"""Seconds until a place that is being prepared is requested again: its group and its backend are quick."""
_MORE_SELDOM = 10.0
"""The part of the time waited for such a place after which it is requested again, at most after `_LATER`: one may open
after a pause of minutes, and each request that is granted is some events of the job's history."""
_LATER = 2.0
"""Seconds between two requests for something that others must provide: a server, a job, a place."""
_LONGEST = 30.0
"""The longest time between two requests for something that hundreds of machines may wait for."""
_REFUSAL_IS_FINAL = 5.0
"""Seconds for which a request is repeated if the server denies a permission: a starting server may not know its callers
yet."""
_DEPARTURE_TIMEOUT = timedelta(seconds=10)
"""The time for trying to send the departure notice. Without the notice the lease lapses, and the job learns of the
departure later."""
_ANSWER_WITHIN = 3.0
"""Seconds for the answer to a request for a place that is on its way when a signal comes: nothing of the job runs here
yet, and the user waits. Without it, other machines get that place after `timing.rendezvous.enter_timeout`."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The user's request to `perdure join`."""

    job: str
    namespace: str = "default"
    role: str | None = None
    """The role among whose nodes the place is; None for the first that lacks nodes."""
    command: tuple[str, ...] | None = None
    """The command to run; None for the job's own."""
    create: JobSpec | None = None
    """The job to start if there never was one of that name."""
    wait: bool = False
    """Whether to wait for a missing server, job or place, until the job has ended."""


class MachineInJob:
    """The membership of one machine in one job."""

    def __init__(
        self,
        connection: JobConnection,
        machine: Machine,
        options: JoinOptions,
        *,
        say: Callable[[str], None],
        commands: MachineCommands | None = None,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares the membership; `run` joins.

        Args:
            connection: To the job.
            machine: This machine.
            options: The user's request.
            say: Prints a line for people.
            commands: Of the job's notifications; None where the machine runs none.
            on_leaving: Called when a signal ends the stay.
        """
        self._connection = connection
        self._machine = machine
        self._options = options
        self._say = say
        self._commands = commands
        self._on_leaving = on_leaving
        self._said = ""
        self._started_at = datetime.now(UTC)
        self._uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
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
        with _signals(lambda number: self._stop(number, working), pass_on=self._pass_on):
            try:
                return await working
            except asyncio.CancelledError:
                if self._signal is None:
                    raise
                return 128 + self._signal
            finally:
                if self._commands is not None:
                    await self._commands.stop()

    def _stop(self, number: signal.Signals, working: asyncio.Future[int]) -> None:
        self._signal = self._signal or number
        self._on_leaving()
        if self._node_session is None:
            working.cancel()
        else:
            self._node_session.stop(self._why_leaving)

    def _pass_on(self, number: signal.Signals) -> None:
        """Lets the ranks have a signal that they may handle; without a node nothing is done about it."""
        if self._node_session is not None:
            self._node_session.pass_on(number)
        if number is signal.SIGTSTP:
            # What a terminal's Ctrl-Z is for.
            os.kill(os.getpid(), signal.SIGSTOP)

    async def _work(self) -> int:
        if self._options.create is not None:
            await self._patiently(self._create)
        while True:
            place = await self._take_place()
            if isinstance(place, JobResult):
                return await self._over(place)
            ending = await self._run_as(place)
            if self._signal is not None:
                return 128 + self._signal
            result = await self._patiently(lambda place=place: self._connection.result(place))
            if result is not None:
                return await self._over(result)
            if ending.exit_code == 0 and not self._options.wait:
                self._say(f"{self._options.job} continues without this machine: {ending.reason}")
                return ExitCode.OK
            self._say(f"{_named(place)} is over: {ending.reason}; requesting a place again")

    async def _create(self) -> None:
        """Starts the job if none has been started; of many machines that try at once, one succeeds."""
        assert self._options.create is not None
        if await self._connection.start(self._options.create):
            self._say(f"started the job {self._options.job}")

    # Requesting a place

    async def _take_place(self) -> NodeRequest | JobResult:
        """Returns a place in the job, or the job's result if it has ended."""
        self._node_sessions += 1
        loop = asyncio.get_running_loop()
        reason, since = "", 0.0
        while True:
            try:
                answer = await self._patiently(self._ask)
            except JoinRefused as refused:
                if refused.kind == JoinRefusal.ENDING:
                    return await self._connection.wait()
                if refused.kind == JoinRefusal.OVER:
                    self._node_sessions += 1
                    continue
                if refused.kind != JoinRefusal.NO_PLACE or not self._options.wait:
                    raise
                found, again, shortest, longest = str(refused), None, _LATER, _LONGEST
            else:
                if isinstance(answer, JobResult):
                    return answer
                if answer.node is not None:
                    return answer.node
                found, again, shortest, longest = answer.reason, answer.again, _SOON, _LATER
            if found != reason:
                reason, since = found, loop.time()
            if again is not None:
                # The job decides which of the machines that wait has its turn.
                await self._wait(reason, again.total_seconds())
            else:
                await self._wait(reason, min(max(shortest, (loop.time() - since) / _MORE_SELDOM), longest))

    async def _ask(self) -> JoinAnswer | JobResult:
        """Requests a place once. Where a signal comes before the answer, the place is given back that it has."""
        machine = self._machine
        request = JoinRequest(
            node_id=machine.node_id,
            session=self._connection.session,
            stay=self._node_sessions,
            started_at=self._started_at,
            boot=boot_id(),
            uptime=self._uptime,
            host=machine.host,
            role=self._options.role,
            place=machine.place,
            command=self._options.command,
        )
        asking = asyncio.ensure_future(self._connection.request_place(request))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(PerdureError, TimeoutError):
                async with asyncio.timeout(_ANSWER_WITHIN):
                    answer = await asking
                if isinstance(answer, JoinAnswer) and answer.node is not None:
                    ending = Ending(time=now(), reason=self._why_leaving)
                    await self._report_departure(answer.node, ending, LossCause.WANTED)
            raise

    # Staying and leaving

    async def _run_as(self, place: NodeRequest) -> Ending:
        """Runs the node; returns when this machine is no longer a node of the job, and has reported that."""
        self._was_in = True
        if self._commands is not None:
            self._commands.start(place)
        connection = self._connection.agent_connection()
        try:
            self._node_session = session = NodeSession(place, self._machine, connection=connection)
            self._say(f"{place.spec.name}: {_named(place)} at {self._machine.address}; log: {session.log}")
            ending = await session.run()
        except (OSError, SecretUnavailable) as error:
            await self._report_departure(place, Ending(time=now(), reason=f"{self._machine.host}: {error}"))
            raise
        cause = LossCause.UNKNOWN
        if self._signal is not None:
            ending, cause = ending.model_copy(update={"reason": self._why_leaving}), LossCause.WANTED
        await self._report_departure(place, ending, cause)
        self._node_session = None
        return ending

    @property
    def _why_leaving(self) -> str:
        return f"`perdure join` on {self._machine.host} got {self._signal.name if self._signal else 'no signal'}"

    async def _report_departure(self, place: NodeRequest, ending: Ending, cause: LossCause = LossCause.UNKNOWN) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEPARTURE_TIMEOUT.total_seconds()):
                while True:
                    try:
                        return await self._connection.report_departure(
                            place, time=ending.time.astimezone(UTC), reason=ending.reason, cause=cause
                        )
                    except PerdureError:
                        await asyncio.sleep(_SOON)

    async def _over(self, result: JobResult) -> int:
        self._say(f"{self._options.job} {result.phase}: {result.reason}")
        if self._commands is not None:
            await self._commands.finish()
        return result.exit_code

    # Waiting

    async def _patiently(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Repeats a call that gets no answer: a machine that was in the job tolerates an outage, with or without
        `wait`, and each one a server that is up and has too much to do, as where hundreds join at once."""
        loop = asyncio.get_running_loop()
        patience = math.inf if self._options.wait else OUTAGE_LIMIT.total_seconds() if self._was_in else 0
        deadline, overloaded_until = loop.time() + patience, loop.time() + OUTAGE_LIMIT.total_seconds()
        overload = Backoff(_LATER, _LONGEST)
        refused_until = loop.time() + _REFUSAL_IS_FINAL
        while True:
            try:
                return await call()
            except NotPermitted as error:
                if loop.time() >= refused_until:
                    raise
                await self._wait(str(error), _SOON)
            except (ControlPlaneUnreachable, JobNotFound) as error:
                if isinstance(error, ControlPlaneOverloaded):
                    deadline = max(deadline, overloaded_until)
                if loop.time() >= deadline or (isinstance(error, JobNotFound) and not self._options.wait):
                    raise
                # Machines that were refused together must not come together again.
                pause = overload.next_pause() if isinstance(error, ControlPlaneOverloaded) else _LATER
                await self._wait(str(error), pause * random.uniform(0.5, 1.0))

    async def _wait(self, reason: str, seconds: float) -> None:
        if reason != self._said:
            self._said = reason
            self._say(f"waiting: {reason}")
        await asyncio.sleep(seconds)


def _named(place: NodeRequest) -> str:
    """Names the node, with its role in a job of several."""
    role = f"{place.node.role} " if len(place.spec.roles) > 1 else ""
    return f"{role}node {place.node.rank}"


@contextlib.contextmanager
def _signals(
    handler: Callable[[signal.Signals], None], *, pass_on: Callable[[signal.Signals], None]
) -> Generator[None]:
    loop = asyncio.get_running_loop()
    # What was ignored from the start stays so: `nohup` has the command outlast its terminal.
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = dict.fromkeys(ends, handler) | dict.fromkeys(USER_SIGNALS, pass_on)
    numbers = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, handlers[number], number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
