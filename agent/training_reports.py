"""The node's reports of ranks that run: that they step, that they do not, and what they have found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from perdure.agent.config import AgentConfig
from perdure.agent.node_events import NodeEventEmitter
from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.rank_findings import RankFindings
from perdure.agent.state import AgentState, KeptState
from perdure.contract.agents import Progress, RankStarts, Stall, Stepping
from perdure.contract.peaks import Peaks

logger = logging.getLogger(__name__)

_PAUSES_REMEMBERED = 10


class TrainingReports:
    """The reports of one node about its ranks in the world that they are in."""

    def __init__(
        self,
        config: AgentConfig,
        kept: KeptState,
        *,
        to_job: MessageSink,
        to_group: MessageSink,
        progress: Callable[[], Progress | None],
        events: NodeEventEmitter,
    ) -> None:
        self._config = config
        self._kept = kept
        self._to_job = to_job
        self._to_group = to_group
        self._progress = progress
        self._events = events
        self._findings = RankFindings(config.node, config.run_dir)

    @property
    def _state(self) -> AgentState:
        return self._kept.state

    def report_stepping(self, generation: int, *, counted: bool, starts: RankStarts | None) -> None:
        """Records that all local ranks made a step in this generation, or have stayed alive in it without one."""
        first = generation > self._state.stepping
        if first or (counted and generation > self._state.stepped):
            self._events.stepping(generation=generation, counted=counted)
            self._kept.keep(stepping=generation, stepped=generation if counted else self._state.stepped)
            self._to_group.put(
                Stepping(
                    **envelope(self._config.node),
                    generation=generation,
                    counted=counted,
                    entered_at=self._state.entered_at,
                    starts=starts if first else None,
                    # Without a step the ranks may still be on their way to where they begin to save.
                    saves=self._state.saving >= generation if counted and self._config.stored else None,
                    snapshots=self._state.snapshots if self._state.snapshots_in >= generation else None,
                )
            )

    def report_stall(self, *, since: datetime, usual_step: timedelta | None, at_start: bool = False) -> None:
        """Records that no local rank steps any more, or none has stepped in time, and reports it once per
        generation."""
        generation = self._state.entered
        if self._state.stalled != generation:
            logger.warning("generation %d has been stalled since %s", generation, since)
            self._events.stalled(generation=generation, since=since, usual_step_s=usual_step)
            self._kept.keep(stalled=generation)
            self._to_group.put(
                Stall(
                    **envelope(self._config.node),
                    generation=generation,
                    since=since,
                    usual_step=usual_step,
                    at_start=at_start,
                )
            )

    def report_stall_end(self) -> None:
        """Records that local ranks step, and reports it if a stall was reported before."""
        if self._state.stalled:
            self._events.stall_ended(generation=self._state.entered)
            self._kept.keep(stalled=0)
            self._to_group.put(Stall(**envelope(self._config.node), generation=self._state.entered))

    def report_findings(self) -> None:
        """Reports what ranks have found about their own numbers, if it is new."""
        for found in self._findings.find(self._state, self._progress()):
            self._events.on_finding(found)
            self._to_job.put(found)

    def keep_peaks(self, peaks: Peaks) -> None:
        """Remembers the most that the node has used of its machine, for the agent after this one."""
        self._kept.keep(peaks=peaks)

    def keep_pauses(self, pauses: Sequence[float]) -> None:
        """Remembers how long pauses between steps were, across worlds: an evaluation comes again."""
        if pauses:
            self._kept.keep(pauses=(*self._state.pauses, *pauses)[-_PAUSES_REMEMBERED:])
