"""Emits the agent's events about reports of the node's processes."""

from __future__ import annotations

from collections import Counter

from perdure.agent.protocol import time_or_arrival
from perdure.contract.agents import Failure, FailureKind
from perdure.contract.findings import BadNumber, Corruption
from perdure.events import AgentEvents, AsyncExporter, Span
from perdure_training.node_api.bodies import CommandExit, World

_WITH_EXITS = (FailureKind.RANKS, FailureKind.COMMAND)


class NodeEventEmitter(AgentEvents):
    """The events of one node, and how many of some kinds there were."""

    def __init__(self, *exporters: AsyncExporter) -> None:
        super().__init__(*exporters)
        self.failures = Counter[str]()
        """Failures that were reported to the job, by their kind."""
        self.rank_exits = 0
        """Ranks that ended before the training did."""
        self._entering: tuple[int, Span] | None = None
        """The generation that the node enters, and the span of its rendezvous."""
        self._aborted = 0
        """The newest generation whose ranks were ended for a newer one."""

    def on_world(self, world: World, *, trains_in: int | None) -> None:
        """Emits a newer world; `trains_in` is the generation whose ranks end for it, if any."""
        if trains_in is not None and trains_in > self._aborted:
            self._aborted = trains_in
            self.abort(generation=trains_in, reason=f"generation {world.generation} follows")
        self._end_rendezvous(f"generation {world.generation} follows")
        self.world(
            generation=world.generation,
            group_rank=world.group_rank,
            nodes=world.nodes,
            world_size=world.world_size,
            base_rank=world.base_rank,
        )
        self._entering = world.generation, self.rendezvous(generation=world.generation).begin()

    def on_entered(self, generation: int, time: float) -> None:
        """Emits that the node's rendezvous returned a world."""
        if self._entering is not None and self._entering[0] == generation:
            self._end_rendezvous(None)
        self.entered(generation=generation, time=time)

    def on_leaving(self, reason: str, grace: float) -> None:
        """Emits that the node leaves the job."""
        self._end_rendezvous(reason)
        self.leaving(reason=reason, grace_s=grace)

    def _end_rendezvous(self, error: str | None) -> None:
        if self._entering is None:
            return
        _, span = self._entering
        self._entering = None
        if error is None:
            span.succeed()
        else:
            span.fail(error)

    def on_command_exit(self, body: CommandExit) -> None:
        self.command_exited(
            attempt=body.attempt,
            generation=body.generation,
            time=time_or_arrival(body.time).timestamp(),
            exit_code=body.exit_code,
            signal=body.signal,
            superseded=body.superseded,
        )

    def on_failure(self, failure: Failure) -> None:
        """Emits a failure that is reported to the job, and the exits of ranks that it consists of."""
        for rank in failure.ranks if failure.kind in _WITH_EXITS else ():
            self.rank_exits += 1
            self.rank_exited(
                generation=failure.generation,
                time=rank.time,
                rank=rank.global_rank,
                local_rank=rank.local_rank,
                exited_pid=rank.pid,
                exit_code=rank.exit_code,
                signal=rank.signal,
                error=rank.error,
            )
        if self._entering is not None and self._entering[0] <= failure.generation:
            self._end_rendezvous(failure.message)
        self.failures[failure.kind.value] += 1
        self.fault_detected(generation=failure.generation, kind=failure.kind, message=failure.message)

    def on_finding(self, report: BadNumber | Corruption) -> None:
        """Emits what a rank has found about its own numbers."""
        if isinstance(report, BadNumber):
            number = report.number
            self.bad_number(
                generation=report.generation, rank=number.rank, kind=number.kind, value=number.value, step=number.step
            )
        else:
            found = report.found
            self.corruption(generation=report.generation, rank=found.rank, kind=found.kind, step=found.step)
