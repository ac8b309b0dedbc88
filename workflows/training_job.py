"""TrainingJob: the brain of one job.

The class is thin: handlers queue events, the main loop feeds them to `workflows.policy.job.decide`, and what the new
state wants of the world is sent to the groups. It hears edges and users, never telemetry, and commands no node itself.

Invariants:
    - `JobState` is all there is; it is set in `__init__` and rides through continue-as-new whole.
    - Groups get desires, not deltas: the newest one is always enough.
    - A cancelled job still winds its nodes down before it closes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeUpdate
from temporalio.exceptions import ApplicationError, ChildWorkflowError, TemporalError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from perdure.spec.errors import SpecError
    from perdure.spec.job import JobSpec
    from perdure.spec.roles import NodeCount
    from perdure.spec.validate import parse_spec, validate_started
    from workflows import options, preset
    from workflows.messages import (
        Accepted,
        Adopt,
        Failure,
        Finished,
        GroupDesire,
        GroupEdges,
        IncidentView,
        JobPhase,
        JobResult,
        JobStatus,
        JoinAnswer,
        JoinRequest,
        NodeIdentity,
        NodeRequest,
        NodeView,
        ReasonRequest,
        RelaunchRequest,
        ScaleRequest,
        SiteFacts,
    )
    from workflows.names import (
        TRAINING_JOB,
        group_index,
        group_workflow_id,
        node_name,
        node_task_queue,
        uid_of,
    )
    from workflows.node_record import GroupInput
    from workflows.policy import desire as wanted
    from workflows.policy import joining
    from workflows.policy.deadlines import next_deadline
    from workflows.policy.events import (
        CancelAsked,
        EdgeSeen,
        Event,
        FailureReported,
        GroupAdopted,
        GroupWoundDown,
        JoinAsked,
        NodeFinished,
        RelaunchAsked,
        RestartAsked,
        ResumeAsked,
        ScaleAsked,
        SuspendAsked,
        TimePassed,
    )
    from workflows.policy.job import decide, hear
    from workflows.policy.state import JobState, NodeState
    from workflows.search_attributes import JOB_BACKEND, JOB_NAMESPACE, JOB_PHASE, JOB_RESTARTS, WORLD_SIZE

FINAL_PHASES = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


@workflow.defn(name=TRAINING_JOB)
class TrainingJob:
    """See the module."""

    @workflow.init
    def __init__(self, spec: Any, carried: JobState | None = None) -> None:
        self._spec_error: SpecError | None = None
        self._events: deque[Event] = deque()
        self._sent: dict[int, GroupDesire] = {}
        self._senders: dict[int, asyncio.Task[None]] = {}
        self._shown: dict[str, str | int] = {}
        self._facts = SiteFacts(search_attributes=False)
        self._closed: JobPhase | None = None
        self._resolved = True
        try:
            # A job that runs is not checked again: a later release may be stricter.
            self._job = parse_spec(spec) if carried else validate_started(spec)
        except SpecError as error:
            self._spec_error = error
            return
        # Once it is, the preset is part of the specification that is carried on.
        self._resolved = carried is not None or self._job.runtime is None
        self._state = carried or _new_state(self._job)
        self._started_groups: set[int] = set(wanted.groups_of(self._state)) if carried else set()

    @workflow.run
    async def run(self, spec: Any, carried: JobState | None = None) -> JobResult:
        if self._spec_error is not None:
            raise ApplicationError(str(self._spec_error), type="InvalidSpec", non_retryable=True)
        try:
            self._facts = await workflow.execute_local_activity(
                "site_facts", result_type=SiteFacts, start_to_close_timeout=timedelta(seconds=10)
            )
            if not self._resolved:
                spec = await preset.laid_under(spec)
                self._job, self._resolved = parse_spec(spec), True
            self._take(TimePassed())
            while not self._is_over():
                await self._wait()
                self._take_all()
                self._continue_if_due(spec)
        except asyncio.CancelledError:
            self._take(CancelAsked(reason=workflow.cancellation_reason() or ""))
            while not self._is_over():
                await self._wait()
                self._take_all()
        return await self._close()

    # What is heard

    @workflow.signal(description="Something ended on a node")
    def failure(self, message: Failure) -> None:
        self._events.append(FailureReported(failure=message))

    @workflow.signal(description="All ranks of a node ended with 0")
    def finished(self, message: Finished) -> None:
        self._events.append(NodeFinished(finished=message))

    @workflow.signal(description="Changes of nodes, as their group saw them")
    def edges(self, message: GroupEdges) -> None:
        if self._spec_error is not None or message.uid != self._state.uid:
            return
        if message.tenure not in ("", self._state.tenures.get(message.group)):
            # Said to an earlier run, and handed to this one by a reset: the nodes have moved on since.
            return
        if message.adopted is not None:
            # The group has forgotten what it was last told.
            self._sent.pop(message.group, None)
            self._events.append(GroupAdopted(group=message.group, nodes=message.adopted))
        self._events.extend(EdgeSeen(edge=edge) for edge in message.edges)
        if message.wound_down:
            if self._state.outcome is None:
                # It was winding down for an earlier run when this one adopted it, and is to be started again.
                self._sent.pop(message.group, None)
            self._events.append(GroupWoundDown(group=message.group))

    @workflow.update(description="Change how many nodes the job has: 4, or 2:8 for min and max")
    def scale(self, request: ScaleRequest) -> Accepted:
        count = _node_count(request.nodes, self._state.unit)
        self._take(ScaleAsked(minimum=count.min, maximum=count.max, reason=request.reason))
        return Accepted(message=f"{self._state.name} goes to {count} nodes; {wanted.next_action(self._state)}")

    @scale.validator
    def _scale_is_valid(self, request: ScaleRequest) -> None:
        self._is_running()
        _node_count(request.nodes, self._state.unit)
        if request.role is not None and request.role != self._state.role:
            raise ApplicationError(f'role: got "{request.role}"; this job has the role "{self._state.role}"')

    @workflow.update(description="Give all nodes back; the job keeps its history and can be resumed")
    def suspend(self, request: ReasonRequest) -> Accepted:
        self._take(SuspendAsked(reason=request.reason))
        return Accepted(message=f"{self._state.name} is suspended; its nodes are being removed")

    @suspend.validator
    def _suspend_is_valid(self, request: ReasonRequest) -> None:
        self._is_running()
        if self._state.suspended:
            raise ApplicationError("the job is already suspended; resume it to go on")

    @workflow.update(description="Ask for nodes again after a suspend")
    def resume(self, request: ReasonRequest) -> Accepted:
        self._take(ResumeAsked(reason=request.reason))
        return Accepted(message=f"{self._state.name} asks for {self._state.nodes_max} nodes")

    @resume.validator
    def _resume_is_valid(self, request: ReasonRequest) -> None:
        self._is_running()
        if not self._state.suspended:
            raise ApplicationError("the job is not suspended, so there is nothing to resume")

    @workflow.update(description="Restart all ranks in place")
    def restart(self, request: ReasonRequest) -> Accepted:
        self._take(RestartAsked(reason=request.reason))
        return Accepted(message=f"{self._state.name} restarts its ranks as generation {self._state.generation}")

    @restart.validator
    def _restart_is_valid(self, request: ReasonRequest) -> None:
        self._is_running()
        if self._state.world is None:
            raise ApplicationError(f"there is nothing to restart: the job is {self._state.phase}")

    @workflow.update(description="Replace one node by a new one")
    def relaunch_node(self, request: RelaunchRequest) -> Accepted:
        self._take(RelaunchAsked(rank=request.rank, reason=request.reason))
        return Accepted(message=f"node {request.rank} is being replaced; {wanted.next_action(self._state)}")

    @relaunch_node.validator
    def _relaunch_is_valid(self, request: RelaunchRequest) -> None:
        self._is_running()
        node = self._state.nodes.get(request.rank)
        if node is None or not node.alive:
            known = ", ".join(str(rank) for rank, node in sorted(self._state.nodes.items()) if node.alive)
            raise ApplicationError(f"rank: got {request.rank}; this job has the nodes {known or 'none'}")

    @workflow.update(description="Give a machine that somebody else started a place among the nodes")
    def join(self, request: JoinRequest) -> JoinAnswer:
        self._take(JoinAsked(request=request))
        node = joining.place_of(self._state, request)
        if node is None:
            return JoinAnswer(reason=joining.what_is_missing(self._state, request))
        return JoinAnswer(node=self._node_request(node))

    @join.validator
    def _join_is_valid(self, request: JoinRequest) -> None:
        refusal = joining.refusal(self._known_state(), request, self._job, workflow.now())
        if refusal is not None:
            raise ApplicationError(refusal.text, type=refusal.kind)

    @workflow.query(description="Where the job stands")
    def status(self) -> JobStatus:
        state = self._known_state()
        return wanted.status_of(state, self._job, groups=self._group_ids(), phase=self._phase(), now=workflow.now())

    @workflow.query(description="The job's nodes; their groups know progress and metrics")
    def nodes(self) -> list[NodeView]:
        return list(wanted.node_views(self._known_state()))

    @workflow.query(description="Every interruption with its evidence, decision and cost")
    def incidents(self) -> list[IncidentView]:
        return list(self._known_state().incidents)

    # What is done

    def _take_all(self) -> None:
        """Decides on all that was heard, and sends out what follows from all of it."""
        while self._events:
            event = self._events.popleft()
            if isinstance(event, EdgeSeen):
                # Each decision looks at every node, and a thousand of them speak at once; what is lost at once is one
                # incident.
                self._state = hear(self._state, event, self._job, workflow.now())
            else:
                self._decide(event)
        self._take(TimePassed())

    def _take(self, event: Event) -> None:
        """Decides on one event, and sends out what follows from it."""
        self._decide(event)
        self._publish()

    def _decide(self, event: Event) -> None:
        self._state = decide(self._state, event, self._job, workflow.now(), new_token=workflow.uuid4)

    def _publish(self) -> None:
        """Tells groups and users where the job stands: looks at every node, and a thousand of them speak at once."""
        for group in wanted.groups_of(self._state):
            desire = wanted.desire_for(self._state, group)
            if self._sent.get(group) != desire and group not in self._state.wound_down_groups:
                self._sent[group] = desire
                self._state = self._state.changed(desire_version=self._state.desire_version + 1)
                if group not in self._senders:
                    self._senders[group] = asyncio.create_task(self._send(group))
        self._show()

    async def _send(self, group: int) -> None:
        """Brings one group up to date; the newest desire overtakes those still waiting."""
        sent: GroupDesire | None = None
        try:
            while (desire := self._sent.get(group)) is not None and desire != sent:
                versioned = desire.model_copy(update={"version": self._state.desire_version})
                if await self._tell(group, versioned):
                    sent = desire
                else:
                    await workflow.sleep(options.LOST_SIGNAL_RETRY)
        finally:
            del self._senders[group]

    async def _tell(self, group: int, desire: GroupDesire) -> bool:
        group_id = self._group_id(group)
        if group in self._started_groups:
            try:
                await workflow.get_external_workflow_handle(group_id).signal("desire", desire)
                return True
            except TemporalError as error:
                workflow.logger.warning("group %s did not take a desire: %s", group, error)
                # It has closed (terminated by somebody); a new one picks its nodes up by their names.
                self._started_groups.discard(group)
        return await self._start_group(group, group_id, desire)

    async def _start_group(self, group: int, group_id: str, desire: GroupDesire) -> bool:
        info = workflow.info()
        # As unique as the tokens that this run has just made: one that was reset makes others when it is played again.
        tenure = next((node.token for node in desire.nodes.values()), "")
        self._state = self._state.changed(tenures={**self._state.tenures, group: tenure})
        try:
            await workflow.start_child_workflow(
                "NodeGroup",
                GroupInput(
                    job_id=info.workflow_id,
                    job_first_run_id=info.first_execution_run_id,
                    uid=self._state.uid,
                    group=group,
                    role=self._state.role,
                    spec=self._job,
                    desire=desire,
                    tenure=tenure,
                ),
                id=group_id,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                static_summary=f"nodes of {self._state.name}, role {self._state.role}, group {group}",
            )
        except WorkflowAlreadyStartedError:
            # This job was reset, or lost its memory of the group: the group's table is the truth.
            return await self._adopt_group(group, group_id, Adopt(job_run_id=info.run_id, tenure=tenure))
        except (ChildWorkflowError, TemporalError) as error:
            workflow.logger.warning("group %s could not be started: %s", group, error)
            return False
        self._started_groups.add(group)
        return True

    async def _adopt_group(self, group: int, group_id: str, adopt: Adopt) -> bool:
        try:
            await workflow.get_external_workflow_handle(group_id).signal("adopt", adopt)
        except TemporalError as error:
            workflow.logger.warning("group %s was not adopted: %s", group, error)
            return False
        self._started_groups.add(group)
        return True

    async def _wait(self) -> None:
        state, deadline = self._state, self._next_deadline()
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: (
                    bool(self._events)
                    or self._is_over()
                    or self._may_continue()
                    # An update decides by itself, and may bring another deadline. To find it, all nodes are looked at.
                    or (self._state is not state and self._next_deadline() != deadline)
                ),
                timeout=deadline - workflow.now() if deadline is not None else None,
                timeout_summary="next deadline of the job",
            )

    def _next_deadline(self) -> datetime | None:
        return next_deadline(self._state, self._job, workflow.now())

    def _continue_if_due(self, spec: Any) -> None:
        if self._may_continue() and not self._events:
            workflow.continue_as_new(args=[spec, self._state])

    def _may_continue(self) -> bool:
        info = workflow.info()
        due = info.is_continue_as_new_suggested() or info.is_target_worker_deployment_version_changed()
        settled = self._state.open_incident is None or self._state.suspended
        quiet = not self._senders and settled and self._state.outcome is None
        return due and quiet and workflow.all_handlers_finished()

    async def _close(self) -> JobResult:
        result = wanted.result_of(self._state, workflow.now())
        self._closed = result.phase
        self._show()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if result.phase is JobPhase.CANCELLED:
            raise asyncio.CancelledError(result.reason)
        if result.phase is JobPhase.FAILED:
            raise ApplicationError(result.reason, result, type="JobFailed", non_retryable=True)
        return result

    def _is_over(self) -> bool:
        return wanted.is_over(self._state) and not self._events

    # What is shown

    def _show(self) -> None:
        """Search attributes and the page's details; only what changed makes history."""
        state, phase = self._state, self._phase()
        workflow.set_current_details(wanted.details_of(state, phase))
        if not self._facts.search_attributes:
            return
        texts = {
            JOB_PHASE: phase.value,
            JOB_BACKEND: self._job.backend.value,
            JOB_NAMESPACE: state.namespace,
        }
        numbers = {
            WORLD_SIZE: state.world.processes if state.world else 0,
            JOB_RESTARTS: len(state.restarts),
        }
        updates: list[SearchAttributeUpdate[Any]] = [
            *(key.value_set(value) for key, value in texts.items() if self._shown.get(key.name) != value),
            *(key.value_set(value) for key, value in numbers.items() if self._shown.get(key.name) != value),
        ]
        if updates:
            self._shown |= {key.name: value for key, value in (*texts.items(), *numbers.items())}
            workflow.upsert_search_attributes(updates)  # pyright: ignore[reportUnknownMemberType]

    def _phase(self) -> JobPhase:
        return self._closed or self._state.phase

    def _node_request(self, node: NodeState) -> NodeRequest:
        """What a backend would be given to make this node."""
        state, info = self._state, workflow.info()
        return NodeRequest(
            node=NodeIdentity(
                uid=state.uid,
                role=state.role,
                rank=node.rank,
                incarnation=node.incarnation,
                token=node.token,
            ),
            name=node_name(state.name, state.role, node.rank, state.uid, node.incarnation),
            spec=self._job,
            job_id=info.workflow_id,
            job_first_run_id=info.first_execution_run_id,
            group_id=self._group_id(group_index(node.rank)),
            task_queue=node_task_queue(state.uid, state.role, node.rank, node.incarnation),
        )

    def _group_id(self, group: int) -> str:
        return group_workflow_id(workflow.info().workflow_id, self._state.uid, self._state.role, group)

    def _group_ids(self) -> tuple[str, ...]:
        return tuple(self._group_id(group) for group in wanted.groups_of(self._state))

    def _known_state(self) -> JobState:
        if self._spec_error is not None:
            raise ApplicationError(str(self._spec_error), type="InvalidSpec")
        return self._state

    def _is_running(self) -> None:
        state = self._known_state()
        if state.outcome is not None:
            raise ApplicationError(f"the job is ending: {state.outcome.reason}")
        if not self._resolved:
            raise ApplicationError(f"the job waits for its preset {self._job.runtime}; ask again")


def _new_state(job: JobSpec) -> JobState:
    role, spec = job.role
    info = workflow.info()
    return JobState(
        name=job.name,
        namespace=job.namespace,
        uid=uid_of(info.first_execution_run_id),
        role=role,
        started_at=workflow.now(),
        nodes_min=spec.nodes.min,
        nodes_max=spec.nodes.max,
        unit=spec.nodes.unit,
    )


def _node_count(text: str, unit: int) -> NodeCount:
    """Reads `4` or `2:8`.

    Raises:
        ApplicationError: if it is neither, or does not fit the job's unit.
    """
    try:
        count = NodeCount.model_validate(text)
        return NodeCount(min=count.min, max=count.max, unit=unit)
    except ValueError as error:
        problem = str(error).splitlines()[-2 if "\n" in str(error) else 0].strip()
        raise ApplicationError(f'nodes: got "{text}"; {problem}; write 4, or 2:8 for min and max') from None
