"""The node's own decisions: what it requests of the launcher and the handler, and what it reports to the workflows.

Everything that reaches an agent arrives here, from both sides: commands, and reports of the node's processes. The
methods are plain functions of the state, so that nothing can interleave; they save the state before they return.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from perdure.agent import ends
from perdure.agent.config import AgentConfig
from perdure.agent.ends import Meaning, Scene
from perdure.agent.files import log_tail
from perdure.agent.log_reader import end_of_log
from perdure.agent.node_events import NodeEventEmitter
from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.printed_lines import printed_before
from perdure.agent.protocol import bounded_ranks, time_or_arrival, world_of
from perdure.agent.state import AgentState, KeptState, StateFile
from perdure.agent.training_reports import TrainingReports
from perdure.contract.agents import Checked, Failure, Finished, Leaving, Progress, Ready, SnapshotUse
from perdure.contract.checkpoints import Commit
from perdure.contract.checks import Check
from perdure.contract.commands import ApplyDesired, NodeReached
from perdure.contract.identity import NodeCredentials
from perdure.contract.worlds import World as DesiredWorld
from perdure_training.node_api.bodies import (
    CheckRequest,
    CommandExit,
    EnteredReport,
    FinishedReport,
    HandlerHello,
    LauncherHello,
    LeavingReport,
    ReadyReport,
    RestoringReport,
    SupersededReport,
    UnmanagedReport,
)
from perdure_training.node_api.layout import ROLES
from perdure_training.node_api.untrusted_files import replace_beneath

logger = logging.getLogger(__name__)

_FAILURES_REMEMBERED = 64


class Node:
    """The state of one incarnation, and the effect of each event on it.

    Invariants:
        - The generation never goes back.
        - A failure is sent once, however often it is reported, and before its report is answered.
    """

    def __init__(
        self,
        config: AgentConfig,
        state_file: StateFile,
        *,
        to_job: MessageSink,
        to_group: MessageSink,
        progress: Callable[[], Progress | None],
        events: NodeEventEmitter | None = None,
    ) -> None:
        self.config = config
        self.events = events or NodeEventEmitter()
        self._kept = KeptState(state_file)
        self._keep = self._kept.keep
        self.keep_stale = self._kept.keep_stale
        self.changed = self._kept.changed
        self._to_job = to_job
        self._to_group = to_group
        self._progress = progress
        self.training = TrainingReports(
            config, self._kept, to_job=to_job, to_group=to_group, progress=progress, events=self.events
        )
        self.awaited_state_at = -math.inf
        """The monotonic time at which a rank last said that it waits for a saved state."""
        self.wrong_claims = 0
        """What the node's processes have reported of ranks or worlds that are not theirs."""
        # Launchers that polled the previous agent must detect that this one may have another desired state.
        self._keep(version=self.state.version + 1)

    @property
    def state(self) -> AgentState:
        """The newest state."""
        return self._kept.state

    # Commands of the control plane

    def refusal(self, node: NodeCredentials) -> str:
        """Returns why this node does not follow a command for an identity; empty if it does."""
        own = self.config.node
        if node.path != own.path:
            return f"the command is for {node.path}, this is {own.path}"
        if node.token != own.token:
            return "the command does not carry this incarnation's token"
        return ""

    def apply_desired(self, command: ApplyDesired) -> NodeReached:
        """Acts on what differs from what the node has reached, and answers with what it has reached."""
        if refusal := self.refusal(command.node):
            return NodeReached(accepted=False, detail=refusal)
        if command.version < self.state.desired_version:
            return self.state.reached(
                refusal=f"desired state {command.version} is older than the one that this node follows"
            )
        desired, state = command.desired, self.state
        printed = printed_before(self.config, state, desired.world)
        self._keep(
            desired_version=command.version,
            complete=max(desired.complete_generation, state.complete),
            stages_complete=max(desired.stages_complete, state.stages_complete),
            checkpoint_request=max(desired.checkpoint_request, state.checkpoint_request),
            check_runs=max(desired.check_runs, state.check_runs),
            hold=desired.hold,
            commit=desired.commit,
            copies=desired.copies or state.copies,
            roles=desired.all_roles,
            released=state.released or (desired.released and bool(state.ended_by)),
        )
        if desired.all_roles != state.roles:
            self._write_roles()
        refusal = self._take_world(desired.world) if desired.world is not None else ""
        self._restart_command(desired.command_restarts)
        if desired.stop is not None:
            self.leave(desired.stop.reason or "stopped by the job", grace=desired.stop.grace)
        return self.state.reached(refusal=refusal).replace(printed=printed)

    def _write_roles(self) -> None:
        content = {name: role.model_dump(mode="json") for name, role in self.state.roles.items()}
        try:
            replace_beneath(self.config.run_dir, ROLES, json.dumps(content).encode())
        except OSError as error:
            logger.warning("the node's processes are not told the addresses of the job's roles: %s", error)

    def _take_world(self, desired: DesiredWorld) -> str:
        """Accepts a newer world, and starts the command if it does not run; returns why it does not accept it."""
        state, member = self.state, desired.member(self.config.node)
        if member is None:
            return f"this node is no member of generation {desired.generation}"
        world = world_of(desired, self.config.node.rank, member)
        if refusal := state.refusal_of(world):
            logger.warning("refused generation %d: %s", world.generation, refusal)
            return refusal
        if world.generation > state.generation:
            logger.info("generation %d: node %d of %d", world.generation, world.group_rank, world.nodes)
            self.events.on_world(world, trains_in=state.entered if self.state.has_ranks else None)
            restart = member.restart_command and state.entered < state.generation
            start = restart or state.exited_attempt >= state.attempt
            self._keep(
                world=world,
                continued_since=state.continued_since if world.keeps_processes else world.generation,
                distrusted_checkpoints=desired.distrusted_checkpoints,
                first_step=desired.first_step,
                measurements=desired.measurements,
                pace_over=desired.pace_over,
                run=True,
                attempt=state.attempt + start,
                started_for=world.generation if start else state.started_for,
            )
        return ""

    def _restart_command(self, number: int) -> None:
        """Restarts the command if it has ended. It runs without a world until it requests one."""
        state = self.state
        if number > state.command_restarts and state.leaving is None:
            ended = state.exited_attempt >= state.attempt
            self._keep(command_restarts=number, attempt=state.attempt + ended, run=True)

    def leave(self, reason: str, *, grace: timedelta | None = None) -> None:
        """Ends the command for good.

        Args:
            reason: The reason, for users.
            grace: Time from SIGTERM to SIGKILL; None for the specification's. A later call can only shorten it.
        """
        seconds = self.config.termination_grace if grace is None else grace.total_seconds()
        if self.state.leaving is None:
            logger.info("leaving within %g s: %s", seconds, reason)
            self.events.on_leaving(reason, seconds)
            self._keep(leaving=reason, leaving_grace=seconds, run=False)
        elif seconds < self.state.leaving_grace:
            self._keep(leaving_grace=seconds)

    def depart(self, reason: str, *, save: bool) -> None:
        """Ends the command for good, as the process wants that started the node and reports its end.

        Args:
            reason: The reason, for users.
            save: The job may have a checkpoint made before; that process then signals the launcher.
        """
        if save and self._saves_first:
            self.on_leaving(LeavingReport(reason=reason))
            self._keep(departs=True)
        else:
            self.leave(reason)

    def request_stacks(self, *, by_signal: bool = True) -> int:
        """Has the launcher report where the ranks are, or only the kernel's account of them; returns the number of the
        request."""
        self._keep(stacks_requested=self.state.stacks_requested + 1, stacks_by_signal=by_signal)
        return self.state.stacks_requested

    def request_checks(self, request: CheckRequest) -> int:
        """Has the launcher measure the machine; returns the number of the request."""
        number = self.state.checks.number + 1 if self.state.checks is not None else 1
        self._keep(checks=replace(request, number=number))
        return number

    def on_checked(self, run: int, checks: tuple[Check, ...]) -> None:
        """Reports what the checks of the machine have found."""
        self._keep(checked=run)
        self._to_group.put(Checked(**envelope(self.config.node), run=run, checks=checks))

    @property
    def _saves_first(self) -> bool:
        """Whether a node that is ended from outside waits until the job releases it."""
        checkpoint = self.config.stored
        return checkpoint is not None and bool(checkpoint.save_timeout) and self.state.leaving is None

    # Reports of the node's processes

    def on_launcher_hello(self, hello: LauncherHello) -> None:
        changes: dict[str, object] = {"mode": hello.mode, "script": hello.script}
        if hello.processes is not None and self.state.processes is None:
            changes["processes"] = bounded_ranks(hello.processes)
        # An agent that lost its state (a full disk) must not request a start that has already happened.
        if hello.attempt > self.state.attempt:
            changes["attempt"] = hello.attempt
        self._keep(**changes)

    def on_handler_hello(self, hello: HandlerHello) -> None:
        own = f"{hello.min_nodes}:{hello.max_nodes}"
        desired = self.config.nodes if ":" in self.config.nodes else f"{self.config.nodes}:{self.config.nodes}"
        state = self.state
        self._keep(
            processes=bounded_ranks(hello.processes),
            command_nodes=None if own == desired else own,
            store_ports=hello.store_ports or state.store_ports,
            handler=hello.pid,
            rendezvous_attempt=state.attempt,
            # Another torchrun must not get the world that the previous one has left.
            left=max(state.left, state.entered) if hello.pid != state.handler else state.left,
        )

    def on_ready(self, body: ReadyReport) -> None:
        """Handles a node that waits for a world; `ranks` are the exits that ended its last one."""
        body = replace(body, after_generation=self._received(body.after_generation))
        state = self.state
        if state.ended_by:
            if body.ranks:
                self._report_node_lost(body.after_generation, ends.earliest(body))
            return
        if body.ranks and state.leaving is None:
            failure = ends.ranks_failure(self._scene(), body)
            pids = sorted(rank.pid or 0 for rank in failure.ranks)
            self._fail(failure, f"{state.attempt}/{body.after_generation}: {pids}")
        self.events.ready(generation=body.after_generation, stage=body.stage)
        after = max(body.after_generation, state.left)
        passes = body.stage < state.stages_complete
        processes = bounded_ranks(body.processes)
        self._keep(
            ready_after=after,
            store_ports=body.store_ports,
            processes=processes,
            output_since=end_of_log(self.config.run_dir),
            # A torchrun without ranks exits at once, and the command continues with its next line.
            rendezvous_attempt=0 if passes else state.rendezvous_attempt,
        )
        if state.generation <= after and state.leaving is None:
            self._to_group.put(
                Ready(
                    **envelope(self.config.node),
                    after_generation=after,
                    store_ports=body.store_ports,
                    processes=processes,
                    command_nodes=state.command_nodes,
                    stage=body.stage,
                )
            )

    def on_entered(self, body: EnteredReport) -> None:
        """Records that the node's rendezvous returned this world."""
        body = replace(body, generation=self._received(body.generation))
        state = self.state
        if body.generation >= state.entered:
            entered_at = time_or_arrival(body.time)
            self.events.on_entered(body.generation, entered_at.timestamp())
            ports = state.store_ports if body.store_ports is None else body.store_ports
            known = state.world is not None and state.world.generation == body.generation
            self._keep(
                entered=body.generation,
                entered_at=entered_at,
                entered_base_rank=state.world.base_rank if known and state.world else None,
                ready_after=None,
                store_ports=ports,
            )

    def on_saving(self, generation: int) -> None:
        """Records that a rank of this generation saves into the job's storage."""
        if generation > self.state.saving:
            self._keep(saving=generation)

    def on_snapshots(self, generation: int, use: SnapshotUse) -> None:
        """Records how a checkpointer of this generation keeps its state in memory; a script may have several."""
        state = self.state
        if generation < state.snapshots_in:
            return
        known = state.snapshots if generation == state.snapshots_in else None
        parts = [one for one in (known, use) if one is not None and not one.replicated]
        use = SnapshotUse(replicated=not parts, copies=min((one.copies for one in parts), default=0))
        if (generation, use) != (state.snapshots_in, state.snapshots):
            self._keep(snapshots=use, snapshots_in=generation)

    def on_committed(self, commit: Commit) -> None:
        """Records that the node has committed a checkpoint."""
        self._keep(committed=commit)

    def on_awaiting_state(self) -> None:
        """Records that a rank waits for a saved state: its first step comes later."""
        self.awaited_state_at = time.monotonic()

    def on_finished(self, body: FinishedReport) -> None:
        """Records that all local ranks ended with 0 in this generation."""
        body = replace(body, generation=self._received(body.generation))
        if self.state.is_ended:
            return
        if body.generation > self.state.finished:
            # Without torchrun the ranks are the command.
            self._report_finished(body.generation, time_or_arrival(body.time), command_runs=self.state.mode != "env")

    def on_superseded(self, body: SupersededReport) -> None:
        """Restarts the command: torchrun cannot restart ranks from the exit barrier, and later commands of a script
        must not run."""
        state = self.state
        if max(state.superseded, state.complete) < body.generation < state.generation and state.run:
            self._keep(superseded=body.generation, attempt=state.attempt + 1)

    def _report_finished(self, generation: int, time: datetime, *, command_runs: bool) -> None:
        self.events.finished(generation=generation, time=time.timestamp(), command_runs=command_runs)
        self._keep(finished=max(self.state.finished, generation))
        self._to_job.put(
            Finished(
                **envelope(self.config.node, time),
                generation=generation,
                progress=self._progress(),
                command_runs=command_runs,
            )
        )

    def on_leaving(self, body: LeavingReport) -> None:
        """Records that the node is ended from outside, as when its pod is deleted. The job learns of it when the
        processes have ended, since they may save something first."""
        if self.state.departs:
            return
        reason = body.reason or "its launcher is being ended"
        logger.warning("this node is being ended: %s", reason)
        self._keep(ended_by=reason)
        if not self._saves_first:
            return
        # The launcher waits for `released`, for some time.
        leaving = Leaving(**envelope(self.config.node), generation=self.state.generation, reason=reason)
        self._to_group.put(leaving, first=True)

    def on_restoring(self, body: RestoringReport) -> None:
        """Records that the command waits for its watched folder, or does not any longer."""
        checkpoint, waits = self.config.checkpoint, ""
        if body.since is not None and checkpoint is not None:
            since, problem = time_or_arrival(body.since), f": {body.problem}" if body.problem else ""
            place = checkpoint.storage or "another node's memory"
            restored = f"until {checkpoint.watch} is restored from {place}{problem}"
            waits = f"its command waits since {since:%H:%M:%S} UTC {restored}"
        self._keep(waits=waits)

    def on_exited(self, body: CommandExit) -> None:
        """Handles the end of the command. The launcher continues to run, and restarts the command on request.

        A restart is requested at once if the node has a newer world than this command knew, because no other command of
        the job would follow. Every end is reported, unless the command is restarted after it was superseded or
        exited with 0.
        """
        body = replace(body, generation=self._received(body.generation))
        state = self.state
        identity = f"{body.attempt}/{body.generation}"
        if identity == state.exited:
            return
        self.events.on_command_exit(body)
        again = ends.starts_again(state, body)
        if ends.is_news(state, body) and not (again and (body.superseded or body.exit_code == 0)):
            generation = body.generation or state.entered
            self._report_command_end(body, generation if again else state.generation or generation, starts_again=again)
        if again and state.mode == "env":
            # The launcher starts the newer world's ranks itself.
            self._keep(exited=identity)
            return
        self._keep(
            exited=identity,
            exited_attempt=max(state.exited_attempt, body.attempt),
            attempt=max(state.attempt, body.attempt) + again,
            started_for=state.generation if again else state.started_for,
            ready_after=None,
        )

    def _report_node_lost(self, generation: int, time: datetime | None) -> None:
        if self.state.leaving is not None or self.state.departs:
            return
        self._fail(ends.node_failure(self._scene(), generation, time))

    def _report_command_end(self, body: CommandExit, generation: int, *, starts_again: bool) -> None:
        ended_at = time_or_arrival(body.time)
        match ends.meaning(self.state, body, generation):
            case Meaning.NODE_ENDED:
                self._report_node_lost(generation, ended_at)
            case Meaning.RANKS_FINISHED:
                self.on_finished(FinishedReport(generation=generation, time=body.time))
            case Meaning.COMMAND_FINISHED:
                self._report_finished(generation, ended_at, command_runs=False)
            case Meaning.FAILED:
                failure = ends.command_failure(self._scene(), body, generation, starts_again=starts_again)
                self._fail(failure, f"{body.attempt}/{body.generation}")

    def on_unmanaged(self, body: UnmanagedReport) -> None:
        """Stops ranks that train outside of the job's world, before they overwrite the checkpoints of others."""
        self._fail(ends.unmanaged_failure(self._scene(), body), f"{self.state.attempt}")
        self._keep(run=False)

    def report_overdue(self) -> None:
        """Reports, once, that the command runs but has not entered the newest world for a long time."""
        state = self.state
        runs = state.run and state.exited_attempt < state.attempt
        if not runs or state.entered >= state.generation or self.state.prepares:
            return
        failure = ends.overdue_failure(self._scene(), patience=self.config.timing.rendezvous.enter_timeout)
        self._fail(failure, f"{state.generation}")

    # Shared

    def _scene(self) -> Scene:
        return Scene(
            node=self.config.node,
            state=self.state,
            progress=self._progress(),
            output=log_tail(self.config.run_dir, ends.OUTPUT_MAX, since=self.state.output_since),
            run_dir=self.config.run_dir,
            log_patterns=self.config.log_patterns,
            is_alone=self.config.most_nodes == 1,
        )

    def _received(self, generation: int) -> int:
        """Returns a generation that a process of the node names, or the newest that the node has received: there is no
        other source of worlds. An agent that has lost its state knows none."""
        newest = self.state.generation
        if not newest or generation <= newest:
            return generation
        self.wrong_claims += 1
        logger.warning("generation %d is reported, and this node has received none after %d", generation, newest)
        return newest

    def _fail(self, failure: Failure, which: str = "") -> None:
        """Reports a failure once: `which` tells it from others of its kind, and is equal for all reports of it."""
        identity = f"{failure.kind} {which}"
        if identity in self.state.failures:
            return
        failure = ends.hide_secrets(failure)
        # A script may end because of it.
        self.training.report_findings()
        self.wrong_claims += failure.wrong_claims
        logger.warning("failure in generation %d: %s", failure.generation, failure.message)
        self.events.on_failure(failure)
        self._to_job.put(failure)
        self._keep(failures=[*self.state.failures, identity][-_FAILURES_REMEMBERED:])
