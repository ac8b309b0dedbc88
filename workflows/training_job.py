"""TrainingJob: the workflow that leads one job.

The class is thin: handlers queue events, the main loop passes them to `perdure.workflows.policy.decide.decide`, and the
desired states that follow from the new state are sent to the groups. It receives transitions and users' requests,
never telemetry, and commands no node itself.

Invariants:
    - `JobState` is the only state; it is set in `__init__` and rides whole through continue-as-new (`carrying`).
    - Groups get whole desired states, not deltas: the newest one is always enough.
    - A cancelled job still winds its nodes down before it closes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        BadNumber,
        Corruption,
        Failure,
        Finished,
        GroupMissing,
        GroupTransitions,
        IncidentView,
        JobPhase,
        JobResult,
        JobStatus,
        MachinesView,
        NodesQuery,
        NodesSuggested,
        NodeView,
        RoomSeen,
        ShardsSetAside,
        SiteFacts,
    )
    from perdure.contract.names import SCHEDULED_JOB, TRAINING_JOB, group_index, uid_of
    from perdure.spec.accepted import read_accepted
    from perdure.spec.job import JobSpec
    from perdure.spec.validate import to_mapping
    from perdure.workflows import auto_resources, job_check, preset, requests
    from perdure.workflows.archiver import start_archiver
    from perdure.workflows.cancellation import uncancelled
    from perdure.workflows.carrying import Packed, pack, unpack
    from perdure.workflows.event_sink import send_events
    from perdure.workflows.job_groups import Group, JobGroups
    from perdure.workflows.job_updates import JobUpdates
    from perdure.workflows.notices import JobNotices
    from perdure.workflows.patching import behavior_of_this_run, newer_behavior_begins, on_reset_of_this_run
    from perdure.workflows.policy.behavior import Behavior
    from perdure.workflows.policy.capacity import joining, past_use
    from perdure.workflows.policy.checkpoints import commits
    from perdure.workflows.policy.decide import decide, decide_all
    from perdure.workflows.policy.facts.deduplication import accept
    from perdure.workflows.policy.facts.events import (
        AddressedEvent,
        CancelRequested,
        ForRole,
        GroupAdopted,
        GroupWoundDown,
        TimePassed,
    )
    from perdure.workflows.policy.record import projections
    from perdure.workflows.policy.record.page import details_of
    from perdure.workflows.policy.roles import suspension
    from perdure.workflows.policy.state.job import JobState, UnknownRole
    from perdure.workflows.policy.timers import next_deadline
    from perdure.workflows.policy.world import group_desire
    from perdure.workflows.run_length import is_full
    from perdure.workflows.search_attributes import changed_attributes


@workflow.defn(name=TRAINING_JOB)
class TrainingJob(JobUpdates):
    """The workflow of one job; see the module."""

    @workflow.init
    def __init__(self, spec: Any, carried: JobState | Packed | None = None) -> None:
        behavior = behavior_of_this_run()
        self._spec: Any = spec
        """The specification as it is carried on: complete, and with what users have changed."""
        self._spec_error = ""
        self.events: deque[AddressedEvent] = deque()
        self._shown: dict[str, str | int] = {}
        self._facts = SiteFacts(search_attributes=False)
        self._closed: JobPhase | None = None
        self._cancelled = False
        self._resolved = True
        self._outdated = False
        self._requests = 0
        """Updates that this run has carried out."""
        self._notices = JobNotices()
        self._archiving: asyncio.Task[None] | None = None
        """Starts the archiver of a job that was reset."""
        self._unchecked = carried is None
        """The specification is not checked yet. Requests are accepted meanwhile; nothing is sent."""
        try:
            self.job = read_accepted(spec)
            state = unpack(carried, JobState) if carried else self._first_state()
        except ValueError as error:
            self._spec_error = str(error)
            return
        # After the check, the preset is part of the specification that is carried on.
        self._resolved = carried is not None or not (self.job.runtime or past_use.is_auto(self.job))
        self.state = self._told = state.replace(behavior=behavior)
        self._groups = JobGroups(self, carried=carried is not None)
        on_reset_of_this_run(self._follow_reset)

    @workflow.run
    async def run(self, spec: Any, carried: JobState | Packed | None = None) -> JobResult:
        try:
            await self._begin(spec)
            if not self._resolved:
                await self._resolve()
            if carried is None:
                await start_archiver(self.job, self.state.uid)
            self._take(TimePassed())
            while not self._is_over():
                await self._wait()
                self._take_all()
                self._continue_if_due()
        except asyncio.CancelledError:
            if self._spec_error:
                raise
            self._unchecked, self._cancelled = False, True
            self._take(CancelRequested(reason=workflow.cancellation_reason() or ""))
            while not self._is_over():
                await self._wait()
                self._take_all()
        return await self._close()

    async def _resolve(self) -> None:
        """Completes the specification with its preset, and with what jobs of the past have used."""
        if self.job.runtime is not None:
            self._spec = await preset.complete(self._spec)
            self.job = read_accepted(self._spec)
        if past_use.is_auto(self.job):
            chosen = await auto_resources.choose(self.job)
            self._keep_spec(past_use.fill(self.job, chosen))
            self.state = self._told = past_use.begin(self.state, self.job, chosen)
        self._resolved = True

    def _keep_spec(self, job: JobSpec) -> None:
        self.job, self._spec = job, to_mapping(job)

    async def _begin(self, spec: Any) -> None:
        """Asks the worker for the facts of its site; in the first run also to check the specification, which is done
        once.

        Raises:
            ApplicationError: if the specification is wrong.
        """
        if self._unchecked:
            check = await job_check.check_job(spec)
            if self._spec_error and not check.problem:
                self._wait_for_newer_worker()
            problem = check.problem or self._problem_of_cron()
            self._facts, self._spec_error, self._unchecked = check.facts, problem, False
        elif self._spec_error:
            self._wait_for_newer_worker()
        else:
            self._facts = await job_check.site_facts()
        if self._spec_error:
            raise ApplicationError(self._spec_error, type="InvalidSpec", non_retryable=True)

    def _problem_of_cron(self) -> str:
        """Why a job that the server would start again and again cannot run: all its runs have the first one's ID, and
        would take the nodes, datasets and store of the one before for their own."""
        cron = workflow.info().cron_schedule
        if not cron or self.state.behavior < Behavior.RELEASE_0_4:
            return ""
        return (
            f'cron schedule: got "{cron}"; its runs would share nodes and datasets; start the workflow type '
            f"{SCHEDULED_JOB} by it, or by a schedule of Temporal, which starts a job of its own each time"
        )

    def _wait_for_newer_worker(self) -> NoReturn:
        """Leaves the task to a worker that can read the specification: what was accepted once is no wrong one, and the
        nodes of a later run train."""
        raise ValueError(f"a newer release has accepted what this one cannot read: {self._spec_error}")

    # Signals and queries; updates are those of `JobUpdates`

    @workflow.signal(description="A failure on a node")
    def failure(self, message: Failure) -> None:
        self.events.append(message)

    @workflow.signal(description="All ranks of a node ended with 0")
    def finished(self, message: Finished) -> None:
        self.events.append(message)

    @workflow.signal(description="A loss or a gradient norm that is not a finite number")
    def bad_number(self, message: BadNumber) -> None:
        self.events.append(message)

    @workflow.signal(description="A rank does not compute what the other ranks compute")
    def corruption(self, message: Corruption) -> None:
        self.events.append(message)

    @workflow.signal(description="The number of nodes that the sharing of the cluster advises")
    def suggest_nodes(self, message: NodesSuggested) -> None:
        if not self._spec_error and message.uid == self.state.uid and message.role in self.state.roles:
            self.events.append(ForRole(message.role, message))

    @workflow.signal(description="Whether a machine has room for nodes that request less")
    def room_seen(self, message: RoomSeen) -> None:
        if not self._spec_error and message.uid == self.state.uid and message.role in self.state.roles:
            self.events.append(ForRole(message.role, message))

    @workflow.signal(description="A dataset has set shards aside that failed repeatedly")
    def shards_set_aside(self, message: ShardsSetAside) -> None:
        if not self._spec_error and message.uid == self.state.uid:
            self.events.append(message)

    @workflow.signal(description="An agent finds no open group")
    def group_missing(self, message: GroupMissing) -> None:
        sender = message.sender
        if self._spec_error or sender.role not in self.state.roles:
            return
        if self.state.view(sender.role).is_current(sender):
            # If the group runs after all, it is sent its desired state once more.
            self._groups.reach_again(Group(sender.role, group_index(sender.rank)))

    @workflow.signal(description="Changes of nodes, as their group saw them")
    def transitions(self, message: GroupTransitions) -> None:
        if self._spec_error or message.uid != self.state.uid:
            return
        try:
            role = self.state.role_named(message.role)
        except UnknownRole:
            return
        group = Group(role, message.group)
        ownership_epoch = self.state.roles[role].ownership_epochs.get(message.group)
        unproven = message.ownership_epoch == "" and ownership_epoch
        if unproven or message.ownership_epoch not in ("", ownership_epoch):
            # This message was sent to an earlier run, and a reset delivers it to this one: the nodes have changed
            # since. Or the group was reset to a moment before this job adopted it.
            if message.begins and ownership_epoch is not None:
                self._groups.adopt_again(group)
            return
        known, fresh = accept(self.state.roles[role], message)
        self.state = self.state.with_role(known)
        if fresh is None:
            return
        if message.adopted is not None:
            # The group has lost the desired state that it was sent last.
            self._groups.take_table(group, declined=message.declined)
            self.events.append(
                ForRole(
                    role,
                    GroupAdopted(
                        group=message.group,
                        nodes=message.adopted,
                        world=message.world,
                        declined=message.declined,
                    ),
                )
            )
        self.events.extend(ForRole(role, transition) for transition in fresh)
        if message.begins:
            self._groups.send_again(group)
        if message.wound_down:
            if self.state.outcome is None:
                # The group was winding down for an earlier run when this one adopted it, and must be started again.
                self._groups.forget_sent(group)
            self.events.append(ForRole(role, GroupWoundDown(group=message.group)))

    @workflow.query(description="The job's tickets, and the machines that have its places")
    def machines(self) -> MachinesView:
        return joining.machines_view(self._known_state())

    @workflow.query(description="The job's phase, size, restarts and next action")
    def status(self, role: str | None = None) -> JobStatus:
        state, groups = self._known_state(), self._groups.ids()
        shown = requests.role_of(state, role) if role else state.leading
        by_role = projections.role_statuses(state, self.job, workflow.now(), closed=self._closed)
        status = projections.status_of(shown, self.job, groups=groups, phase=self._phase(), now=workflow.now())
        return status.replace(by_role=by_role, suspending=suspension.is_awaited(state))

    @workflow.query(description="The job's nodes, or those of one group; leases have their progress and metrics")
    def nodes(self, request: NodesQuery | None = None) -> list[NodeView]:
        wanted = request or NodesQuery()
        role = requests.role_of(self._known_state(), wanted.role)
        return list(projections.node_views(role, group=wanted.group))

    @workflow.query(description="Every interruption with its evidence, decision and cost")
    def incidents(self) -> list[IncidentView]:
        return list(self._known_state().incidents)

    @property
    def log_places(self) -> dict[str, int]:
        """The generation, and the number of the open incident, for log lines and traces."""
        if self._spec_error:
            return {}
        incident = self.state.open_incident
        return {"generation": self.state.leading.generation} | ({"incident": incident.number} if incident else {})

    @property
    def traced(self) -> tuple[str, bool]:
        """The open incident, as its event's id, or an empty text; and whether the job has not trained yet."""
        if self._spec_error:
            return "", False
        state, incident = self.state, self.state.open_incident
        starts = state.leading.generation <= 1 and state.phase in (JobPhase.STARTING, JobPhase.RENDEZVOUS)
        return (f"{state.uid}-{incident.number}" if incident else ""), starts

    # Decisions and their effects

    def _take_all(self) -> None:
        """Decides on all events that have arrived, and sends what follows from all of them."""
        self._decide_all()
        self._publish()
        self._start_senders()

    def _take(self, event: AddressedEvent) -> None:
        """Decides on one event, and sends what follows from it."""
        self._decide(event)
        self._publish()
        self._start_senders()

    def _take_request(self, event: AddressedEvent) -> None:
        """Decides on a user's request; the main loop sends what follows from it.

        A worker that replays the job before it handles a request is given the last recorded task and the new one at
        once, if those had no commands so far, and handles the request first: before the result of an activity, for
        example. A later replay handles it last (temporalio/sdk-python#1591). The commands have the same order in both:
        those of the request, then the main loop's timer, then what is sent to groups, whether or not the group's sender
        is still busy when the request arrives.
        """
        self._requests += 1
        if self.events:
            self._decide_all()
        try:
            self._decide(event)
        except Exception as error:
            # As with a message. A job that cannot decide at all fails its task.
            self._decide(TimePassed())
            self._publish()
            text = f"this release cannot decide on the request: {type(error).__name__}: {error}"
            workflow.logger.exception("a request was refused: %s", text)
            raise ApplicationError(text, type="UndecidedRequest") from error
        self._publish()

    def _decide_all(self) -> None:
        events = tuple(self.events)
        self.events.clear()
        self.state = decide_all(
            self.state,
            events,
            self.job,
            workflow.now(),
            new_token=workflow.uuid4,
            dropped=lambda event: workflow.logger.error("an event was left out of the decisions: %s", event),
        )

    def _decide(self, event: AddressedEvent) -> None:
        self.state = decide(self.state, event, self.job, workflow.now(), new_token=workflow.uuid4)

    def _publish(self) -> None:
        """Shows users the new state, and notes what groups are to be sent."""
        before, self._told = self._told, self.state
        if not workflow.unsafe.is_replaying():
            send_events(before, self.state, workflow.now())
        self._notices.note(before, self.state, self.job, workflow.now())
        if self._unchecked:
            return
        self._groups.note_changes()
        self._show()

    def _start_senders(self) -> None:
        self._groups.start_senders()
        self._notices.start_sender(self.state, self.job)

    async def _wait(self) -> None:
        state, deadline = self.state, self._next_deadline()
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: (
                    bool(self.events)
                    or self._groups.have_unsent
                    or self._notices.have_unsent
                    or self._is_over()
                    or self._may_continue()
                    # An update decides by itself, and may change the deadline. Finding it takes a look at all nodes.
                    or (self.state is not state and self._next_deadline() != deadline)
                ),
                timeout=deadline - workflow.now() if deadline is not None else None,
                timeout_summary="next deadline of the job",
            )

    def _next_deadline(self) -> datetime | None:
        return next_deadline(self.state, self.job, workflow.now())

    def _continue_if_due(self) -> None:
        self._end_outdated_run()
        if self._may_continue() and not self.events:
            state = self.state.replace(unknown_groups=self._groups.unknown())
            workflow.continue_as_new(args=[self._spec, pack(state)])

    def _follow_reset(self) -> None:
        """Learns what has become of the nodes since the task to which this run was reset."""
        self._groups.send_all_again()
        for view in self.state.views:
            self.state = self.state.with_view(commits.renumber(view, workflow.now()))
        self.events.append(TimePassed())
        if self.state.behavior >= Behavior.RELEASE_0_4:
            # It ended with the job, if that had ended.
            self._archiving = asyncio.create_task(start_archiver(self.job, self.state.uid))

    def on_delivered(self) -> None:
        self._end_outdated_run()

    def _end_outdated_run(self) -> None:
        """Ends a run of an older behavior at its first quiet moment under a newer worker."""
        if not self._outdated and not self.events and self._is_quiet():
            self._outdated = newer_behavior_begins(self.state.behavior)

    def _may_continue(self) -> bool:
        due = self._outdated or workflow.info().is_continue_as_new_suggested()
        bounded = self.state.behavior >= Behavior.RELEASE_0_4
        # A job that was cancelled ends in the run that the server knows to be cancelled.
        full = is_full(bounded=bounded, updates=self._requests) and not self._cancelled
        archiving = self._archiving is not None and not self._archiving.done()
        settled = self._notices.are_settled and not archiving and workflow.all_handlers_finished()
        # A group that never sends its table, as one that cannot be read, must not keep a job from its next run.
        return settled and ((due and self._is_quiet()) or (full and (bounded or self._groups.are_known)))

    def _is_quiet(self) -> bool:
        settled = self.state.outcome is None and (self.state.open_incident is None or self.state.suspended)
        return settled and self._groups.are_settled and workflow.all_handlers_finished()

    async def _close(self) -> JobResult:
        result = projections.result_of(self.state.decisive, workflow.now())
        self._closed = result.phase
        self._show()
        await self._end_tasks()
        if result.phase is JobPhase.CANCELLED:
            raise asyncio.CancelledError(result.reason)
        if result.phase is JobPhase.FAILED:
            raise ApplicationError(result.reason, result, type="JobFailed", non_retryable=True)
        return result

    async def _end_tasks(self) -> None:
        """Lets what is in progress end. A job that is cancelled after its end has its result nevertheless."""
        if self.state.behavior < Behavior.RELEASE_0_4:
            await self._notices.close(self.state, self.job)
            await workflow.wait_condition(workflow.all_handlers_finished)
            return
        closing = asyncio.create_task(self._notices.close(self.state, self.job))
        await uncancelled(lambda: workflow.wait([closing]))
        await uncancelled(lambda: workflow.wait_condition(workflow.all_handlers_finished))

    def _is_over(self) -> bool:
        return group_desire.is_over(self.state) and not self.events

    # Views

    def _show(self) -> None:
        """Updates search attributes and the page's details; only changes add to the history."""
        state, phase = self.state, self._phase()
        workflow.set_current_details(details_of(state, self.job, phase, workflow.now()))
        if not self._facts.search_attributes:
            return
        updates = changed_attributes(state, phase, self.job.backend, shown=self._shown)
        if updates:
            workflow.upsert_search_attributes(updates)

    def _phase(self) -> JobPhase:
        return self._closed or self.state.phase

    def _first_state(self) -> JobState:
        return JobState.begin(self.job, uid=uid_of(workflow.info().first_execution_run_id), now=workflow.now())
