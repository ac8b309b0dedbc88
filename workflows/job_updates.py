"""What users, and machines that join, ask of a running job: the updates of a TrainingJob.

An update is an event like any other, which the job decides on at once, so that its answer says what follows. What the
state of the job does not allow is refused before, and leaves nothing in its history.
"""

from __future__ import annotations

from collections.abc import Sequence

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.base.words import count as number_of
    from perdure.contract import (
        Accepted,
        JobStatus,
        JoinAnswer,
        JoinRequest,
        PauseRequest,
        ReasonRequest,
        RelaunchRequest,
        RestartRequest,
        RoleRequest,
        ScaleRequest,
        Ticket,
        TicketRef,
        TicketRequest,
    )
    from perdure.contract.names import group_index
    from perdure.contract.users import OBJECT_MEMO
    from perdure.spec.job import JobSpec
    from perdure.spec.roles import NodeCount
    from perdure.workflows import requests
    from perdure.workflows.job_groups import Group, JobGroups
    from perdure.workflows.policy.capacity import joining, new_goal
    from perdure.workflows.policy.capacity import scaling as capacity_scaling
    from perdure.workflows.policy.checkpoints import commits
    from perdure.workflows.policy.facts import user_requests
    from perdure.workflows.policy.facts.events import (
        AddressedEvent,
        ForRole,
        RelaunchRequested,
        RepairsPaused,
        RepairsResumed,
        RestartRequested,
        ResumeRequested,
        ScaleRequested,
        ScalingChanged,
        SuspendRequested,
        TicketIssued,
        TicketRevoked,
    )
    from perdure.workflows.policy.record import projections
    from perdure.workflows.policy.roles import suspension
    from perdure.workflows.policy.state.job import JobState


_UNDONE = "; its TrainingJob object decides, and sets what it states again within seconds: change that one"

_ALL_ROLES = RoleRequest()
_ALL_RANKS = RestartRequest()
_NO_REASON = ReasonRequest()
"""Users of Temporal's own tools may leave out an argument that says nothing."""


class JobUpdates:
    """The updates of a job, which are decided by the class that has its state."""

    state: JobState
    job: JobSpec
    _groups: JobGroups
    _resolved: bool
    """The specification has what its preset adds."""
    _spec_error: str

    def _take_request(self, event: AddressedEvent) -> None:
        """Decides on a user's request.

        Raises:
            ApplicationError: if it cannot be decided on, although the job can decide.
        """
        raise NotImplementedError

    def _keep_spec(self, job: JobSpec) -> None:
        """Decides by this specification from now on, and has later runs do so."""
        raise NotImplementedError

    @workflow.update(
        description="Change the number of nodes (4, 2:8 for min and max, auto for what the job states), or scaling, or "
        "both"
    )
    def scale(self, request: ScaleRequest) -> Accepted:
        role, job = self.state.role_named(request.role), requests.rescaled(self.job, self.state, request)
        count = requests.node_count(self.state, self.job, request)
        events, before = self._scale_events(request, role, job), self.job
        if request.scaling is not None:
            self._keep_spec(job)
        try:
            for event in events:
                self._take_request(ForRole(role, event))
        except ApplicationError:
            if request.scaling is not None:
                self._keep_spec(before)
            raise
        undone = _UNDONE if OBJECT_MEMO in workflow.memo() else ""
        return Accepted(message=f"{self.state.name} {self._scaled(request, role, count, events)}{undone}")

    @scale.validator
    def _scale_is_valid(self, request: ScaleRequest) -> None:
        requests.check_scale(self._running_state(), self.job, request)

    @workflow.query(description="What would be chosen after an update scale; changes nothing")
    def preview_scale(self, request: ScaleRequest) -> JobStatus:
        state, now = self._running_state(), workflow.now()
        requests.check_scale(state, self.job, request)
        job = requests.rescaled(self.job, state, request)
        role = state.view(request.role)
        for event in self._scale_events(request, role.role, job):
            role = user_requests.apply(role, event, job, now)
        return projections.status_of(role, job, groups=(), phase=role.phase, now=now)

    def _scale_events(
        self, request: ScaleRequest, role: str, job: JobSpec
    ) -> tuple[ScalingChanged | ScaleRequested, ...]:
        """The changes that a request makes, of a role whose specification is then that of `job`."""
        events: list[ScalingChanged | ScaleRequested] = []
        if change := new_goal.difference(self.job.roles[role].scaling, job.roles[role].scaling):
            events.append(ScalingChanged(change=change, reason=request.reason))
        if request.nodes:
            count = requests.node_count(self.state, self.job, request)
            events.append(
                ScaleRequested(
                    minimum=count.min,
                    maximum=count.max,
                    reason=request.reason,
                    resources=request.resources,
                    older=request.older,
                )
            )
        return tuple(events)

    def _scaled(
        self,
        request: ScaleRequest,
        role: str,
        count: NodeCount,
        events: Sequence[ScalingChanged | ScaleRequested],
    ) -> str:
        """What follows from an update `scale`, after the job's name."""
        view, scaling = self.state.view(role), self.job.roles[role].scaling
        parts = [f"changes to {count} node{'' if str(count) == '1' else 's'}"] if request.nodes else []
        if request.scaling is not None:
            changes = [f"has {event.change}" for event in events if isinstance(event, ScalingChanged)]
            parts += changes or ["has that scaling already"]
        if count.elastic and scaling.share:
            parts.append(f"the sharing of the cluster chooses within {'that' if request.nodes else count}")
        parts += [f"new nodes request {text} of {name}" for name, text in request.resources.items()]
        speed = capacity_scaling.view(view, self.job, workflow.now()) if request.scaling is not None else None
        parts += [speed.problem or speed.why] if speed is not None and not scaling.share else []
        return "; ".join([*filter(None, parts), projections.next_action(view, self.job)])

    @workflow.update(description="Release all nodes; the job keeps its history and can be resumed")
    def suspend(self, request: RoleRequest = _ALL_ROLES) -> Accepted:
        role = requests.single_role(self.state, request)
        self._take_request(SuspendRequested(role=role, reason=request.reason))
        what = f"role {role} of {self.state.name}" if role else self.state.name
        if self.state.suspended or (role and self.state.view(role).rests):
            return Accepted(message=f"{what} is suspended; its nodes are being removed")
        waits = next(view for view in self.state.views if suspension.awaited(view) is not None)
        return Accepted(message=f"{what} first makes a checkpoint: {projections.next_action(waits, self.job)}")

    @suspend.validator
    def _suspend_is_valid(self, request: RoleRequest = _ALL_ROLES) -> None:
        requests.check_suspend(self._running_state(), request)

    @workflow.update(description="Request nodes again after a suspend")
    def resume(self, request: RoleRequest = _ALL_ROLES) -> Accepted:
        role = requests.single_role(self.state, request)
        before = self.state
        self._take_request(ResumeRequested(role=role, reason=request.reason))
        what = f"role {role} of {self.state.name}" if role else self.state.name
        resumed = [view for view in self.state.views if before.view(view.role).rests and not view.is_over]
        if not resumed:
            return Accepted(message=f"{what} is not suspended, and continues to train")
        rest = [view.role for view in resumed if view.rests]
        nodes = sum(view.nodes_max for view in resumed if not view.rests)
        if role and rest:
            return Accepted(message=f"{what} is requested again when the job is resumed")
        kept = f"; suspended alone, and so until they are resumed: {', '.join(rest)}" if rest else ""
        return Accepted(message=f"{what} requests {number_of(nodes, 'node')}{kept}")

    @resume.validator
    def _resume_is_valid(self, request: RoleRequest = _ALL_ROLES) -> None:
        requests.check_resume(self._running_state(), request)

    @workflow.update(
        description="Show hangs, slow ranks, bad numbers and wrong results for a while, and repair only what dies"
    )
    def pause_repairs(self, request: PauseRequest) -> Accepted:
        until = workflow.now() + request.duration
        self._take_request(RepairsPaused(until=until, reason=request.reason))
        return Accepted(
            message=f"{self.state.name} shows hangs, slow ranks, bad numbers and wrong results, and does not repair "
            f"them until {until:%Y-%m-%d %H:%M:%S} UTC; what dies is repaired"
        )

    @pause_repairs.validator
    def _pause_is_valid(self, request: PauseRequest) -> None:
        self._running_state()
        requests.check_pause(request)

    @workflow.update(description="Repair hangs, slow ranks, bad numbers and wrong results again")
    def resume_repairs(self, request: ReasonRequest = _NO_REASON) -> Accepted:
        self._take_request(RepairsResumed())
        return Accepted(message=f"{self.state.name} repairs hangs, slow ranks, bad numbers and wrong results again")

    @resume_repairs.validator
    def _resumption_is_valid(self, request: ReasonRequest = _NO_REASON) -> None:
        requests.check_resume_repairs(self._running_state())

    @workflow.update(description="Restart all ranks in place")
    def restart(self, request: RestartRequest = _ALL_RANKS) -> Accepted:
        event = RestartRequested(reason=request.reason, older=request.older)
        self._take_request(ForRole(request.role, event) if request.role else event)
        role = self.state.view(request.role) if request.role else self.state.leading
        return Accepted(message=f"{self.state.name} restarts its ranks as generation {role.generation}")

    @restart.validator
    def _restart_is_valid(self, request: RestartRequest = _ALL_RANKS) -> None:
        requests.check_restart(self._running_state(), request)

    @workflow.update(description="Replace one node by a new one")
    def relaunch_node(self, request: RelaunchRequest) -> Accepted:
        event = RelaunchRequested(rank=request.rank, reason=request.reason, resources=request.resources)
        self._take_request(ForRole(request.role, event))
        role = self.state.view(request.role)
        if role.postponed is not None:
            return Accepted(
                message=f"before node {request.rank} is replaced: {projections.next_action(role, self.job)}"
            )
        return Accepted(message=f"node {request.rank} is being replaced; {projections.next_action(role, self.job)}")

    @relaunch_node.validator
    def _relaunch_is_valid(self, request: RelaunchRequest) -> None:
        requests.check_relaunch(self._running_state(), self.job, request)

    @workflow.update(description="Make a checkpoint in storage now")
    def save_checkpoint(self, request: ReasonRequest = _NO_REASON) -> Accepted:
        self._take_request(commits.request_of_all(self.state))
        return Accepted(
            message=f"{self.state.name} makes a checkpoint; `perdure status` shows when it is durable",
            checkpoint_request=max(role.checkpoints.requests for role in self.state.roles.values()),
        )

    @save_checkpoint.validator
    def _checkpoint_is_valid(self, request: ReasonRequest = _NO_REASON) -> None:
        requests.check_checkpoint(self._running_state(), self.job)

    @workflow.update(description="Give a place among the nodes to a machine that a user or a scheduler started")
    def join(self, request: JoinRequest) -> JoinAnswer:
        chosen = joining.choose_role(self.state, request, self.job, workflow.now()).role
        self._take_request(ForRole(chosen, request))
        role = self.state.view(chosen)
        node = joining.place_of(role, request)
        if node is None:
            again = joining.next_request(role, request, workflow.now())
            return JoinAnswer(reason=joining.describe_wait(role, request), again=again)
        group_id = self._groups.id_of(Group(role.role, group_index(node.rank)))
        return JoinAnswer(node=requests.node_request(role, node, self.job, workflow.info(), group_id=group_id))

    @join.validator
    def _join_is_valid(self, request: JoinRequest) -> None:
        refusal = requests.refusal_to_join(self._known_state(), request, self.job)
        if refusal is not None:
            raise ApplicationError(refusal.text, type=refusal.kind)

    @workflow.update(description="Admit machines that join through the gateway with a ticket")
    def issue_ticket(self, request: TicketRequest) -> Ticket:
        expires_at = workflow.now() + request.lifetime
        ticket = Ticket(id=request.id, digest=request.digest, nodes=request.nodes, expires_at=expires_at)
        self._take_request(TicketIssued(ticket=ticket))
        return ticket

    @issue_ticket.validator
    def _ticket_is_valid(self, request: TicketRequest) -> None:
        requests.check_ticket(self._running_state(), self.job, request)

    @workflow.update(description="Withdraw a ticket, and the places of the machines that joined with it")
    def revoke_ticket(self, request: TicketRef) -> Accepted:
        self._take_request(TicketRevoked(id=request.id))
        return Accepted(message=f"the ticket {request.id} is revoked; {self._next_action()}")

    @revoke_ticket.validator
    def _revocation_is_valid(self, request: TicketRef) -> None:
        requests.check_revocation(self._running_state(), request)

    def _next_action(self) -> str:
        return projections.next_action(self.state.leading, self.job)

    def _known_state(self) -> JobState:
        if self._spec_error:
            raise ApplicationError(self._spec_error, type="InvalidSpec")
        return self.state

    def _running_state(self) -> JobState:
        """The state of a job that takes requests.

        Raises:
            ApplicationError: if it does not take requests yet, or no longer.
        """
        state = self._known_state()
        if state.outcome is not None:
            raise ApplicationError(f"the job is ending: {state.outcome.reason}")
        if not self._resolved:
            raise ApplicationError(f"the job waits for its preset {self.job.runtime}; try again")
        return state
