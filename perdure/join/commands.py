"""Runs the commands of a job's `notifications` on a machine that has joined it.

A few machines of the job poll one task queue of its run, so a command runs on whichever of them answers, and on another
one when that does not. Messages name a notification only: the command is the one in the specification with which the
job gave the machine its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from types import NoneType
from typing import Final

from temporalio import activity
from temporalio.client import Client as TemporalClient
from temporalio.exceptions import ApplicationError
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from perdure.activities.webhooks import DeliveryFailed, run_command
from perdure.base.backoff import Backoff
from perdure.base.errors import PerdureError, SecretUnavailable
from perdure.base.executions import update
from perdure.base.secret_store import SecretStore
from perdure.client.client import Client
from perdure.contract import CommandAttempt, NodeRequest
from perdure.contract.names import command_task_queue, notifier_workflow_id, uid_of
from perdure.spec.job import JobSpec
from perdure.workflows import options

logger = logging.getLogger(__name__)

_SLOTS: Final = 4
"""Commands that run at a time."""


class MachineCommands:
    """The commands of one job's notifications on this machine."""

    def __init__(self, client: Client, environment: Mapping[str, str] = os.environ) -> None:
        """Creates the object; nothing runs before `start`.

        Args:
            client: A connection to Temporal.
            environment: The environment of commands, to which the job's `env` and `secrets` are added.
        """
        self._client = client
        self._environment = environment
        self._spec: JobSpec | None = None
        self._uid, self._role = "", ""
        self._serving: asyncio.Task[None] | None = None

    def start(self, place: NodeRequest) -> None:
        """Serves from now on, if the job has commands, and this place is one of those that run them."""
        if self._serving is not None or not _commands(place.spec):
            return
        if place.node.rank >= options.MACHINES_WITH_COMMANDS:
            return
        self._spec, self._uid, self._role = place.spec, uid_of(place.job_first_run_id), place.node.role
        self._serving = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Ends; a command that runs is killed, and runs again on another machine."""
        if self._serving is None:
            return
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        self._serving = None

    async def finish(self) -> None:
        """Serves until no command waits any more, after the job's end; for `COMMANDS_AFTER_END` at most."""
        if self._serving is None:
            return
        assert self._spec is not None
        workflow_id = notifier_workflow_id(self._spec.namespace, self._spec.name, self._uid)
        try:
            async with asyncio.timeout(options.COMMANDS_AFTER_END.total_seconds()):
                handle = (await self._client.connect()).get_workflow_handle(workflow_id)
                await update(handle, "commands_delivered", args=[], result_type=NoneType)
        except Exception as error:
            # There is nothing to wait for without an answer, whatever the reason: usually all is delivered.
            logger.info("%s does not answer: %s", workflow_id, error)

    async def _serve(self) -> None:
        backoff, loop = Backoff(1.0, 30.0), asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._worker(await self._client.connect()).run()
            except (PerdureError, RuntimeError) as error:
                # The SDK's worker ends so where the server is away at its start.
                logger.warning("commands of notifications are not served: %s", error)
            await asyncio.sleep(backoff.next_pause(ran=loop.time() - began))

    def _worker(self, temporal: TemporalClient) -> Worker:
        return Worker(
            temporal,
            task_queue=command_task_queue(self._uid),
            activities=[self.run],
            max_concurrent_activities=_SLOTS,
            # Each poller counts against the server's limit of them.
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(1),
        )

    @activity.defn(name="run_notification_command")
    async def run(self, attempt: CommandAttempt) -> None:
        """Runs the command of one notification.

        Raises:
            ApplicationError: if it has not ended with 0; without retries where the specification has no such command.
        """
        assert self._spec is not None
        command = _commands(self._spec).get(attempt.target)
        if command is None:
            raise ApplicationError(
                f"the specification has no notifications.{attempt.target}.command",
                type="DeliveryFailed",
                non_retryable=True,
            )
        try:
            environment = {
                **self._environment,
                **self._spec.env_of(self._role),
                **SecretStore().environment(self._spec.secrets),
                "PERDURE_NOTIFICATION_ID": str(attempt.body.id),
            }
            workdir = self._spec.workdir
            await run_command(
                command,
                attempt.body.model_dump_json().encode(),
                environment=environment,
                folder=workdir.path if workdir else None,
            )
        except (DeliveryFailed, SecretUnavailable) as error:
            raise ApplicationError(str(error), type="DeliveryFailed") from None


def _commands(spec: JobSpec) -> dict[str, list[str]]:
    return {name: target.command for name, target in spec.notifications.items() if target.command is not None}
