"""A job of several roles, driven by a test: events name their role, and the state shows what follows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import uuid4

from perdure.contract import Failure, FailureKind, Finished, LossCause, NodeCredentials, RankExit
from perdure.contract.transitions import (
    AnyTransition,
    NodeCommanded,
    NodeJoined,
    NodeLost,
    NodeReady,
    NodeRemoved,
    NodeStepping,
)
from perdure.spec.validate import parse_spec
from perdure.workflows.policy.decide import decide
from perdure.workflows.policy.facts.events import AddressedEvent, ForRole, TimePassed
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.timers import next_deadline

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROLES = ("trainer", "evaluator")


class Roles:
    """A job of several roles."""

    def __init__(self, *, max_restarts: int = 10, storage: str = "", **roles: dict[str, Any]) -> None:
        given = roles or {name: {"ends_job": True} for name in ROLES}
        self.job = parse_spec(
            {
                "name": "job",
                "retry": {"max_restarts": max_restarts},
                "checkpoint": {"storage": storage} if storage else None,
                "roles": {
                    name: {"nodes": 2, "command": ["torchrun", "train.py"], **role} for name, role in given.items()
                },
            }
        )
        self.now = NOW
        self._ports = count(20_000)
        self._sequences = count(1)
        self.state = JobState.begin(self.job, uid="0123abcd", now=NOW)
        self.take(TimePassed())

    def take(self, event: AddressedEvent) -> Roles:
        self.state = decide(self.state, event, self.job, self.now, new_token=uuid4)
        return self

    def view(self, role: str) -> RoleInJob:
        return self.state.view(role)

    def ready(self, role: str, *ranks: int) -> Roles:
        generation = self.view(role).generation
        for rank in ranks or range(self.view(role).nodes_max):
            ports = tuple(next(self._ports) for _ in range(4))
            self.transition(role, rank, NodeJoined, address=f"10.0.0.{rank}")
            self.transition(role, rank, NodeReady, generation=generation, processes=1, store_ports=ports)
        return self

    def steps(self, role: str) -> Roles:
        view = self.view(role)
        for rank in view.world.members if view.world else ():
            self.transition(role, rank, NodeCommanded, generation=view.generation, entered=view.generation)
            self.transition(role, rank, NodeStepping, generation=view.generation)
        return self

    def runs(self, *roles: str) -> Roles:
        """The nodes of each role get a world if they have none, and run in it."""
        for role in roles:
            world, members = self.view(role).world, self.view(role).members
            if world is None or len(members) < self.view(role).nodes_max:
                self.ready(role)
            self.steps(role)
        return self

    def lost(self, role: str, *ranks: int) -> Roles:
        for rank in ranks:
            self.transition(role, rank, NodeLost, cause=LossCause.MACHINE, detail="gone")
        return self

    def removed(self, *roles: str) -> Roles:
        """The groups have deleted all nodes of these roles."""
        for role in roles:
            for rank in self.view(role).nodes:
                self.transition(role, rank, NodeRemoved)
        return self

    def left(self, role: str) -> Roles:
        """The nodes that were given up on request have ended."""
        for one in self.view(role).leaving:
            self.take(ForRole(role, NodeRemoved(rank=one.rank, incarnation=one.incarnation, time=self.now)))
        return self

    def wait(self, seconds: float) -> Roles:
        """Lets time pass, and wakes at each deadline on the way."""
        end = self.now + timedelta(seconds=seconds)
        while (deadline := next_deadline(self.state, self.job, self.now)) is not None and deadline <= end:
            self.now = deadline
            self.take(TimePassed())
        self.now = end
        return self.take(TimePassed())

    def transition(self, role: str, rank: int, kind: type[AnyTransition], **facts: Any) -> None:
        incarnation = self.view(role).nodes[rank].incarnation
        self.take(ForRole(role, kind(rank=rank, incarnation=incarnation, time=self.now, **facts)))

    def sender(self, role: str, rank: int) -> NodeCredentials:
        node = self.view(role).nodes[rank]
        return NodeCredentials(uid="0123abcd", role=role, rank=rank, incarnation=node.incarnation, token=node.token)

    def rank_killed(self, role: str, rank: int) -> Roles:
        return self.take(
            Failure(
                sender=self.sender(role, rank),
                sequence=next(self._sequences),
                time=self.now,
                generation=self.view(role).generation,
                kind=FailureKind.RANKS,
                ranks=(RankExit(local_rank=0, global_rank=rank, signal=9),),
            )
        )

    def command_ended(self, role: str) -> Roles:
        for rank in self.view(role).nodes:
            sender, generation = self.sender(role, rank), self.view(role).generation
            self.take(
                Finished(
                    sender=sender,
                    sequence=next(self._sequences),
                    time=self.now,
                    generation=generation,
                    command_runs=False,
                )
            )
        return self
