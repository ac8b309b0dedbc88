"""Tests of tickets: which machines each of them admits, and what it has no power over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from perdure.contract import FailureClass, JoinRefusal, JoinRequest, Ticket
from perdure.workflows.policy.capacity.joining import machines_view
from perdure.workflows.policy.facts.events import TicketIssued, TicketRevoked
from tests.policy.capacity.test_joining import Open, asks, given
from tests.policy.scenario import START

LIFETIME = timedelta(seconds=10)


def ticketed(nodes: str, **tickets: int) -> Open:
    """A job with tickets for so many nodes each, which expire while its first machines join."""
    job = Open(nodes)
    for name, admits in tickets.items():
        ticket = Ticket(id=name * 8, digest="0" * 64, nodes=admits, expires_at=START + LIFETIME)
        job.take(TicketIssued(ticket=ticket))
    return job


def by(ticket: str, node_id: str, process: int = 1, **fields: Any) -> JoinRequest:
    return asks(node_id, process, ticket=ticket * 8, **fields)


def test_a_ticket_admits_so_many_machines_at_a_time():
    job = ticketed("4", x=2)
    assert given(job.joins(by("x", "a"))) == (0, 1)
    assert given(job.joins(by("x", "b"))) == (1, 1)
    assert job.refuses(by("x", "c")) is JoinRefusal.NO_PLACE
    assert given(job.joins(asks("c"))) == (2, 1), "one that reaches Temporal needs none"
    # A machine that comes again takes no further place.
    assert job.refuses(by("x", "b", process=2)) is None


def test_a_name_under_another_ticket_is_another_machine():
    job = ticketed("3", x=1, y=1)
    job.joined(by("x", "a"), by("y", "a"), asks("a"))
    assert {one.incarnation for one in machines_view(job.whole).machines} == {1}
    assert not job.state.interruption
    # Neither is displaced, nor can it displace.
    for request in (by("x", "a"), by("y", "a"), asks("a")):
        assert job.refuses(request) is None


def test_an_expired_ticket_lets_only_known_machines_come_back():
    job = ticketed("2", x=2)
    job.joins(by("x", "a"))
    job.now = START + LIFETIME
    assert job.refuses(by("x", "b")) is JoinRefusal.TICKET
    assert job.refuses(by("x", "a", process=2)) is JoinRefusal.TICKET, "a new process is another machine"
    assert job.refuses(by("x", "a", stay=2)) is None


def test_a_revoked_ticket_ends_its_places_and_no_others():
    job = ticketed("1:3", x=2, y=1)
    job.joined(by("x", "a"), by("x", "b"), by("y", "c"))
    job.take(TicketRevoked(id="x" * 8))
    assert [one.rank for one in machines_view(job.whole).machines] == [2]
    assert [ticket.id for ticket in machines_view(job.whole).tickets] == ["y" * 8]
    assert {rank for rank, node in job.state.nodes.items() if node.alive and node.incarnation == 1} == {2}
    incident = job.state.incidents[-1]
    assert incident.failure is FailureClass.NODE_LOST
    assert any("the ticket of a was revoked" in sign.text for sign in incident.evidence)
    for request in (by("x", "a", stay=2), by("x", "d")):
        assert job.refuses(request) is JoinRefusal.TICKET
    assert job.refuses(by("y", "c")) is None


def test_a_ticket_that_is_issued_again_is_the_same_one():
    job = ticketed("2", x=2)
    before = job.state
    job.take(TicketIssued(ticket=before.tickets[0]))
    assert job.state.tickets == before.tickets
