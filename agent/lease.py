"""Holds the node's lease. The server detects silence: an agent that holds its lease is reachable; one without is
unreachable, and nothing worse.

The end of a lease says nothing about the job: the group continued as new, a newer attempt took over, or a database was
restored. So the agent releases it and waits for the next one. If none comes for a while, it queries the job, and only
the proof that the job has closed makes it stop training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import datetime

from temporalio import activity

from perdure.agent.job_liveness import JobLiveness
from perdure.agent.node import Node
from perdure.agent.notifier import Notifier
from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.telemetry import Telemetry
from perdure.agent.transport import ControlPlane
from perdure.contract.agents import LeaseTaken
from perdure.contract.commands import LeaseRequest

logger = logging.getLogger(__name__)

_NEXT_RUN = 5.0
"""Seconds after which the next run of a group has taken its leases, usually one or two: without one, the group may have
been terminated."""


class Lease:
    """The state of this agent's lease."""

    def __init__(
        self,
        node: Node,
        telemetry: Telemetry,
        control: ControlPlane,
        *,
        started_at: datetime,
        to_group: MessageSink,
        without_lease: Callable[[], None],
    ) -> None:
        """Creates the object without a lease.

        Args:
            node: The node of the lease.
            telemetry: Provides the heartbeats' details.
            control: Queries the job.
            started_at: When the agent started.
            to_group: Receives a message for each lease that is taken.
            without_lease: Called repeatedly while the job runs and no lease is held.
        """
        self._without_lease = without_lease
        self._node = node
        self._telemetry = telemetry
        self._control = control
        self._started_at = started_at
        self._to_group = to_group
        self._changed = Notifier()
        self._epoch = 0
        """The epoch of the newest lease taken."""
        self._run_id = ""
        """The run of the group that granted it. A restarted group counts its leases from the start."""
        self._holders = 0
        """The number of leases held; more than one while a new lease overlaps the old one."""
        self._turn = 0
        """Number of leases taken, by which each holder detects that it is not the newest any more."""
        self._ask_now = False
        self._run_is_over = False
        """The server has ended the newest lease together with its group's run, and this was not followed up yet."""
        self._taken_at: float | None = None
        """When the newest lease was taken, on the monotonic clock."""

    @property
    def held(self) -> bool:
        """Whether a lease is held."""
        return self._holders > 0

    @property
    def age(self) -> float | None:
        """Seconds since the newest lease was taken; None while none is held."""
        return time.monotonic() - self._taken_at if self.held and self._taken_at is not None else None

    def was_taken_since(self, moment: float) -> bool:
        """Whether a lease was taken after this moment of the monotonic clock."""
        return self._taken_at is not None and self._taken_at > moment

    @property
    def taken(self) -> int:
        """The number of leases taken."""
        return self._turn

    async def hold(self, request: LeaseRequest) -> None:
        """Holds the lease until it is cancelled or another one is taken."""
        run_id = activity.info().workflow_run_id or ""
        if run_id == self._run_id and request.epoch < self._epoch:
            return
        self._turn += 1
        turn = self._turn
        self._epoch, self._run_id = request.epoch, run_id
        self._holders += 1
        self._run_is_over = False
        self._taken_at = time.monotonic()
        self._changed.fire()
        logger.info("holding lease %d", request.epoch)
        self._node.events.lease_taken(epoch=request.epoch)
        self._to_group.put(
            LeaseTaken(
                **envelope(self._node.config.node),
                agent_started_at=self._started_at,
                epoch=request.epoch,
            )
        )
        interval = request.heartbeat.total_seconds()
        try:
            while turn == self._turn:
                activity.heartbeat(self._telemetry.view(request.epoch))
                await self._changed.wait_for(lambda: turn != self._turn, within=interval)
        except asyncio.CancelledError:
            # The usual end: the group's run is over, or a newer attempt has the lease. No workflow waits for a result.
            details = activity.cancellation_details()
            self._run_is_over = details is not None and details.not_found
            if details is None or not (details.not_found or details.timed_out):
                raise
        finally:
            self._holders -= 1
            self._changed.fire()
            logger.info("released lease %d", request.epoch)
            self._node.events.lease_released(epoch=request.epoch)

    def ask_soon(self) -> None:
        """Makes the agent query the job before the usual time, because a sender found the job or the group missing."""
        self._ask_now = True
        self._changed.fire()

    async def watch_owner(self) -> None:
        """Queries the job while no lease is held; ends the node when the job has closed."""
        timing = self._node.config.timing
        patience = timing.owner_check.total_seconds()
        loop = asyncio.get_running_loop()
        missing_since: float | None = None
        while True:
            await self._changed.wait_for(lambda: not self._holders)
            within = min(patience, _NEXT_RUN) if self._run_is_over else patience
            self._run_is_over = False
            if await self._changed.wait_for(lambda: bool(self._holders) or self._ask_now, within=within):
                if self._holders:
                    missing_since = None
                    continue
                self._ask_now = False
            liveness = await self._liveness()
            if liveness is JobLiveness.CLOSED:
                self._node.leave("the job has closed")
                return
            if liveness is JobLiveness.OPEN and not self._holders:
                self._without_lease()
            if liveness is not JobLiveness.NOT_FOUND:
                missing_since = None
                continue
            missing_since = missing_since or loop.time()
            orphan_grace = timing.processes.orphan_grace.total_seconds()
            if orphan_grace and loop.time() - missing_since >= orphan_grace:
                self._node.leave(f"the control plane has not known the job for {orphan_grace:.0f} s (orphan_grace)")
                return

    async def _liveness(self) -> JobLiveness | None:
        """Returns the job's liveness; None if there is no answer."""
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(self._node.config.timing.owner_check.total_seconds()):
                    liveness = await self._control.job_liveness()
            except TimeoutError:
                raise
            except Exception as error:
                logger.info("no lease, and the job could not be queried: %s", error)
            else:
                logger.info("no lease; the job is %s", liveness)
                return liveness
        return None
