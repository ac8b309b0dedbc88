"""A complete job in virtual time: real policy, a group's real table, agents' real decisions, and simulated processes.

A simulated network between them delays, duplicates and reorders messages like the real transport:

- The job's desired state reaches the group late, twice, and in any order; each message carries a version.
- Transitions reach the job late, and once each in their order: the group sends them until they are accepted, and the
  job drops repeats.
- An agent has two outboxes, for its group and for the job: messages arrive late, in order, and possibly twice. Messages
  that an agent has not delivered when its machine is lost are lost. Nothing else is.
- A command waits while its agent is away, which the group reports, and may be executed twice.

Processes start, reach the rendezvous, enter the world that their agent has, and step once all its members are in.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from perdure.contract import (
    ApplyDesired,
    GroupDesire,
    NodeCredentials,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodePhase,
)
from perdure.contract.identity import identity_of
from perdure.contract.transitions import (
    AnyTransition,
    NodeCreated,
    NodeCreateFailed,
    NodeUnresponsive,
)
from perdure.workflows.backend_reports import take_watch_events
from perdure.workflows.node_desired import asks_of_world, differing, record_answer
from perdure.workflows.node_record import GroupInput, NodeRecord
from perdure.workflows.node_table import NodeTable
from perdure.workflows.policy.facts.events import Event, GroupWoundDown, TimePassed
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import UID, Scenario
from tests.policy.simulated_node import SimulatedNode

TORCH_TIMEOUT = 1800.0
"""Seconds after which a rank that waits for one that is gone fails: torch's own timeout."""
COMMAND_PATIENCE = 4.0
COMMAND_AGAIN = 15.0


class Site:
    """One job and all that is around it."""

    def __init__(self, nodes: str, seed: int, **spec: Any) -> None:
        self.nodes = nodes
        self.chance = random.Random(seed)
        self.faulty = True
        self.agents_report_overdue = True
        self.hanging: set[int] = set()
        """Slots whose next command does not come to the rendezvous."""
        self.refuses_until = 0.0
        """Until when the backend creates no node."""
        self.refuses_for_good = False
        """The backend does not try a refused incarnation again by itself."""
        self.numbers = count(1000)
        self.clock = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ports = count(30_000)
        self._transitions_due = 0.0
        self._sent: GroupDesire | None = None
        self._version = 0
        self._commanding: set[tuple[int, int]] = set()
        self._closed = False
        self.agents: dict[tuple[int, int], SimulatedNode] = {}
        self.job = Scenario(nodes, **spec)
        self.began = self.job.now
        self._deadline = next_deadline(self.job.whole, self.job.job, self.job.now)
        group = GroupInput(
            job_id="job/a/b",
            job_first_run_id="first",
            uid=UID,
            group=0,
            role="worker",
            spec=self.job.job,
            desire=GroupDesire(version=0, nodes={}),
        )
        self.table = NodeTable(group)
        self._publish()

    # Time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.clock + seconds, next(self._order), action))

    def delay(self) -> float:
        """Returns the delay of a message."""
        return self.chance.choice((0.01, 0.05, 0.3, 2.0, 8.0)) if self.faulty else 0.05

    def run(self, until: float, *, done: Callable[[], bool] = lambda: False) -> None:
        """Plays everything up to a time, or until what is waited for."""
        while not done():
            deadline = self._deadline
            due = (deadline - self.began).total_seconds() if deadline is not None else float("inf")
            first = self._queue[0][0] if self._queue else float("inf")
            if min(due, first) > until:
                self._set(until)
                return
            if due < first:
                self._set(due, exactly=deadline)
                self.take(TimePassed())
            else:
                moment, _, action = heapq.heappop(self._queue)
                self._set(moment)
                action()

    def _set(self, clock: float, *, exactly: datetime | None = None) -> None:
        self.clock = max(self.clock, clock)
        self.job.now = exactly or max(self.job.now, self.began + timedelta(seconds=self.clock))

    # The job and its group

    def take(self, event: Event) -> None:
        self.job.take(event)
        self._deadline = next_deadline(self.job.whole, self.job.job, self.job.now)
        self._publish()

    def _publish(self) -> None:
        desire = desires_of(self.job.state)[0]
        if desire == self._sent:
            return
        self._sent, self._version = desire, self._version + 1
        versioned = desire.model_copy(update={"version": self._version})
        for _ in range(2 if self.faulty and self.chance.random() < 0.2 else 1):
            self.after(self.delay(), lambda: self._desire(versioned))

    def _desire(self, desire: GroupDesire) -> None:
        self.table.take_desire(desire)
        self.reconcile()

    def transition(self, record: NodeRecord, kind: type[AnyTransition], **facts: Any) -> None:
        self.table.report(kind(**identity_of(record.node), time=self.job.now, **facts))
        self.reconcile()

    def backend_says(self, event: NodeEvent) -> None:
        take_watch_events(self.table, NodeEvents(events=(event,)))
        self.reconcile()

    def reconcile(self) -> None:
        """Does what the group's workflow does, without its waits."""
        table = self.table
        desired = {} if table.winding_down else table.desire.nodes
        for rank, record in list(table.records.items()):
            target = desired.get(rank)
            if target is None or target.incarnation > record.node.incarnation:
                del table.records[rank]
                agent = self.agents.get((rank, record.node.incarnation))
                if agent is not None:
                    agent.machine, agent.process = False, None
        for rank, target in desired.items():
            if rank not in table.records:
                node = NodeCredentials(
                    uid=UID, role="worker", rank=rank, incarnation=target.incarnation, token=target.token
                )
                table.put(NodeRecord(node=node, since=self.job.now))
                self.after(self.delay(), lambda node=node: self._create(node))
        for record in list(table.records.values()):
            if record.joined and record.phase is not NodePhase.LOST:
                self._command(record)
                if table.world_to_join(record.node) is not None or record.joining is not None:
                    table.record_connection(record.node)
        if table.winding_down and table.is_empty and not self._closed:
            self._closed = True
            self.after(self.delay(), lambda: self.take(GroupWoundDown(group=0)))
        self._send_transitions()

    def _send_transitions(self) -> None:
        unsent = self.table.transitions._unsent
        transitions = tuple(unsent.values())
        unsent.clear()
        for transition in transitions:
            self._transitions_due = max(self._transitions_due, self.clock + self.delay())
            moment = self._transitions_due - self.clock
            self.after(moment, lambda transition=transition: self.take(transition))

    def _create(self, node: NodeCredentials) -> None:
        record = self.table.current(node)
        if record is None or not (record.phase is NodePhase.REQUESTED or self.table.creation_pending(record)):
            return
        if self.clock < self.refuses_until:
            self._refuse(record)
            return
        self.table.put(record.replace(phase=NodePhase.CREATED, watched=True))
        agent = self.agents[node.rank, node.incarnation] = SimulatedNode(self, node)
        self.transition(record, NodeCreated)
        agent.follow()

    def _refuse(self, record: NodeRecord) -> None:
        """Answers like an API server whose rules or permissions refuse a pod."""
        node = record.node
        if self.refuses_for_good:
            self.table.put(record.replace(phase=NodePhase.LOST, reason="refused"))
            self.transition(record, NodeCreateFailed, detail="refused")
            return
        self.backend_says(
            NodeEvent(
                kind=NodeEventKind.PENDING,
                rank=node.rank,
                incarnation=node.incarnation,
                time=self.job.now,
                reason="forbidden",
                absent=True,
            )
        )
        self.after(30.0, lambda: self._create(node))

    def _command(self, record: NodeRecord) -> None:
        node = record.node
        if node.key not in self._commanding and differing(self.table, node) is not None:
            self._commanding.add(node.key)
            self.after(self.delay(), lambda: self._apply(node, 0, 0.0))

    def _apply(self, node: NodeCredentials, generation: int, waited: float) -> None:
        table = self.table
        desired, record = differing(table, node), table.current(node)
        if desired is None or record is None or table.winding_down:
            self._commanding.discard(node.key)
            return
        if desired.world is not None and desired.world.generation != generation:
            generation, waited = desired.world.generation, 0.0
        agent = self.agents[node.rank, node.incarnation]
        if not agent.machine or not agent.connected:
            if waited in (COMMAND_PATIENCE, COMMAND_PATIENCE + COMMAND_AGAIN) and asks_of_world(desired, record):
                facts: dict[str, Any] = {"generation": generation, "detail": "not taken in time"}
                self.transition(record, NodeUnresponsive, **facts)
                waited = COMMAND_PATIENCE
            self.after(1.0, lambda: self._apply(node, generation, waited + 1.0))
            return
        record = record.replace(version=record.version + 1)
        table.put(record)
        command = ApplyDesired(node=node, version=record.version, desired=desired)
        reached = agent.node.apply_desired(command)
        if self.faulty and self.chance.random() < 0.2:
            reached = agent.node.apply_desired(command)
        agent.follow()
        self._commanding.discard(node.key)
        record_answer(table, record, desired, reached, now=self.job.now)
        self.reconcile()

    # The world

    def ports(self) -> tuple[int, ...]:
        return tuple(next(self._ports) for _ in range(4))

    def hangs_at_start(self, agent: SimulatedNode) -> bool:
        if agent.identity.rank in self.hanging:
            self.hanging.discard(agent.identity.rank)
            return True
        return False

    def inside(self, generation: int) -> list[SimulatedNode]:
        return [agent for agent in self.agents.values() if agent.process and agent.process.inside == generation]

    def step(self) -> None:
        """Every world that is whole makes a step."""
        for agent in list(self.agents.values()):
            process = agent.process
            if process is None or not process.inside or process.steps or agent.node.state.world is None:
                continue
            together = self.inside(process.inside)
            if len(together) == agent.node.state.world.nodes and not any(
                one.process is None or one.process.ending for one in together
            ):
                for one in together:
                    assert one.process is not None
                    one.process.steps = True
                    one.node.training.report_stepping(process.inside, counted=True, starts=None)

    def peers_notice(self, gone: SimulatedNode, generation: int, *, silent: bool = False) -> None:
        """Makes the peers of a lost node fail soon, or with torch's timeout if its machine is silent."""
        for peer in self.inside(generation) if generation else ():
            process = peer.process
            if peer is gone or process is None or not process.steps:
                continue
            process.steps = False

            def fail(peer: SimulatedNode = peer) -> None:
                if peer.process is not None and peer.process.inside == generation:
                    peer.ranks_fail(victim=True)

            self.after(TORCH_TIMEOUT if silent else self.chance.choice((0.1, 0.5, 3.0)), fail)

    @property
    def members(self) -> list[SimulatedNode]:
        """Nodes of the present, by slot."""
        newest = dict(sorted(self.agents))
        return [self.agents[key] for key in sorted(newest.items()) if self.agents[key].machine]

    @property
    def trains(self) -> bool:
        """The job believes that its world steps, and so it is."""
        state = self.job.state
        if state.world is None or state.interruption is not None or not state.stepping:
            return False
        inside = self.inside(state.world.generation)
        return len(inside) == state.world.nodes and all(one.process and one.process.steps for one in inside)

    def story(self) -> str:
        """Describes the state of everything, for a test that fails."""
        state = self.job.state
        nodes = "; ".join(
            f"{one.identity.rank}.{one.identity.incarnation} gen {one.node.state.generation} {one.node.state.summary}"
            f" {'' if one.connected else 'cut off'} {one.process}"
            for one in self.members
        )
        known = {
            rank: (node.phase.value, node.reachable, node.entered, node.stepping) for rank, node in state.nodes.items()
        }
        where = f"{self.clock:.1f} s: {state.phase} {state.reason} | {state.generation} {known}"
        return f"{where} | {state.interruption} | {nodes}"
