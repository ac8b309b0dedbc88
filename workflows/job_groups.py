"""The groups of one job: starts or adopts each, sends it its desired state, and notices its end.

Invariants:
    - The newest desired state of a group is enough: one that still waits is replaced, never sent after it.
    - A group that cannot be reached is tried again until it has closed; one that has closed is started again.
    - A group declines what a job desires that was reset, and sends its table: the job follows that.
    - A group that was reset reports it, and is sent the newest desired state: what it knows more is the job's.
    - In a job of several roles an adopted group is sent nothing before its table is part of the job's state. A role
    that waits for others desires no nodes, so the group would end those that it has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, TemporalError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import Adopt, GroupDesire
    from perdure.contract.names import group_workflow_id
    from perdure.contract.worlds import pack_roles
    from perdure.spec.job import JobSpec
    from perdure.workflows import options
    from perdure.workflows.delivery import Delivery, deliver
    from perdure.workflows.node_record import GroupInput
    from perdure.workflows.policy.facts.deduplication import begin_ownership_epoch
    from perdure.workflows.policy.facts.events import AddressedEvent, ForRole, GroupWoundDown, TimePassed
    from perdure.workflows.policy.roles.addresses import addresses_by_role
    from perdure.workflows.policy.state.job import JobState
    from perdure.workflows.policy.state.role import RoleState
    from perdure.workflows.policy.world import group_desire


class Group(NamedTuple):
    """One group of a job."""

    role: str
    number: int
    """Counts the groups of the role."""


class GroupOwner(Protocol):
    """The job, as its groups need it."""

    state: JobState
    job: JobSpec
    events: deque[AddressedEvent]

    def on_delivered(self) -> None:
        """Called when a group has its newest desired state."""
        ...


class JobGroups:
    """What a job has sent to its groups, and what it still has to send; see the module."""

    def __init__(self, owner: GroupOwner, *, carried: bool) -> None:
        """Creates the table.

        Args:
            owner: The job.
            carried: Whether an earlier run of the job has started the groups of its state.
        """
        self._owner = owner
        unknown = {Group(role, number) for role, numbers in owner.state.unknown_groups.items() for number in numbers}
        self._started: set[Group] = set(self._groups()) - unknown if carried else set()
        self._sent: dict[Group, GroupDesire] = {}
        self._unsent: dict[Group, None] = {}
        """Groups whose desired state has changed since `start_senders` was last called, in that order."""
        self._unknown: set[Group] = unknown
        if not carried and self._has_several_roles:
            self._unknown = set(self._groups())
        """Groups of a job of several roles that may have nodes of which its state does not tell."""
        self._declined: set[Group] = set()
        """Groups that have not taken what they were sent, although it was delivered."""
        self._tables: set[Group] = set()
        """Groups whose table has arrived since `note_changes` was last called."""
        self._senders: dict[Group, asyncio.Task[None]] = {}
        self._followers: dict[Group, asyncio.Task[None]] = {}

    @property
    def have_unsent(self) -> bool:
        """Whether a desired state has changed since `start_senders` was last called."""
        return bool(self._unsent)

    @property
    def are_settled(self) -> bool:
        """Whether every group has its newest desired state."""
        return not self._senders and not self._unsent

    @property
    def are_known(self) -> bool:
        """Whether the job's state has the nodes of all groups that were adopted."""
        return not self._unknown

    def unknown(self) -> dict[str, tuple[int, ...]]:
        """Returns the numbers of the other ones, by their role."""
        by_role: dict[str, list[int]] = {}
        for group in sorted(self._unknown):
            by_role.setdefault(group.role, []).append(group.number)
        return {role: tuple(numbers) for role, numbers in by_role.items()}

    def ids(self) -> tuple[str, ...]:
        """Returns the workflow IDs of all groups."""
        return tuple(self.id_of(group) for group in self._groups())

    def id_of(self, group: Group) -> str:
        return group_workflow_id(workflow.info().workflow_id, self._owner.state.uid, group.role, group.number)

    def note_changes(self) -> None:
        """Notes which desired states have changed. This looks at every node, and a thousand report at once."""
        self._unknown -= self._tables
        self._tables.clear()
        roles = addresses_by_role(self._owner.state, self._owner.job)
        packed = pack_roles(roles)
        for view in self._owner.state.views:
            version = view.desire_version
            for index, desire in group_desire.desires_of(view, roles, packed_roles=packed).items():
                group = Group(view.role, index)
                if self._sent.get(group) != desire and index not in view.wound_down_groups:
                    self._sent[group] = desire
                    version += 1
                    self._unsent[group] = None
            if version > view.desire_version:
                self._owner.state = self._owner.state.with_role(self._role(view.role).replace(desire_version=version))

    def start_senders(self) -> None:
        """Starts to bring the groups up to date whose desired state has changed; a busy sender does it by itself."""
        for group in self._unsent:
            if group not in self._senders:
                self._senders[group] = asyncio.create_task(self._send(group))
        self._unsent.clear()

    def forget_sent(self, group: Group) -> None:
        """Has the group's desired state sent again: the group has lost it."""
        self._sent.pop(group, None)

    def send_all_again(self) -> None:
        """Has the desired state of every group sent again: this run was reset, and groups may know more than it does.

        They decline it then, with their tables.
        """
        self._sent.clear()

    def take_table(self, group: Group, *, declined: bool = False) -> None:
        """Notes that the table of a group has arrived: the next decision takes it into the job's state.

        Args:
            group: The group.
            declined: Whether it has not taken what it was sent, even if a sender takes that for delivered.
        """
        self._tables.add(group)
        if declined:
            self._declined.add(group)
        self.forget_sent(group)

    def reach_again(self, group: Group) -> None:
        """Sends the group its desired state; a group that has closed is started again by that."""
        self.forget_sent(group)
        self._owner.events.append(TimePassed())

    def send_again(self, group: Group) -> None:
        """Sends the group its desired state even if it was delivered before: the group was reset since."""
        self._declined.add(group)
        self.reach_again(group)

    def adopt_again(self, group: Group) -> None:
        """Adopts a group that was reset to a moment before its adoption."""
        self._started.discard(group)
        self.send_again(group)

    async def _send(self, group: Group) -> None:
        """Brings one group up to date; a newer desired state replaces those that still wait."""
        sent: GroupDesire | None = None
        try:
            while (desire := self._sent.get(group)) is not None and (desire != sent or group in self._declined):
                self._unsent.pop(group, None)
                self._declined.discard(group)
                versioned = desire.replace(
                    version=self._role(group.role).desire_version,
                    run=workflow.info().run_id,
                    continued_run=workflow.info().continued_run_id or "",
                )
                delivered = await self._deliver(group, versioned)
                if delivered:
                    sent = desire
                elif delivered is not None:
                    await workflow.sleep(options.LOST_SIGNAL_RETRY)
        finally:
            del self._senders[group]
        self._owner.on_delivered()

    async def _deliver(self, group: Group, desire: GroupDesire) -> bool | None:
        """Returns whether the group has the desired state; None where it was adopted, so that another may be due."""
        group_id = self.id_of(group)
        if group in self._started:
            delivery = await deliver(group_id, "desire", desire)
            if delivery is not Delivery.CLOSED:
                return delivery is Delivery.TAKEN
            # It was terminated from outside; a new group adopts its nodes by their names.
            self._started.discard(group)
        return await self._start(group, group_id, desire)

    async def _start(self, group: Group, group_id: str, desire: GroupDesire) -> bool | None:
        owner, info = self._owner, workflow.info()
        # A run that was reset makes another one when it is replayed.
        ownership_epoch = workflow.uuid4().hex
        owner.state = owner.state.with_role(
            begin_ownership_epoch(self._role(group.role), group.number, ownership_epoch)
        )
        try:
            child = await workflow.start_child_workflow(
                "NodeGroup",
                GroupInput(
                    job_id=info.workflow_id,
                    job_first_run_id=info.first_execution_run_id,
                    uid=owner.state.uid,
                    group=group.number,
                    role=group.role,
                    spec=owner.job,
                    desire=desire,
                    ownership_epoch=ownership_epoch,
                ),
                id=group_id,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                static_summary=f"nodes of {owner.state.name}, role {group.role}, group {group.number}",
            )
        except WorkflowAlreadyStartedError:
            # This job was reset, or has lost its knowledge of the group: the group's table is the truth.
            return await self._adopt(group, group_id, Adopt(ownership_epoch=ownership_epoch))
        except (ChildWorkflowError, TemporalError) as error:
            workflow.logger.warning("group %s could not be started: %s", group_id, error)
            return False
        self._started.add(group)
        self._unknown.discard(group)
        self._followers[group] = asyncio.create_task(self._follow(group, ownership_epoch, child))
        return True

    async def _follow(self, group: Group, ownership_epoch: str, child: workflow.ChildWorkflowHandle[Any, Any]) -> None:
        """Starts a group again that has ended; a group that winds down has reported it before."""
        with suppress(ChildWorkflowError):
            await child
        if group.number not in self._role(group.role).wound_down_groups:
            # A group that ends as soon as it begins must not fill the job's history.
            await workflow.sleep(options.LOST_SIGNAL_RETRY, summary=f"start group {group.number} again")
        if self._role(group.role).ownership_epochs.get(group.number) == ownership_epoch:
            self._owner.events.append(ForRole(group.role, GroupWoundDown(group=group.number)))
            self.reach_again(group)

    async def _adopt(self, group: Group, group_id: str, adopt: Adopt) -> bool | None:
        if self._has_several_roles:
            self._unknown.add(group)
        if await deliver(group_id, "adopt", adopt) is not Delivery.TAKEN:
            return False
        if self._has_several_roles:
            # The nodes of one role may show that another one has completed, which must not start again.
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self.are_known,
                    timeout=options.TABLES_PATIENCE,
                    timeout_summary="until all groups have sent their tables",
                )
            if group in self._unknown:
                return False
        self._started.add(group)
        return None if self._has_several_roles else True

    @property
    def _has_several_roles(self) -> bool:
        return len(self._owner.state.roles) > 1

    def _groups(self) -> tuple[Group, ...]:
        roles = self._owner.state.roles
        return tuple(Group(name, index) for name, role in roles.items() for index in group_desire.groups_of(role))

    def _role(self, name: str) -> RoleState:
        return self._owner.state.roles[name]
