"""Activities for the control plane's commands: short ones on the node's own queue, and the lease, the only long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure.agent.checks import Checker
from perdure.agent.connection import why_cut_off
from perdure.agent.lease import Lease
from perdure.agent.log_reader import read_log
from perdure.agent.node import Node
from perdure.agent.stacks import StackReader, StacksUnknown
from perdure.agent.store import StoreRelay
from perdure.contract.checks import CheckNode, NodeChecks
from perdure.contract.commands import ApplyDesired, CheckConnection, LeaseRequest, NodeReached
from perdure.contract.logs import LogChunk, ReadLog
from perdure.contract.stacks import NodeStacks, ReadStacks
from perdure.contract.store import StoreChanged


class Commands:
    """The agent's activities. A command for another incarnation is answered with a refusal."""

    def __init__(self, node: Node, lease: Lease, store: StoreRelay, stacks: StackReader, checks: Checker) -> None:
        self._node = node
        self._lease = lease
        self._store = store
        self._stacks = stacks
        self._checks = checks

    @property
    def activities(self) -> Sequence[Callable[..., Any]]:
        """The activities that the agent's worker serves."""
        return (
            self.hold_lease,
            self.apply_desired,
            self.check_connection,
            self.read_log,
            self.read_stacks,
            self.check_node,
            self.store_changed,
        )

    @activity.defn(name="hold_lease")
    async def hold_lease(self, request: LeaseRequest) -> None:
        """Heartbeats until it is cancelled or superseded.

        Raises:
            ApplicationError: if the lease is for another incarnation; not retried.
        """
        if refusal := self._node.refusal(request.node):
            raise ApplicationError(refusal, type="WrongIncarnation", non_retryable=True)
        self._checks.on_time(activity.info().started_time)
        await self._lease.hold(request)

    @activity.defn(name="apply_desired")
    async def apply_desired(self, command: ApplyDesired) -> NodeReached:
        """Makes the node follow what its group desires; returns before it has reached all of it."""
        return self._node.apply_desired(command)

    @activity.defn(name="check_connection")
    async def check_connection(self, command: CheckConnection) -> None:
        """Checks whether another node's machine answers.

        Raises:
            ApplicationError: if it does not.
        """
        if refusal := self._node.refusal(command.node):
            raise ApplicationError(refusal, type="WrongIncarnation", non_retryable=True)
        if problem := await why_cut_off(command.address, command.port):
            raise ApplicationError(problem, type="CutOff")

    @activity.defn(name="read_log")
    async def read_log(self, request: ReadLog) -> LogChunk:
        """Returns a piece of the node's log without waiting: readers must not occupy the slots of commands."""
        return await asyncio.to_thread(
            read_log,
            self._node.config.run_dir,
            position=request.position,
            lines=request.lines,
            since=request.since,
        )

    @activity.defn(name="read_stacks")
    async def read_stacks(self, request: ReadStacks) -> NodeStacks:
        """Returns where the node's ranks are.

        Raises:
            ApplicationError: if the launcher does not answer.
        """
        try:
            return await self._stacks.read()
        except StacksUnknown as error:
            raise ApplicationError(str(error), type="StacksUnknown", non_retryable=True) from error

    @activity.defn(name="check_node")
    async def check_node(self, question: CheckNode) -> NodeChecks:
        """Returns what checks of the node's machine find."""
        return await self._checks.answer(question, handed_out=activity.info().started_time)

    @activity.defn(name="store_changed")
    async def store_changed(self, command: StoreChanged) -> None:
        """Has calls to the job's store sent again that wait for other ranks.

        Raises:
            ApplicationError: if the command is for another incarnation; not retried.
        """
        if refusal := self._node.refusal(command.node):
            raise ApplicationError(refusal, type="WrongIncarnation", non_retryable=True)
        self._store.notify()
