"""A job driven by a test, whose every decision is checked at once against the rules for one step."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from perdure.contract import Corruption, ExchangePlaces, Failure, FailureKind, JoinRequest, NodePhase, World
from perdure.contract.transitions import (
    NodeCreateFailed,
    NodeLost,
    NodeRemoved,
    NodeStallLook,
    NodeStepTimes,
    NodeUnreachable,
    NodeUnresponsive,
)
from perdure.workflows.policy.decide import decide
from perdure.workflows.policy.facts.events import (
    Event,
    RelaunchRequested,
    ScaleRequested,
    SuspendRequested,
    TimePassed,
)
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of, groups_of
from tests.policy.scenario import Scenario


class CheckedScenario(Scenario):
    """A scenario in which each decision must keep the rules that concern one step."""

    def __init__(self, nodes: str, **spec: Any) -> None:
        self.tokens_given = 0
        self.served: set[tuple[int, int, int]] = set()
        """Store ports in use: node, incarnation, port."""
        self.signs: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        """All evidence against each incarnation."""
        self.unreachable: set[tuple[int, int]] = set()
        """Incarnations that were so at any time."""
        self.in_a_world: set[tuple[int, int]] = set()
        self.ended: set[tuple[int, int]] = set()
        """Incarnations whose processes were reported to have ended."""
        self.dropped_at: dict[tuple[int, int], datetime] = {}
        self.sent_away: set[tuple[int, int]] = set()
        """Incarnations that a request made leave while their ranks were not known to be over."""
        super().__init__(nodes, **spec)

    def take(self, event: Event) -> CheckedScenario:
        before = self.whole
        self._note_signs(before.view(), event)
        revived = JobState.model_validate_json(before.model_dump_json())
        after = self._decided(before, event)
        assert revived == before, "the state must survive continue-as-new, and a decision change nothing of it"
        assert self._decided(revived, event) == after, "the same facts must lead to the same decision in the next run"
        known = before.view().nodes.values()
        self.tokens_given += sum(node not in known for node in after.view().nodes.values())
        self.whole = after
        self._check_step(before.view(), after.view(), event)
        return self

    def _decided(self, state: JobState, event: Event) -> JobState:
        tokens = iter(range(self.tokens_given + 1, self.tokens_given + 1000))
        return decide(state, event, self.job, self.now, new_token=lambda: UUID(int=next(tokens)))

    def _note_signs(self, before: RoleInJob, event: Event) -> None:
        match event:
            case NodeUnreachable() as transition:
                self.unreachable.add(transition.key)
            case NodeStallLook() | NodeStepTimes() as transition:
                self.signs[transition.key].add(transition.kind)
            case NodeLost() | NodeCreateFailed() | NodeUnresponsive() | NodeRemoved() as transition:
                self.signs[transition.key].add(transition.kind)
                ended = not isinstance(transition, NodeUnresponsive)
                if ended and (not isinstance(transition, NodeRemoved) or transition.certain):
                    self.ended.add(transition.key)
            case Failure() as failure:
                if failure.kind is FailureKind.NODE:
                    self.ended.add((failure.sender.rank, failure.sender.incarnation))
                self.signs[failure.sender.rank, failure.sender.incarnation].add("FAILURE")
            case Corruption() as found if found.found.is_named:
                self.signs[found.sender.rank, found.sender.incarnation].add("CORRUPTION")
            case RelaunchRequested(rank=rank) if rank in before.nodes:
                self.signs[rank, before.nodes[rank].incarnation].add("RELAUNCH")
            case JoinRequest() as request:
                patience = self.job.timing.rendezvous.enter_timeout
                for rank, owner in before.slot_owners.items():
                    if owner.node_id == request.node_id or self.now - owner.since >= patience:
                        self.signs[rank, owner.incarnation].add("JOINED ANEW")
                        self.ended.add((rank, owner.incarnation))
            case _:
                pass

    def _check_step(self, before: RoleInJob, after: RoleInJob, event: Event) -> None:
        assert after.generation >= before.generation
        self._check_nodes(before, after, event)
        if after.outcome is not None:
            self._check_the_end(before, after)
        if isinstance(event, NodeCreateFailed) and before.generation:
            assert after.outcome == before.outcome or before.is_member(before.nodes[event.rank]), (
                "a refusal never ends a job that has trained"
            )
        if after.world is not None and after.world != before.world:
            self._check_new_world(before, after, after.world)
        deadline = next_deadline(self.whole, self.job, self.now)
        assert deadline is None or deadline > self.now
        # Time alone changes nothing before the deadline that the workflow sleeps until, nor without one.
        self._check_quiet(self.whole, timedelta())
        if deadline is None:
            self._check_quiet(self.whole, timedelta(hours=1))
        else:
            self._check_quiet(self.whole, (deadline - self.now) / 2)

    def _check_quiet(self, state: JobState, wait: timedelta) -> None:
        later = decide(state, TimePassed(), self.job, self.now + wait, new_token=lambda: UUID(int=0))
        assert later == state, f"something was due {wait} from now that no timer is set for"

    def _check_nodes(self, before: RoleInJob, after: RoleInJob, event: Event) -> None:
        for rank, node in before.nodes.items():
            then = after.nodes[rank]
            assert then.incarnation in (node.incarnation, node.incarnation + 1)
            if then.incarnation == node.incarnation:
                assert then.token == node.token
                assert node.alive or not then.alive, "an incarnation that is gone never comes back"
            elif node.alive:
                is_stopped = before.interruption is not None or before.between_stages or not before.stepping
                given_up = is_stopped and (rank, node.incarnation) in self.unreachable
                assert given_up or self.signs[rank, node.incarnation], "nothing spoke against the node"
            dropped = node.alive and (not then.alive or then.incarnation != node.incarnation)
            if dropped:
                self.dropped_at[rank, node.incarnation] = self.now
            requested = (
                isinstance(event, ScaleRequested | SuspendRequested) or after.suspended or rank >= after.nodes_max
            )
            # A surplus node that a verdict gave up on was silent: nothing waits for its end.
            surplus = rank >= after.nodes_max and then.phase is NodePhase.REMOVED
            on_request = after.suspended or surplus or event == RelaunchRequested(rank=rank)
            if dropped and on_request and not (before.between_stages or before.has_finished(node) or node.ended):
                self.sent_away.add((rank, node.incarnation))
            if dropped and not requested and before.stepping and not (before.interruption or before.between_stages):
                assert self.signs[rank, node.incarnation], "unreachable is not lost while the world steps"

    def _check_the_end(self, before: RoleInJob, after: RoleInJob) -> None:
        if before.outcome is not None:
            assert after.outcome == before.outcome
            assert (after.world, after.generation) == (before.world, before.generation)
        for group in groups_of(after):
            desire = desires_of(after)[group]
            assert desire.wind_down
            assert set(desire.nodes.items()) <= set(desires_of(before)[group].nodes.items())

    def _check_new_world(self, before: RoleInJob, after: RoleInJob, world: World) -> None:
        assert world.generation == after.generation > before.generation
        assert after.nodes_min <= world.nodes <= after.nodes_max
        assert world.nodes % after.unit == 0
        self._check_that_members_stay()
        members = sorted(world.members.items(), key=lambda item: item[1].group_rank)
        assert [member.group_rank for _, member in members] == list(range(world.nodes))
        base = 0
        for rank, member in members:
            node = after.nodes[rank]
            assert member.base_rank == base
            assert (member.incarnation, member.processes) == (node.incarnation, node.processes)
            assert node.alive
            assert node.reachable
            self._check_predecessors(rank, node.incarnation)
            self.in_a_world.add((rank, node.incarnation))
            base += member.processes
        assert world.processes == base
        if before.world is not None:
            exchanged = {
                rank
                for incident in after.incidents[-1:]
                for action in incident.actions
                if isinstance(action, ExchangePlaces)
                for rank in action.nodes
            }
            for rank, member in before.world.members.items():
                if rank in world.members and member.group_rank < world.nodes and rank not in exchanged:
                    assert world.members[rank].group_rank == member.group_rank, "survivors keep their rank"
        host = (world.store_rank, world.members[world.store_rank].incarnation, world.store_port)
        assert host not in self.served, "a port serves one generation only"
        self.served.add(host)

    def _check_that_members_stay(self) -> None:
        patience = self.job.limits.termination_grace_period + self.job.timing.processes.presumed_gone
        for one in self.sent_away & self.in_a_world - self.ended:
            assert self.now - self.dropped_at[one] >= patience, "ranks of two generations may train after a request"

    def _check_predecessors(self, rank: int, incarnation: int) -> None:
        patience = self.job.limits.termination_grace_period + self.job.timing.processes.presumed_gone
        for older in self.in_a_world - self.ended:
            if older[0] == rank and older[1] < incarnation:
                assert self.now - self.dropped_at[older] >= patience, "two incarnations of one node may train at once"
