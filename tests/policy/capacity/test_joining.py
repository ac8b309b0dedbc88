"""Tests of assigning slots in a job whose nodes join by themselves, and of nodes that join again."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from perdure.contract import FailureClass, JobPhase, JoinRefusal, JoinRequest, NodePhase
from perdure.contract.transitions import NodeJoined, NodePending
from perdure.workflows.policy.capacity.joining import describe_wait, next_request, place_of, refusal
from perdure.workflows.policy.facts.events import CancelRequested, ScaleRequested, SuspendRequested
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import START, Scenario


class Open(Scenario):
    """A job with open places, and machines that ask for them."""

    def __init__(self, nodes: str = "2", **spec: Any) -> None:
        super().__init__(nodes, backend="joined", **spec)
        self.opened()

    def opened(self) -> Open:
        """The group and its backend know of every place."""
        for rank, node in self.state.nodes.items():
            if node.phase is NodePhase.REQUESTED:
                self.transition(rank, NodePending, detail="waiting for a user to run `perdure join job`")
        return self

    def refuses(self, request: JoinRequest) -> JoinRefusal | None:
        refused = refusal(self.state, request, self.job, self.now)
        before = self.state
        if refused is not None:
            self.take(request)
            assert self.state == before, "a refusal changes nothing"
        return refused.kind if refused else None

    def joins(self, request: JoinRequest) -> NodeState | None:
        """The place that the request gets at once."""
        assert self.refuses(request) is None
        self.take(request)
        return place_of(self.state, request)

    def joined(self, *requests: JoinRequest) -> Open:
        """All get places and train."""
        for request in requests:
            assert self.joins(request) is not None
        self.running()
        assert self.state.phase is JobPhase.RUNNING
        return self


def asks(node_id: str, process: int = 1, **fields: Any) -> JoinRequest:
    """The request of the n-th process on a machine."""
    started_at: datetime = fields.pop("started_at", START + timedelta(minutes=process))
    session = f"session-of-{node_id}-{process}"
    return JoinRequest(node_id=node_id, session=session, started_at=started_at, **{"host": node_id, **fields})


def given(node: NodeState | None) -> tuple[int, int] | None:
    return (node.rank, node.incarnation) if node is not None else None


def test_places_are_given_in_order_and_once():
    job = Open("2")
    first = job.joins(asks("a"))
    assert first is not None
    assert given(first) == (0, 1)
    assert given(job.joins(asks("b"))) == (1, 1)
    assert job.refuses(asks("c")) is JoinRefusal.NO_PLACE
    before = job.state
    assert job.joins(asks("a")) == first, "the same request twice gets the same place"
    assert job.state == before


def test_a_machine_gets_the_place_with_its_schedulers_number_where_that_is_free():
    job = Open("3")
    assert given(job.joins(asks("a", place=2))) == (2, 1)
    assert given(job.joins(asks("b", place=2))) == (0, 1)
    assert given(job.joins(asks("c", place=7))) == (1, 1)


def test_a_place_is_given_when_its_group_knows_of_it():
    job = Scenario("1", backend="joined")
    request = asks("a")
    job.take(request)
    assert place_of(job.state, request) is None
    assert describe_wait(job.state, request) == "its place is being prepared"
    job.transition(0, NodePending)
    assert given(place_of(job.state, request)) == (0, 1)


def test_machines_that_wait_for_their_places_request_them_again_one_after_the_other():
    job = Scenario("200", backend="joined")
    requests = [asks(f"machine {number}") for number in range(200)]
    for request in requests:
        job.take(request)
    turns = [next_request(job.state, request, job.now).total_seconds() for request in requests]
    assert turns == pytest.approx([0.2 + 0.1 * number for number in range(200)])
    # Those before it have theirs.
    for rank in range(150):
        job.transition(rank, NodePending)
    assert next_request(job.state, requests[-1], job.now).total_seconds() == pytest.approx(0.2 + 0.1 * 49)


def test_a_machine_that_has_waited_for_long_requests_its_place_less_often():
    job = Scenario("1", backend="joined")
    request = asks("a")
    job.take(request)
    waited = {10: 1.0, 100: 10.0, 1000: 30.0}
    for seconds, expected in waited.items():
        later = job.now + timedelta(seconds=seconds)
        assert next_request(job.state, request, later) == timedelta(seconds=expected)


def test_the_first_word_that_a_job_hears_may_be_a_request():
    job = Open("1")
    unborn = RoleInJob.model_validate(job.state.model_dump() | {"nodes": {}})
    assert refusal(unborn, asks("a"), job.job, job.now) is None
    job.state = unborn
    request = asks("a")
    job.take(request)
    job.opened()
    assert given(place_of(job.state, request)) == (0, 1)


def test_who_comes_again_is_the_evidence_that_its_predecessor_is_gone():
    job = Open("2").joined(asks("a"), asks("b"))
    token = job.node(1).token
    again = asks("b", 2)
    assert job.joins(again) is None
    assert job.state.phase is JobPhase.WAITING
    incident = job.state.incidents[-1]
    assert (incident.failure, incident.culprit) == (FailureClass.NODE_LOST, 1)
    assert "b has joined again from b" in incident.evidence[-1].text
    assert incident.title == "node 1 lost, its place is open"
    job.opened()
    assert given(place_of(job.state, again)) == (1, 2)
    assert job.node(1).token != token
    job.ready(0, after=1).ready(1).steps()
    assert job.state.phase is JobPhase.RUNNING
    assert job.incarnations == {0: 1, 1: 2}


def test_a_process_whose_node_ended_under_it_comes_again_in_the_same_way():
    job = Open("1:2").joined(asks("a"), asks("b"))
    job.joins(asks("b", stay=2))
    assert job.opened().joins(asks("b", stay=2)) is not None
    assert job.incarnations == {0: 1, 1: 2}
    assert job.refuses(asks("b", stay=1)) is JoinRefusal.DISPLACED


def test_a_machine_that_was_displaced_stays_so():
    job = Open("2").joined(asks("a"), asks("b", 1))
    job.joins(asks("b", 2, host="elsewhere"))
    job.opened().joins(asks("b", 3, host="elsewhere"))
    job.opened()
    for process in (1, 2):
        assert job.refuses(asks("b", process)) is JoinRefusal.DISPLACED
        assert job.refuses(asks("b", process, stay=2)) is JoinRefusal.DISPLACED
    job.lost(1)
    assert job.refuses(asks("b", 2)) is JoinRefusal.DISPLACED


def test_a_request_that_was_long_on_its_way_does_not_displace_a_newer_process():
    job = Open("2").joined(asks("a"), asks("b", 2))
    assert job.refuses(asks("b", 1)) is JoinRefusal.DISPLACED
    # Clocks of two machines do not compare.
    assert job.refuses(asks("b", 1, host="elsewhere")) is None
    job.lost(1)
    assert job.refuses(asks("b", 1)) is None


def test_a_machine_whose_clock_was_set_back_has_its_place_back():
    earlier = START - timedelta(hours=1)
    job = Open("2").joined(asks("a"), asks("b", 1, boot="x", uptime=60))
    again = asks("b", 2, boot="x", uptime=70, started_at=earlier)
    assert job.joins(again) is None
    assert given(place_of(job.opened().state, again)) == (1, 2)
    assert job.refuses(asks("b", 3, boot="x", uptime=65)) is JoinRefusal.DISPLACED, "a request that was long on its way"
    booted = asks("b", 4, boot="y", uptime=5, started_at=earlier)
    assert job.joins(booted) is None
    assert given(place_of(job.opened().state, booted)) == (1, 3)


def test_a_request_is_granted_one_place_for_ever():
    job = Open("2").joined(asks("a"), asks("b"))
    job.lost(1)
    job.opened()
    assert job.refuses(asks("b")) is JoinRefusal.OVER
    assert given(job.joins(asks("b", stay=2))) == (1, 2)


def test_a_place_that_was_left_is_open_to_all_and_found_again():
    job = Open("2").joined(asks("a"), asks("b"))
    job.lost(0).lost(1)
    job.opened()
    assert given(job.joins(asks("b", 2))) == (1, 2)
    assert given(job.joins(asks("spare"))) == (0, 2)
    assert job.refuses(asks("a", 2)) is JoinRefusal.NO_PLACE


def test_who_took_a_place_and_never_came_loses_it():
    job = Open("1", timing={"rendezvous": {"join_timeout": "1h"}})
    assert job.joins(asks("a")) is not None
    token = job.node(0).token
    job.wait(job.job.timing.rendezvous.enter_timeout - timedelta(seconds=1))
    assert job.refuses(asks("b")) is JoinRefusal.NO_PLACE
    job.wait(1)
    assert job.joins(asks("b")) is None
    job.opened()
    assert given(job.joins(asks("b"))) == (0, 2)
    assert job.node(0).token != token


def test_a_machine_that_is_lost_again_and_again_waits_before_it_is_a_node():
    job = Open("1", timing={"rendezvous": {"join_timeout": "1h"}})
    for stay in (1, 2):
        job.joins(asks("a", stay=stay))
        job.transition(0, NodeJoined).lost(0)
        job.opened()
    request = asks("a", stay=3)
    assert job.joins(request) is None
    assert "lost several times" in describe_wait(job.state, request)
    job.wait(10)
    job.opened()
    assert given(place_of(job.state, request)) == (0, 3)


def test_who_is_joining_is_shown_and_who_is_waited_for():
    job = Open("2")
    assert next_action(job.state, job.job) == "waits for node 0 (pending: waiting for a user to run `perdure join job`)"
    job.joins(asks("a", host="gpu-7"))
    assert next_action(job.state, job.job) == "waits for node 0 (pending: gpu-7 is joining)"


def test_refusals_name_their_reason():
    local = Scenario("1")
    refused = refusal(local.state, asks("a"), local.job, local.now)
    assert refused is not None
    assert refused.kind is JoinRefusal.OTHER_BACKEND
    job = Open("1")
    assert job.refuses(asks("a", command=("torchrun", "other.py"))) is JoinRefusal.OTHER_COMMAND
    other = refusal(job.state, asks("a", command=("torchrun", "train.py", "--token", "hunter2")), job.job, job.now)
    assert other is not None
    assert "this node was started to run `torchrun train.py --token '[redacted]'`" in other.text
    assert job.refuses(asks("a", command=("torchrun", "train.py"))) is None
    job.take(SuspendRequested())
    assert job.refuses(asks("a")) is JoinRefusal.NO_PLACE
    job.take(CancelRequested())
    assert job.refuses(asks("a")) is JoinRefusal.ENDING


def test_scaling_opens_and_closes_places():
    job = Open("1").joined(asks("a"))
    assert job.refuses(asks("b")) is JoinRefusal.NO_PLACE
    job.take(ScaleRequested(minimum=1, maximum=2))
    job.opened()
    assert given(job.joins(asks("b"))) == (1, 1)
    job.take(ScaleRequested(minimum=1, maximum=1))
    assert desires_of(job.state)[0].nodes.keys() == {0}
    assert job.refuses(asks("b", stay=2)) is JoinRefusal.NO_PLACE
