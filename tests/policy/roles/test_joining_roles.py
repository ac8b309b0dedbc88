"""Tests of the role among whose nodes a machine gets its place, in a job of several."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import JoinRefusal, JoinRequest, Ticket
from perdure.contract.transitions import NodePending
from perdure.workflows.policy.capacity.joining import Choice, choose_role, place_of
from perdure.workflows.policy.facts.events import CancelRequested, ForRole, SuspendRequested, TicketIssued
from perdure.workflows.policy.state.job import UnknownRole
from tests.policy.capacity.test_joining import asks
from tests.policy.job_of_roles import NOW, Roles


class Joined(Roles):
    """A job whose machines join."""

    def __init__(self, **roles: dict[str, Any]) -> None:
        super().__init__(max_restarts=10, storage="", **roles)
        self.job = self.job.model_copy(update={"backend": "joined"})

    def choice(self, request: JoinRequest) -> Choice:
        return choose_role(self.state, request, self.job, self.now)

    def joins(self, *requests: JoinRequest) -> list[str]:
        """The nodes that machines get, one after the other."""
        return [self._joins(request) for request in requests]

    def _joins(self, request: JoinRequest) -> str:
        role, refusal = self.choice(request)
        assert refusal is None
        self.take(ForRole(role, request))
        for rank in self.view(role).nodes:
            self.transition(role, rank, NodePending, detail="waiting")
        node = place_of(self.view(role), request)
        return f"{role}-{node.rank}.{node.incarnation}" if node else role

    def refuses(self, request: JoinRequest) -> tuple[JoinRefusal, str]:
        refusal = self.choice(request).refusal
        assert refusal is not None
        return refusal.kind, refusal.text


def trained_by_servers() -> Joined:
    return Joined(
        trainer={"command": ["torchrun", "train.py"], "depends_on": {"ps": "ready"}},
        ps={"command": ["serve"], "ready": {"port": 6000}, "depends_on": {"init": "completed"}},
        init={"nodes": 1, "command": ["prepare"]},
    )


def test_machines_become_nodes_of_the_first_role_that_lacks_some():
    job = trained_by_servers()
    assert job.joins(asks("a")) == ["init-0.1"]
    kind, text = job.refuses(asks("b"))
    assert (kind, text.split("; ")) == (
        JoinRefusal.NO_PLACE,
        [
            "role init: its only place is taken",
            "role ps: it waits for init to complete",
            "role trainer: it waits for ps to be ready",
        ],
    )
    job.runs("init").command_ended("init")
    assert job.joins(asks("b"), asks("c")) == ["ps-0.1", "ps-1.1"]
    job.removed("init")
    job.runs("ps")
    # The initializer's machine is free, too.
    assert job.joins(asks("a", stay=2), asks("d")) == ["trainer-0.1", "trainer-1.1"]
    assert job.refuses(asks("e"))[1].split("; ") == [
        "role init: it needs no nodes any more: its rank finished in generation 1",
        "role ps: all its 2 places are taken",
        "role trainer: all its 2 places are taken",
    ]


def test_a_machine_becomes_a_node_of_the_role_that_it_names_or_whose_command_it_was_started_for():
    job = Joined(a={"command": ["first"]}, b={"command": ["second"]})
    assert job.joins(asks("a", role="b"), asks("b", command=("second",))) == ["b-0.1", "b-1.1"]
    assert job.refuses(asks("c", role="b")) == (JoinRefusal.NO_PLACE, "all its 2 places are taken")
    kind, text = job.refuses(asks("c", command=("third",)))
    assert (kind, text.partition(":")[0]) == (JoinRefusal.OTHER_COMMAND, "role a")
    with pytest.raises(UnknownRole, match='got "c"; this job has the roles "a", "b"'):
        job.choice(asks("c", role="c"))


def test_a_machine_that_joins_again_gets_its_place_in_its_role_back():
    job = Joined(a={}, b={})
    assert job.joins(asks("a", role="b"), asks("b"), asks("c")) == ["b-0.1", "a-0.1", "a-1.1"]
    assert job.joins(asks("a")) == ["b-0.1"], "a repeated request changes nothing"
    job.joins(asks("a", 2))
    assert job.view("b").nodes[0].incarnation == 2
    assert job.refuses(asks("a"))[0] is JoinRefusal.DISPLACED
    assert not job.view("a").interruption


def test_a_machine_whose_role_has_completed_is_told_so_once_and_gets_a_place_in_another_one():
    job = Joined(a={"nodes": 1, "ends_job": False}, b={"nodes": 1})
    assert job.joins(asks("a")) == ["a-0.1"]
    job.runs("a").command_ended("a").removed("a")
    assert job.refuses(asks("a"))[0] is JoinRefusal.OVER
    assert job.joins(asks("a", stay=2)) == ["b-0.1"]


def test_a_ticket_admits_as_many_machines_to_all_roles_together():
    job = Joined(a={}, b={})
    ticket = Ticket(id="x" * 8, digest="0" * 64, nodes=2, expires_at=NOW + timedelta(seconds=10))
    job.take(TicketIssued(ticket=ticket))
    first, second, third = (asks(name, ticket=ticket.id, role=role) for name, role in zip("xyz", "aba", strict=True))
    assert job.joins(first, second) == ["a-0.1", "b-0.1"]
    assert job.refuses(third)[0] is JoinRefusal.NO_PLACE
    job.now += timedelta(minutes=1)
    assert job.choice(second).refusal is None, "a machine that has joined may come back"
    assert job.refuses(third)[0] is JoinRefusal.TICKET


def test_a_job_without_places_says_once_why():
    job = Joined(a={}, b={})
    job.take(SuspendRequested())
    assert job.refuses(asks("a")) == (
        JoinRefusal.NO_PLACE,
        "the job is suspended; it has places again when it is resumed",
    )
    job.take(CancelRequested())
    assert job.refuses(asks("a"))[0] is JoinRefusal.ENDING
