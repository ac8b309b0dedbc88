"""Reports progress without a request: transitions, such as a generation's first step, at once and by signals;
everything else in the details of the lease's heartbeat, which add nothing to any history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from perdure.agent.log_reader import end_of_log
from perdure.agent.node import Node
from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.pace import PaceMeter
from perdure.agent.peaks import PeakMeter
from perdure.agent.progress import ProgressReader
from perdure.agent.readiness import ReadinessProbe
from perdure.agent.stall_watch import StallLimits, StallWatch
from perdure.agent.state import AgentState
from perdure.agent.step_times import StepTimesReports, with_slowed_devices
from perdure.contract.agents import LeaseView, PaceReport, PortsChanged, ResourceUse, StepTimesReport
from perdure.contract.checkpoints import HoldRequest
from perdure_training.node_api import hold_times
from perdure_training.node_api.bodies import UsageReport

_LOOK = 0.5
"""Seconds between two samples of ranks that step."""
_LOOK_CLOSELY = 0.1
"""Seconds between two samples while the first step of a generation is awaited; its report may be late by this time."""
_RUNS = timedelta(seconds=5)
"""Time after which living ranks count as running: without a step they load a model, or use no optimizer."""
_PREPARES = 60.0
"""Seconds after which work before the first torchrun is reported; most commands need less."""
_PREPARES_AGAIN = 300.0
"""Seconds until it is reported again: less than the time for which a job waits for its nodes."""


_KEEP_AGAIN = 10.0
"""Seconds between two attempts to save a state that a full disk has rejected."""


class Telemetry:
    """Watches the ranks and reports what changes; one per agent."""

    def __init__(
        self,
        node: Node,
        ranks: ProgressReader,
        *,
        to_group: MessageSink,
        watch: StallWatch | None = None,
        readiness: ReadinessProbe | None = None,
        on_preparing: Callable[[], None] = lambda: None,
    ) -> None:
        self._node = node
        self._ranks = ranks
        self._to_group = to_group
        self._watch = watch
        self._readiness = readiness
        self._reported_ports: tuple[int, ...] = ()
        self._usage: UsageReport | None = None
        self._handed_out = 0
        """The newest generation."""
        self._handed_out_at = 0.0
        """The time at which this agent first saw it; an agent that was away does not know more."""
        self._entered = 0
        """The newest generation that the node has entered."""
        self._entered_at = 0.0
        """The time at which this agent first saw that."""
        self._hold: HoldRequest | None = None
        """The request to wait at a step that the ranks follow."""
        self._hold_seen_at = 0.0
        """The time at which this agent first saw it."""
        self._on_preparing = on_preparing
        self._preparing_due: float | None = None
        self._step_times = StepTimesReports()
        self._pace = PaceMeter()
        self._peaks = PeakMeter(node.state.peaks, keep=node.training.keep_peaks)
        ranks.peaks = node.state.peaks

    def usage(self, usage: UsageReport) -> None:
        """Stores the launcher's newest usage for the next `view`."""
        self._usage = usage
        self._peaks.add(usage, time.monotonic())
        self._ranks.peaks = self._peaks.newest

    @property
    def newest_usage(self) -> UsageReport | None:
        """The launcher's newest usage; None before its first report."""
        return self._usage

    def view(self, epoch: int) -> LeaseView:
        """Returns the details of the lease's heartbeat, which are recent and add no events to the history."""
        return LeaseView(
            epoch=epoch,
            generation=self._node.state.generation,
            state=self._node.state.summary,
            progress=self._ranks.newest.replace(peaks=None) if self._ranks.newest is not None else None,
            **self._pause(),
            step_times=self._ranks.step_times,
            unsplit_steps=not all(times.known for times in self._ranks.measured.values()),
            metrics=ResourceUse.model_validate(asdict(self._usage)) if self._usage else None,
            peaks=self._peaks.newest,
            log_end=end_of_log(self._node.config.run_dir),
            time=datetime.now(UTC),
        )

    def _pause(self) -> dict[str, timedelta | None]:
        """Returns for how long no rank has stepped, and for how long a step usually takes."""
        detector = self._ranks.stall_detector
        idle = detector.idle(time.monotonic()) if self._node.state.trains else None
        return {name: _duration(seconds) for name, seconds in (("idle", idle), ("usual_step", detector.usual))}

    async def run(self) -> None:
        """Samples and reports until cancelled."""
        try:
            await self._sample()
        finally:
            self._end_watch()

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        keep_at = 0.0
        while True:
            self.look_for_preparation(loop.time())
            self._look_for_entering(loop.time())
            self._look(loop.time())
            self.look_for_stall(loop.time())
            self._look_for_ports()
            if loop.time() >= keep_at:
                keep_at = loop.time() + _KEEP_AGAIN
                self._node.keep_stale()
            state = self._node.state
            await asyncio.sleep(_LOOK_CLOSELY if state.stepping < state.entered == state.generation else _LOOK)

    def look_for_preparation(self, now: float) -> None:
        """Reports a command that works for a long time before its torchrun, and repeats the report while that lasts."""
        if not self._node.state.prepares:
            self._preparing_due = None
            return
        # The job must learn it well before it stops waiting: the node has used part of that time to start.
        at_most = self._node.config.timing.rendezvous.join_timeout.total_seconds() / 4
        if self._preparing_due is None:
            self._preparing_due = now + min(_PREPARES, at_most)
        elif now >= self._preparing_due:
            self._preparing_due = now + min(_PREPARES_AGAIN, at_most)
            self._on_preparing()

    def _look_for_entering(self, now: float) -> None:
        generation = self._node.state.generation
        if generation != self._handed_out or self._node.state.prepares:
            self._handed_out, self._handed_out_at = generation, now
        patience = self._node.config.timing.rendezvous.enter_timeout.total_seconds()
        if patience and now - self._handed_out_at >= patience:
            self._node.report_overdue()

    def _look(self, now: float) -> None:
        state = self._node.state
        if not state.entered or state.world is None or state.world.generation != state.entered:
            return
        self._ranks.sample(
            generation=state.entered,
            base_rank=state.world.base_rank,
            processes=state.processes or 1,
            now=now,
        )
        self._report_step_times(state, now)
        self._report_pace(state)
        self._node.training.report_findings()
        counted = self._ranks.all_stepped
        known = state.stepped if counted else state.stepping
        if known < state.entered and (counted or self._runs()):
            starts = self._ranks.starts(generation=state.entered, processes=state.processes or 1)
            self._node.training.report_stepping(state.entered, counted=counted, starts=starts)
        if state.finished >= state.entered:
            self._ranks.end()

    def look_for_stall(self, now: float) -> None:
        """Has ranks that make no step looked at, and reports them once that lasts too long."""
        stall, detector = self._node.config.timing.stall, self._ranks.stall_detector
        if self._waits_by_request(now):
            detector.excuse(now)
        idle = detector.idle(now)
        self._node.training.keep_pauses(detector.take_pauses())
        if idle is None:
            self._end_watch()
            self._look_for_first_step(now)
            return
        if not stall.after or not self._node.state.trains:
            self._end_watch()
            return
        usual = detector.usual or 0.0
        limits = StallLimits.of(stall, usual=usual, pauses=self._node.state.pauses, learned=detector.learned)
        if idle < limits.first_look:
            self._end_watch()
        elif self._watch is not None:
            self._watch.begin(limits, idle=idle, usual=usual)
        if idle >= limits.stalled:
            self._node.training.report_stall(
                since=datetime.now(UTC) - timedelta(seconds=idle),
                usual_step=_duration(detector.usual),
            )
        elif idle < limits.first_look:
            self._node.training.report_stall_end()

    def _waits_by_request(self, now: float) -> bool:
        """Whether the ranks may wait at a step, as a planned change requests. They train on where they are not ended,
        and the request may last."""
        hold = self._node.state.hold
        if hold != self._hold:
            self._hold, self._hold_seen_at = hold, now
        if hold is None or hold.generation != self._node.state.entered:
            return False
        return now - self._hold_seen_at < hold_times.LONGEST + hold.within.total_seconds()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def _look_for_first_step(self, now: float) -> None:
        state = self._node.state
        if state.entered != self._entered or not self._node.state.starts:
            self._entered, self._entered_at = state.entered, now
        self._entered_at = max(self._entered_at, min(self._node.awaited_state_at, now))
        limit = state.first_step
        if limit is not None and now - self._entered_at >= limit.total_seconds():
            self._node.training.report_stall(
                since=state.entered_at or datetime.now(UTC) - limit, usual_step=None, at_start=True
            )

    def _report_step_times(self, state: AgentState, now: float) -> None:
        ranks = self._step_times.follow(
            self._ranks.measured,
            generation=state.entered,
            processes=state.processes or 1,
            nodes=self._node.config.most_nodes,
            now=now,
            requested=state.measurements,
        )
        if ranks and state.world is not None:
            ranks = with_slowed_devices(
                ranks,
                self._usage.devices if self._usage is not None else (),
                base_rank=state.world.base_rank,
                processes=state.processes or 1,
            )
            report = StepTimesReport(**envelope(self._node.config.node), generation=state.entered, ranks=ranks)
            self._to_group.put(report)

    def _report_pace(self, state: AgentState) -> None:
        progress, over = self._ranks.newest, state.pace_over
        # All ranks step alike, so the node with the first one tells it.
        if over is None or progress is None or state.world is None or state.world.base_rank != 0:
            return
        if progress.generation != state.entered or progress.last_step_at is None or not self._ranks.all_stepped:
            return
        at = progress.last_step_at.timestamp()
        found = self._pace.follow(progress.step, at=at, generation=state.entered, over=over.total_seconds())
        if found is not None:
            known = envelope(self._node.config.node)
            report = PaceReport(
                **known, generation=state.entered, step=found.step, spread=found.spread, progress=progress
            )
            self._to_group.put(report)

    def _runs(self) -> bool:
        state = self._node.state
        if state.entered_at is None or state.exited_attempt >= state.attempt or state.ready_after is not None:
            return False
        if self._readiness is not None:
            return self._readiness.ready_in >= state.entered
        return datetime.now(UTC) - state.entered_at > _RUNS

    def _look_for_ports(self) -> None:
        # A world hosted by this node has taken a port, which the job must not assign again. A node that is ready
        # has told its ports.
        state = self._node.state
        ready = state.ready_after is not None
        if ready or state.entered != state.generation or state.store_ports in ((), self._reported_ports):
            return
        self._reported_ports = state.store_ports
        self._to_group.put(PortsChanged(**envelope(self._node.config.node), store_ports=state.store_ports))


def _duration(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
