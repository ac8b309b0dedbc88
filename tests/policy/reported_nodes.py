"""What groups say of the nodes of a job, in any order: rules of a state machine, with the helpers of all its rules."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from perdure.contract import (
    NodeCredentials,
    NodePhase,
    Progress,
    ProgressSource,
    RankStepTimes,
    StackFrame,
    StalledRank,
    StallLook,
)
from perdure.contract.transitions import (
    KINDS,
    AnyTransition,
    NodeCommanded,
    NodeCreated,
    NodeCreateFailed,
    NodeJoined,
    NodeLost,
    NodePending,
    NodePortsChanged,
    NodeReachable,
    NodeReady,
    NodeRemoved,
    NodeStalled,
    NodeStallEnded,
    NodeStallLook,
    NodeStepping,
    NodeStepTimes,
    NodeUnreachable,
    NodeUnresponsive,
)
from perdure.workflows.policy.facts.events import Event, GroupWoundDown
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world.group_desire import groups_of
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import FACTS, START, UID

WAITS = (StackFrame(function="all_reduce", file="/site-packages/torch/distributed/distributed_c10d.py", line=1),)
ELSEWHERE = (StackFrame(function="exchange", file="/job/train.py", line=1),)
SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1", {}),
    ("2", {}),
    ("3", {}),
    ("1:3", {}),
    ("2:4", {"recovery": {"on_capacity_loss": "wait"}}),
    ("1:4", {"recovery": {"on_capacity_loss": "fail"}}),
    ("2:6", {"limits": {"active_deadline": "2h"}}),
    ("2:4", {"retry": {"max_restarts": 2, "window": "5m", "no_progress_limit": 1}}),
    ("1:3", {"backend": "joined"}),
    ("3", {"recovery": {"on_straggler": "replace"}}),
    ("2:3", {"recovery": {"on_nan": "rollback"}}),
    ("3", {"recovery": {"on_nan": "stop", "on_hang": "replace"}}),
    (
        "3:4",
        {
            "recovery": {"on_straggler": "experiment"},
            "timing": {"stragglers": {"restart_cost": "0s", "between": "1m"}},
            "retry": {"max_restarts": 20},
        },
    ),
    (
        "1:3",
        {
            "retry": {
                "rules": [
                    {"match": {"failures": ["USER_CODE"]}, "action": "replace"},
                    {"match": {"signals": ["SIGKILL"]}, "action": "restart"},
                    {"match": {"exit_codes": [1], "failures": ["PEER_LOST"]}, "action": "stop"},
                ]
            }
        },
    ),
)


class ReportedNodes(RuleBasedStateMachine):
    """A job, and everything that its groups may say of its nodes."""

    job: CheckedScenario

    @initialize(spec=st.sampled_from(SPECS), unit=st.sampled_from([1, 1, 2]), running=st.booleans())
    def submit(self, spec: tuple[str, dict[str, Any]], unit: int, running: bool) -> None:
        nodes, fields = spec
        low, _, high = nodes.partition(":")
        if unit > 1 and not (int(low) % unit or int(high or low) % unit):
            count = {"min": int(low), "max": int(high or low), "unit": unit}
            fields = fields | {"roles": {"worker": {"nodes": count, "command": ["torchrun", "train.py"]}}}
        self.job = CheckedScenario(nodes, **fields)
        self.sent: list[Event] = []
        self.listening: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.next_port = 20_000
        self.sequence = 0
        self.places: dict[tuple[int, int], tuple[str, int]] = {}
        """The machines that received the token of each incarnation."""
        if running:
            self.all_run()

    def _alive(self) -> list[NodeState]:
        return [node for _, node in sorted(self.job.state.nodes.items()) if node.alive]

    def _pick(self, data: st.DataObject) -> NodeState:
        return data.draw(st.sampled_from(self._alive()))

    def _ports(self, node: NodeState, data: st.DataObject) -> tuple[int, ...]:
        """Returns the ports on which the node listens: the current ones or, for a delayed report, earlier ones."""
        ports = self.listening[node.rank, node.incarnation]
        if data.draw(st.booleans()):
            ports.append(self.next_port)
            self.next_port += 1
        return tuple(ports[data.draw(st.integers(0, max(len(ports) - 2, 0))) :])

    def _say(self, event: Event) -> None:
        self.sent.append(event)
        self.job.take(event)

    def _transition(self, node: NodeState, kind: type[AnyTransition], **facts: Any) -> None:
        self.job.transition(node.rank, kind, incarnation=node.incarnation, **facts)

    def _identity(self, node: NodeState, **fields: Any) -> NodeCredentials:
        known: dict[str, Any] = {"rank": node.rank, "incarnation": node.incarnation, "token": node.token}
        return NodeCredentials(**{"uid": UID, "role": "worker"} | known | fields)

    def _message(self, node: NodeState, data: st.DataObject, **identity: Any) -> dict[str, Any]:
        self.sequence += 1
        late = data.draw(st.sampled_from([0.0, 0.0, 0.5, 30.0]))
        return {
            "sender": self._identity(node, **identity),
            "sequence": self.sequence,
            "time": self.job.now - timedelta(seconds=late),
            "generation": data.draw(st.sampled_from([self.job.generation, self.job.generation, 0])),
        }

    def _progress(self, data: st.DataObject) -> Progress | None:
        return data.draw(
            st.none()
            | st.builds(
                Progress,
                step=st.integers(0, 5),
                generation_steps=st.integers(0, 5),
                source=st.sampled_from(ProgressSource),
            )
        )

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), processes=st.integers(1, 3))
    def becomes_ready(self, data: st.DataObject, processes: int) -> None:
        node = self._pick(data)
        if node.phase is not NodePhase.READY:
            self._transition(node, NodeJoined, address=f"10.0.0.{node.rank}", host=f"host-{node.rank}")
        else:
            processes = node.processes
        ports = self._ports(node, data)
        self._transition(node, NodeReady, store_ports=ports, processes=processes, generation=node.stepping)

    @precondition(lambda self: self._alive())
    @rule()
    def all_run(self) -> None:
        self.all_become_ready()
        self.all_step()

    @precondition(lambda self: any(n.phase is not NodePhase.READY for n in self._alive()))
    @rule()
    def all_become_ready(self) -> None:
        for node in self._alive():
            if node.phase is not NodePhase.READY and self.job.node(node.rank) == node:
                self._transition(node, NodeJoined, address=f"10.0.0.{node.rank}")
                ports = self.listening[node.rank, node.incarnation]
                ports.append(self.next_port)
                self.next_port += 1
                self._transition(node, NodeReady, store_ports=tuple(ports))

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def waits_for_the_next_world(self, data: st.DataObject) -> None:
        node = self._pick(data)
        if self.job.state.is_member(node):
            ports = self._ports(node, data)
            over = self.job.generation
            self._transition(node, NodeReady, store_ports=ports, processes=node.processes, generation=over)

    @precondition(lambda self: self.job.state.world is not None)
    @rule(data=st.data())
    def one_steps(self, data: st.DataObject) -> None:
        node = self._pick(data) if self._alive() else None
        if node is not None and self.job.state.is_member(node):
            self._transition(node, NodeCommanded, generation=self.job.generation)
            self._transition(node, NodeStepping, generation=self.job.generation)

    @precondition(lambda self: self._alive() and self.job.state.stepping)
    @rule(data=st.data(), kind=st.sampled_from([NodeStalled, NodeStallEnded, NodeStepTimes]))
    def stalls_or_steps_again(self, data: st.DataObject, kind: type[AnyTransition]) -> None:
        before = self.job.generation
        self._transition(self._pick(data), kind, generation=before)
        assert self.job.generation == before

    @precondition(lambda self: self.job.state.stepping and self.job.state.members)
    @rule(data=st.data(), measurements=st.integers(0, 6))
    def all_but_one_compute_alike(self, data: st.DataObject, measurements: int) -> None:
        slow = data.draw(st.none() | st.sampled_from([node.rank for node in self.job.state.members]))
        for node in self.job.state.members:
            if not node.alive or not self.job.state.stepping or self.job.state.world is None:
                continue
            member = self.job.state.world.members[node.rank]
            compute = 0.3 if node.rank == slow else 0.2
            times = tuple(
                RankStepTimes(
                    rank=rank, compute=compute, wait=0.3 - compute, rest=0.0, computes=(compute,) * measurements
                )
                for rank in range(member.base_rank, member.base_rank + member.processes)
            )
            self._transition(node, NodeStepTimes, generation=self.job.generation, ranks=times)

    @precondition(lambda self: self._alive() and self.job.state.stepping)
    @rule(
        data=st.data(),
        state=st.sampled_from("RSDTt"),
        calls=st.sampled_from([WAITS, ELSEWHERE]),
        lasts=st.sampled_from(["early", "unusual", "long"]),
    )
    def is_looked_at(self, data: st.DataObject, state: str, calls: tuple[StackFrame, ...], lasts: str) -> None:
        node = self._pick(data)
        member = self.job.state.world.members.get(node.rank) if self.job.state.world else None
        if member is None:
            return
        still: dict[str, Any] = {"state": state, "steady": True, "moved": False, "cpu_percent": 0.0, "stack": 0}
        ranks = range(member.base_rank, member.base_rank + member.processes)
        look = StallLook(
            generation=self.job.generation,
            since=START,
            taken_at=self.job.now,
            usual_steps=100,
            ranks=tuple(StalledRank(rank=rank, **still) for rank in ranks),
            stacks=(calls,),
            early=lasts == "early",
            unusual=lasts == "unusual",
            long=lasts == "long",
        )
        self._transition(node, NodeStallLook, generation=self.job.generation, look=look)

    @precondition(lambda self: self._alive() and not self.job.state.stepping)
    @rule()
    def all_step(self) -> None:
        for node in self.job.state.members:
            if node.alive:
                self._transition(node, NodeCommanded, generation=self.job.generation)
                self._transition(node, NodeStepping, generation=self.job.generation)

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def tells_its_ports(self, data: st.DataObject) -> None:
        node = self._pick(data)
        self._transition(node, NodePortsChanged, store_ports=self._ports(node, data))

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def is_created_or_pending(self, data: st.DataObject) -> None:
        self._transition(
            self._pick(data),
            data.draw(st.sampled_from([NodeCreated, NodePending])),
            detail="queue",
            absent=data.draw(st.booleans()),
        )

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        self._transition(self._pick(data), NodeLost, detail="killed")

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def becomes_unreachable(self, data: st.DataObject) -> None:
        self._transition(self._pick(data), NodeUnreachable, detail="silent")

    @precondition(lambda self: any(not node.reachable for node in self._alive()))
    @rule(data=st.data())
    def is_back(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from([node for node in self._alive() if not node.reachable]))
        self._transition(node, NodeReachable)

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def does_not_take_a_command(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from([self.job.generation, max(self.job.generation - 1, 0)]))
        self._transition(
            self._pick(data),
            NodeUnresponsive,
            generation=generation,
            detail="late",
        )

    @precondition(lambda self: self._alive() and self.job.state.generation > 0)
    @rule(data=st.data())
    def is_refused(self, data: st.DataObject) -> None:
        self._transition(self._pick(data), NodeCreateFailed, detail="no such image")

    @precondition(lambda self: any(node.incarnation > 1 for node in self.job.state.nodes.values()))
    @rule(data=st.data(), kind=st.sampled_from(list(KINDS.values())))
    def an_older_incarnation_is_reported(self, data: st.DataObject, kind: type[AnyTransition]) -> None:
        nodes = [node for node in self.job.state.nodes.values() if node.incarnation > 1]
        node = data.draw(st.sampled_from(nodes))
        before = self.job.state
        self.job.transition(node.rank, kind, incarnation=node.incarnation - 1, **FACTS)
        awaited = kind in (NodeLost, NodeRemoved) and node.predecessor == node.incarnation - 1
        assert self.job.state == before or awaited

    @precondition(lambda self: self.job.state.outcome is not None)
    @rule()
    def groups_wind_down(self) -> None:
        for group in groups_of(self.job.state):
            self._say(GroupWoundDown(group=group))

    def _answer(self) -> None:
        """Answers an inquiry like a group: every member reports that it has entered."""
        generation, inquiry = self.job.generation, self.job.state.inquiry
        for node in self.job.state.members:
            if self.job.node(node.rank) == node and node.alive:
                self._transition(node, NodeCommanded, generation=generation, entered=generation, inquiry=inquiry)
