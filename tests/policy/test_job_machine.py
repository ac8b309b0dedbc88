"""Tests of invariants of a job that receives any events in any order.

Hypothesis simulates nodes, groups, users and the clock. Each decision is checked at once, so a failing example is a
short sequence of events that ends with the violated rule.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from perdure.contract import (
    BadNumber,
    Corruption,
    CorruptionKind,
    Failure,
    FailureKind,
    Finished,
    FoundCorruption,
    JoinRequest,
    NumberKind,
    RankExit,
    RankNumber,
)
from perdure.workflows.policy.capacity.joining import place_of, refusal
from perdure.workflows.policy.facts.events import (
    CancelRequested,
    RelaunchRequested,
    RepairsPaused,
    RepairsResumed,
    RestartRequested,
    ResumeRequested,
    ScaleRequested,
    SuspendRequested,
)
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.timers import next_deadline
from tests.policy.reported_nodes import ReportedNodes
from tests.policy.scenario import START

ERRORS = (
    None,
    "ValueError: bad batch",
    "RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:123",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
)


class JobMachine(ReportedNodes):
    """Everything that may happen to a job, as likely or unlikely as it is."""

    # What agents say

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), signal=st.sampled_from([None, 6, 9, 11, 15]), error=st.sampled_from(ERRORS))
    def ranks_fail(self, data: st.DataObject, signal: int | None, error: str | None) -> None:
        node = self._pick(data)
        code = None if signal is not None else data.draw(st.sampled_from([1, 1, 1, 3, 2]))
        self._say(
            Failure(
                kind=FailureKind.RANKS,
                ranks=(RankExit(local_rank=0, signal=signal, exit_code=code, error=error),),
                store_ports=self._ports(node, data),
                progress=self._progress(data),
                **self._message(node, data),
            )
        )

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), exit_code=st.sampled_from([0, 1, 1, 127]), signal=st.sampled_from([None, 9, 15]))
    def the_command_ends(self, data: st.DataObject, exit_code: int, signal: int | None) -> None:
        self._say(
            Failure(
                kind=FailureKind.COMMAND,
                exit_code=exit_code if signal is None else None,
                signal=signal,
                **self._message(self._pick(data), data),
            )
        )

    @precondition(lambda self: self._alive() and self.job.state.world is not None)
    @rule(data=st.data())
    def does_not_enter(self, data: st.DataObject) -> None:
        message = self._message(self._pick(data), data)
        self._say(Failure(kind=FailureKind.RENDEZVOUS, **message))

    @precondition(lambda self: self._alive() and self.job.state.world is not None)
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        self._say(Finished(**self._message(self._pick(data), data)))

    def _first_rank(self, node: NodeState) -> int:
        world = self.job.state.world
        return world.members[node.rank].base_rank if world is not None and node.rank in world.members else 0

    @precondition(lambda self: self._alive() and self.job.state.stepping)
    @rule(
        data=st.data(), kind=st.sampled_from(NumberKind), step=st.integers(1, 5), finite=st.none() | st.integers(0, 4)
    )
    def reports_a_bad_number(self, data: st.DataObject, kind: NumberKind, step: int, finite: int | None) -> None:
        node = self._pick(data)
        rank = self._first_rank(node)
        number = RankNumber(rank=rank, kind=kind, value="nan", step=step, last_finite=finite)
        self._say(BadNumber(number=number, progress=self._progress(data), **self._message(node, data)))

    @precondition(lambda self: self._alive() and self.job.state.stepping)
    @rule(
        data=st.data(),
        kind=st.sampled_from(CorruptionKind),
        others=st.sets(st.integers(0, 5)),
        own=st.booleans(),
        sound=st.none() | st.integers(0, 4),
        repeats=st.booleans(),
    )
    def computes_something_else(
        self, data: st.DataObject, kind: CorruptionKind, others: set[int], own: bool, sound: int | None, repeats: bool
    ) -> None:
        node = self._pick(data)
        rank = self._first_rank(node)
        suspects = (rank,) if own else tuple(others)
        found = FoundCorruption(rank=rank, kind=kind, step=5, suspects=suspects, sound=sound, repeats=repeats)
        self._say(Corruption(found=found, progress=self._progress(data), **self._message(node, data)))

    @precondition(lambda self: self.job.state.generation > 3 and self.job.state.stepping)
    @rule()
    def all_finish(self) -> None:
        for rank in self.job.state.world.members if self.job.state.world is not None else ():
            if self.job.node(rank).alive:
                self.job.finish(rank)

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), wrong=st.sampled_from([{"token": "guess"}, {"uid": "ffffffff"}, {"incarnation": 99}]))
    def an_impostor_reports(self, data: st.DataObject, wrong: dict[str, Any]) -> None:
        before = self.job.state
        message = self._message(self._pick(data), data, **wrong)
        self.job.take(Failure(kind=FailureKind.COMMAND, exit_code=127, **message))
        self.job.take(Finished(**message))
        assert self.job.state == before

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_message_comes_twice(self, data: st.DataObject) -> None:
        before = self.job.state
        self.job.take(data.draw(st.sampled_from(self.sent[-10:])))
        assert self.job.state == before

    # What users ask

    @precondition(lambda self: self.job.state.outcome is None)
    @rule(low=st.integers(1, 3), more=st.integers(0, 3))
    def scale(self, low: int, more: int) -> None:
        unit = self.job.state.unit
        self.job.take(ScaleRequested(minimum=low * unit, maximum=(low + more) * unit))

    @precondition(lambda self: self.job.state.outcome is None)
    @rule()
    def suspend_or_resume(self) -> None:
        self.job.take(ResumeRequested() if self.job.state.suspended else SuspendRequested())

    @precondition(lambda self: self.job.state.outcome is None and self.job.state.world is not None)
    @rule()
    def restart(self) -> None:
        self.job.take(RestartRequested())

    @precondition(lambda self: self.job.state.outcome is None)
    @rule(minutes=st.sampled_from([0, 1, 60]))
    def repairs_are_paused_or_resumed(self, minutes: int) -> None:
        self.job.take(RepairsPaused(until=self.job.now + timedelta(minutes=minutes)) if minutes else RepairsResumed())

    @precondition(lambda self: self.job.state.outcome is None and self._alive())
    @rule(data=st.data())
    def relaunch(self, data: st.DataObject) -> None:
        self.job.take(RelaunchRequested(rank=self._pick(data).rank))

    @precondition(lambda self: self.job.state.generation > 4)
    @rule()
    def cancel(self) -> None:
        self.job.take(CancelRequested())
        assert self.job.state.outcome is not None

    # Requests of machines that a user or a scheduler started

    @precondition(lambda self: self.job.job.backend == "joined")
    @rule(node_id=st.sampled_from("abc"), process=st.integers(1, 4), stay=st.integers(1, 2), host=st.sampled_from("xy"))
    def joins(self, node_id: str, process: int, stay: int, host: str) -> None:
        started_at = START + timedelta(minutes=process)
        session = f"session-{node_id}{host}{process}"
        request = JoinRequest(node_id=node_id, session=session, stay=stay, host=host, started_at=started_at)
        before = self.job.state
        refused = refusal(before, request, self.job.job, self.job.now)
        self.job.take(request)
        after = self.job.state
        if refused is not None:
            assert after == before, "a refusal changes nothing"
            return
        self.job.take(request)
        assert self.job.state == after, "the same request twice gets one place"
        (rank,) = (rank for rank, owner in after.slot_owners.items() if (owner.session, owner.stay) == (session, stay))
        node = place_of(after, request)
        if node is not None:
            assert (node.rank, node.incarnation) == (rank, after.slot_owners[rank].incarnation)
            given = self.places.setdefault((node.rank, node.incarnation), (session, stay))
            assert given == (session, stay), "a token has one owner"

    # Time

    @rule(seconds=st.sampled_from([0.1, 0.5, 1, 5, 60]))
    def time_passes(self, seconds: float) -> None:
        self.job.wait(seconds)

    def _next_wait(self) -> timedelta | None:
        deadline = next_deadline(self.job.whole, self.job.job, self.job.now)
        return None if deadline is None else deadline - self.job.now

    @precondition(lambda self: (wait := self._next_wait()) is not None and wait < timedelta(minutes=1))
    @rule()
    def a_deadline_comes(self) -> None:
        wait = self._next_wait()
        assert wait is not None
        self.job.wait(wait)

    @precondition(lambda self: self.job.state.generation > 3)
    @rule()
    def a_long_time_passes(self) -> None:
        self.job.wait(timedelta(minutes=15))

    @invariant()
    def every_slot_is_staffed_or_explained(self) -> None:
        state = self.job.state
        if state.outcome is not None or state.suspended:
            return
        for rank in range(state.nodes_max):
            node = state.nodes[rank]
            finished = state.world is not None and node.finished >= state.world.generation
            not_needed = node.ended and (state.world is None or state.stages_complete > 0)
            assert node.alive or finished or not_needed or node.not_before is not None

    def teardown(self) -> None:
        """However it stands, time alone brings a job to rest."""
        if not hasattr(self, "job"):
            return
        for _ in range(100):
            deadline = next_deadline(self.job.whole, self.job.job, self.job.now)
            if deadline is None:
                return
            asked = self.job.state.inquiry
            self.job.wait(deadline - self.job.now)
            if self.job.state.inquiry != asked:
                self._answer()
        raise AssertionError("deadlines follow each other without end")


_SETTINGS = settings(
    # Each is dozens of events, with five decisions on each.
    max_examples=settings().max_examples // 3,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestJobMachine = JobMachine.TestCase
TestJobMachine.settings = _SETTINGS


@pytest.mark.long("workflows")
@pytest.mark.timeout(900)
class TestJobMachineInDepth(TestJobMachine):
    """The same with many more examples."""

    settings = settings(_SETTINGS, max_examples=300)
