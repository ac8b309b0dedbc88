"""A job driven by a test: it gets events, time passes on request, and the state shows its decisions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import UUID

from perdure.contract import (
    BadNumber,
    Check,
    CheckpointRef,
    Corruption,
    CorruptionKind,
    Failure,
    FailureKind,
    Finished,
    FoundCorruption,
    IncidentView,
    LossCause,
    NodeCredentials,
    NodePhase,
    NumberKind,
    Progress,
    ProgressSource,
    RankExit,
    RankNumber,
    Restore,
    RestoreSource,
    StallLook,
    StoredCheckpoint,
)
from perdure.contract.transitions import (
    AnyTransition,
    NodeChecked,
    NodeCommanded,
    NodeJoined,
    NodeLost,
    NodeReady,
    NodeRemoved,
    NodeStepping,
)
from perdure.spec.job import JobSpec
from perdure.spec.validate import parse_spec
from perdure.workflows.policy.decide import apply_events, decide
from perdure.workflows.policy.facts.events import Event, TimePassed
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.timers import next_deadline

UID = "0123abcd"
START = datetime(2026, 1, 1, tzinfo=UTC)
CHECKPOINT = CheckpointRef(step=1, run=UID, generation=1)
FACTS: dict[str, Any] = {
    "checkpoint": CHECKPOINT,
    "stored": StoredCheckpoint(checkpoint=CHECKPOINT),
    "restored": Restore(step=1, source=RestoreSource.STORAGE, checkpoint=CHECKPOINT),
    "step": 0.1,
    "look": StallLook(generation=1, since=START, taken_at=START),
}
"""The facts of any transition that has no default for them; other kinds ignore them."""
GOOD_DISK = Check(name="disk", subject="run directory", unit="MB/s", value=500.0)


class Scenario:
    def __init__(self, nodes: str = "2", **spec: Any) -> None:
        self.job: JobSpec = parse_spec(
            {"name": "job", "roles": {"worker": {"nodes": nodes, "command": ["torchrun", "train.py"]}}} | spec
        )
        self.now = START
        self.whole = JobState.begin(self.job, uid=UID, now=START)
        self._tokens = count(1)
        self._sequence = count(1)
        self._ports = count(20_000)
        self.take(TimePassed())

    # Time and events

    def take(self, event: Event) -> Scenario:
        self.whole = decide(self.whole, event, self.job, self.now, new_token=lambda: UUID(int=next(self._tokens)))
        return self

    def wait(self, duration: timedelta | float) -> Scenario:
        """Lets time pass, waking at every deadline on the way."""
        end = self.now + (duration if isinstance(duration, timedelta) else timedelta(seconds=duration))
        while (deadline := next_deadline(self.whole, self.job, self.now)) is not None and deadline <= end:
            self.now = deadline
            self.take(TimePassed())
        self.now = end
        return self.take(TimePassed())

    def transition(
        self, rank: int, kind: type[AnyTransition], *, incarnation: int | None = None, **facts: Any
    ) -> Scenario:
        transition = kind(
            rank=rank,
            incarnation=incarnation or self.node(rank).incarnation,
            time=facts.pop("time", self.now),
            **facts,
        )
        return self.take(transition)

    # What agents and groups say

    def ready(self, *ranks: int, after: int = 0, processes: int = 1, stage: int | None = None) -> Scenario:
        """Nodes request a world of the given stage, or of the current one."""
        at = self.state.stages_complete if stage is None else stage
        for rank in ranks:
            if self.node(rank).phase is not NodePhase.JOINED:
                self.transition(rank, NodeJoined, address=f"10.0.0.{rank}", host=f"host-{rank}")
            ports = tuple(next(self._ports) for _ in range(4))
            self.transition(rank, NodeReady, store_ports=ports, processes=processes, generation=after, stage=at)
        return self

    def checked(
        self,
        rank: int,
        processor: float = 1000.0,
        *,
        run: int = 1,
        disk: Check = GOOD_DISK,
        usual: float | None = None,
    ) -> Scenario:
        """The node has checked its machine, on which a value of the processor is usual."""
        earlier = 0 if usual is None else 9
        checks = (Check(name="processor", value=processor, unit="MB/s", usual=usual, earlier=earlier), disk)
        return self.transition(rank, NodeChecked, run=run, checks=checks)

    def steps(self, *ranks: int, saves: bool | None = None) -> Scenario:
        """The given members, or all, step in the current world."""
        assert self.state.world is not None
        for rank in ranks or tuple(self.state.world.members):
            self.transition(rank, NodeCommanded, generation=self.generation)
            self.transition(rank, NodeStepping, generation=self.generation, saves=saves)
        return self

    def runs(self, *ranks: int) -> Scenario:
        """The given members, or all, stay alive in the current world; no step is seen."""
        assert self.state.world is not None
        for rank in ranks or tuple(self.state.world.members):
            self.transition(rank, NodeCommanded, generation=self.generation)
            self.transition(rank, NodeStepping, generation=self.generation, counted=False, entered_at=self.now)
        return self

    def running(self) -> Scenario:
        return self.ready(*range(self.state.nodes_max)).steps()

    def lost(self, rank: int, reason: str = "killed", cause: LossCause = LossCause.UNKNOWN) -> Scenario:
        return self.take(self._loss(rank, reason, cause))

    def removed(self, *ranks: int) -> Scenario:
        """The incarnations before the current ones are deleted: nothing of them runs any more."""
        for rank in ranks:
            self.transition(rank, NodeRemoved, incarnation=self.node(rank).incarnation - 1)
        return self

    def those_that_leave_end(self) -> Scenario:
        """All that requests have sent away are deleted: nothing of them runs any more."""
        for leaving in self.state.leaving:
            self.transition(leaving.rank, NodeRemoved, incarnation=leaving.incarnation)
        return self

    def lost_together(self, *ranks: int) -> Scenario:
        """The job receives all of them before it decides."""
        losses = [self._loss(rank, "killed") for rank in ranks]
        self.whole = apply_events(self.whole, losses, self.job, self.now)
        return self.take(TimePassed())

    def _loss(self, rank: int, reason: str, cause: LossCause = LossCause.UNKNOWN) -> NodeLost:
        return NodeLost(
            rank=rank,
            incarnation=self.node(rank).incarnation,
            time=self.now,
            detail=reason,
            cause=cause,
        )

    def failure(self, rank: int, **fields: Any) -> Failure:
        return Failure(
            sender=self.identity(rank),
            sequence=fields.pop("sequence", None) or next(self._sequence),
            time=fields.pop("time", self.now),
            generation=fields.pop("generation", self.generation),
            kind=fields.pop("kind", FailureKind.RANKS),
            store_ports=tuple(next(self._ports) for _ in range(4)),
            **fields,
        )

    def rank_killed(self, rank: int, signal: int = 9, **fields: Any) -> Scenario:
        exits = (RankExit(local_rank=0, global_rank=rank, signal=signal),)
        return self.take(self.failure(rank, ranks=exits, **fields))

    def rank_raised(self, rank: int, error: str | None = "ValueError: bad batch", **fields: Any) -> Scenario:
        exits = (RankExit(local_rank=0, global_rank=rank, exit_code=fields.pop("exit_code", 1), error=error),)
        return self.take(self.failure(rank, ranks=exits, **fields))

    def bad_loss(self, rank: int, step: int, *, kind: NumberKind = NumberKind.LOSS, **fields: Any) -> Scenario:
        """The node's first rank reports a number that is not finite."""
        assert self.state.world is not None
        base_rank = self.state.world.members[rank].base_rank
        number = RankNumber(
            rank=fields.pop("global_rank", base_rank),
            kind=kind,
            value=fields.pop("value", "nan"),
            step=step,
            last_finite=fields.pop("last_finite", step - 1),
            samples=fields.pop("samples", ()),
        )
        report = BadNumber(
            sender=self.identity(rank),
            sequence=next(self._sequence),
            time=self.now,
            generation=fields.pop("generation", self.generation),
            number=number,
            **fields,
        )
        return self.take(report)

    def wrong_result(self, rank: int, step: int, **fields: Any) -> Scenario:
        """The node's first rank reports that it does not compute what the others compute."""
        assert self.state.world is not None
        own = fields.pop("global_rank", self.state.world.members[rank].base_rank)
        generation = fields.pop("generation", self.generation)
        found = FoundCorruption(
            **dict[str, Any](rank=own, kind=CorruptionKind.GRADIENTS, step=step, suspects=(own,), device="cpu") | fields
        )
        report = Corruption(
            sender=self.identity(rank),
            sequence=next(self._sequence),
            time=self.now,
            generation=generation,
            found=found,
        )
        return self.take(report)

    def peer_failed(self, rank: int, **fields: Any) -> Scenario:
        return self.rank_raised(rank, "RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:123", **fields)

    def command_exited(
        self, rank: int, exit_code: int | None = 1, signal: int | None = None, **fields: Any
    ) -> Scenario:
        failure = self.failure(rank, kind=FailureKind.COMMAND, exit_code=exit_code, signal=signal, **fields)
        return self.take(failure)

    def ended_from_outside(self, rank: int, **fields: Any) -> Scenario:
        failure = self.failure(rank, kind=FailureKind.NODE, message=f"node {rank} lost: SIGTERM", **fields)
        return self.take(failure)

    def misses_its_world(self, rank: int, **fields: Any) -> Scenario:
        failure = self.failure(rank, kind=FailureKind.RENDEZVOUS, message="the command did not enter", **fields)
        return self.take(failure)

    def finish(self, *ranks: int, generation: int | None = None, progress: Progress | None = None) -> Scenario:
        for rank in ranks:
            finished = Finished(
                sender=self.identity(rank),
                sequence=next(self._sequence),
                time=self.now,
                generation=generation or self.generation,
                progress=progress,
            )
            self.take(finished)
        return self

    def torchrun_finished(self, *ranks: int) -> Scenario:
        """All ranks of these nodes have finished, and their commands continue."""
        return self._finished(*ranks, command_runs=True)

    def command_ended(self, *ranks: int, generation: int | None = None) -> Scenario:
        """The commands of these nodes have ended with 0."""
        return self._finished(*ranks, generation=generation, command_runs=False)

    def _finished(self, *ranks: int, generation: int | None = None, command_runs: bool) -> Scenario:
        for rank in ranks:
            finished = Finished(
                sender=self.identity(rank),
                sequence=next(self._sequence),
                time=self.now,
                generation=self.generation if generation is None else generation,
                command_runs=command_runs,
            )
            self.take(finished)
        return self

    def identity(self, rank: int) -> NodeCredentials:
        node = self.node(rank)
        return NodeCredentials(uid=UID, role="worker", rank=rank, incarnation=node.incarnation, token=node.token)

    # What is known

    @property
    def state(self) -> RoleInJob:
        """The job's only role."""
        return self.whole.view()

    @state.setter
    def state(self, state: RoleInJob) -> None:
        self.whole = self.whole.with_view(state)

    def node(self, rank: int) -> NodeState:
        return self.state.nodes[rank]

    @property
    def incident(self) -> IncidentView:
        """The newest one."""
        return self.state.incidents[-1]

    @property
    def generation(self) -> int:
        return self.state.world.generation if self.state.world is not None else 0

    @property
    def group_ranks(self) -> dict[int, int]:
        """Group rank by node of the current world."""
        assert self.state.world is not None
        return {rank: member.group_rank for rank, member in self.state.world.members.items()}

    @property
    def incarnations(self) -> dict[int, int]:
        return {rank: node.incarnation for rank, node in self.state.nodes.items() if node.alive}


def reported(step: int, generation_steps: int = 1) -> Progress:
    return Progress(step=step, source=ProgressSource.REPORTED, generation_steps=generation_steps)


def counted(steps: int) -> Progress:
    return Progress(step=steps, source=ProgressSource.COUNTED, generation_steps=steps)
