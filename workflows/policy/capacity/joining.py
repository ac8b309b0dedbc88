"""Assigns places in a job whose nodes join by themselves (`backend: joined`).

A place is a slot and the incarnation that it waits for; the machine that takes it receives that incarnation's token. A
machine is known by its node ID. If a machine joins again under the same ID, its predecessor is gone: this is evidence
like a backend's, and the machine gets its place back at once, whatever state the place was in.

A machine that joins through the gateway is known by its ticket and its node ID together: no ticket gives power over the
places of another one, nor of machines that joined without any. The session of such a machine is a digest of its token,
which the gateway verifies.

In a job of several roles a machine that names none gets a place of the first role that lacks nodes, in the order in
which roles start. A role that waits for others has no places yet: its machines would ask for them all the while.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from perdure.base.words import count
from perdure.contract import (
    JoinedMachine,
    JoinRefusal,
    JoinRequest,
    MachinesView,
    NodePhase,
    Ticket,
)
from perdure.contract.transitions import NodeLost
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.job import JobSpec
from perdure.spec.role_relations import order_of
from perdure.workflows.policy.facts.apply import on_transition
from perdure.workflows.policy.facts.events import Event, TicketIssued, TicketRevoked
from perdure.workflows.policy.roles import starts
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.state.node import NodeState, SlotOwner
from perdure.workflows.policy.state.role import RoleState
from perdure.workflows.policy.world import stages
from perdure_training.secret_texts import command_without_secrets

_OPEN_PHASES = (NodePhase.REQUESTED, NodePhase.PENDING, NodePhase.CREATED)
"""Phases in which no agent has reported for the node yet."""

_REMEMBERED_SESSIONS = 8

_FIRST_TURN = timedelta(seconds=0.2)
"""The time until a place that is being prepared is requested again: its group and its backend are quick."""
_TURN = timedelta(seconds=0.1)
"""The time between the requests of two machines that wait for their places."""
_LAST_TURN = timedelta(seconds=30)
"""The longest time until a machine requests its place again."""
_MORE_SELDOM = 10
"""The part of the time waited for a place after which it is requested again: one may open after a pause of minutes, and
each request that is granted is some events of the job's history."""

MOST_TICKETS = 64
"""Tickets of one job: its state carries them."""


class Refusal(NamedTuple):
    """The reason why the job gives no place."""

    kind: JoinRefusal
    text: str


class Choice(NamedTuple):
    """The role whose nodes a request is about."""

    role: str
    refusal: Refusal | None
    """Why the request cannot be granted; None where it can."""


def choose_role(state: JobState, request: JoinRequest, job: JobSpec, now: datetime) -> Choice:
    """Chooses the role that the request names, that has or had the machine last, or that lacks nodes.

    Raises:
        UnknownRole: if the request names a role that the job does not have.
    """
    if request.role is not None or len(state.roles) == 1:
        name = state.role_named(request.role)
        return Choice(name, _refusal_of(state, name, request, job, now))
    home = _last_role_of(state, request)
    refused: dict[str, Refusal] = {}
    for name in sorted(order_of(job.roles), key=lambda name: name != home):
        found = _refusal_of(state, name, request, job, now)
        if found is None or (name == home and found.kind is not JoinRefusal.NO_PLACE):
            return Choice(name, found)
        refused[name] = found
    return Choice(next(iter(refused)), _refusal_of_all(refused))


def _refusal_of(state: JobState, name: str, request: JoinRequest, job: JobSpec, now: datetime) -> Refusal | None:
    others = [role for role in state.roles.values() if role.role != name]
    view = state.view(name)
    refused = refusal(view, request, job, now, others=others)
    if view.rests or (refused is not None and refused.kind is not JoinRefusal.NO_PLACE):
        return refused
    if ended := view.completed or view.failed:
        return Refusal(JoinRefusal.NO_PLACE, f"it needs no nodes any more: {ended}")
    waits = starts.why_waiting(view, state.roles, job)
    return Refusal(JoinRefusal.NO_PLACE, f"it {waits}") if waits else refused


def _last_role_of(state: JobState, request: JoinRequest) -> str | None:
    """The role in which the machine was given a place last."""
    given = (
        (owner.since, role.role)
        for role in state.roles.values()
        for owner in role.slot_owners.values()
        if _is_same_machine(owner, request)
    )
    return max(given, default=(None, None))[1]


def _refusal_of_all(refused: Mapping[str, Refusal]) -> Refusal:
    """Why no role has a place; waiting helps if it does in one of them."""
    first = next(iter(refused.values()))
    if len({one.text for one in refused.values()}) == 1:
        return first
    kinds = {one.kind for one in refused.values()}
    kind = JoinRefusal.NO_PLACE if JoinRefusal.NO_PLACE in kinds else first.kind
    return Refusal(kind, "; ".join(f"role {name}: {one.text}" for name, one in refused.items()))


def refusal(
    state: RoleInJob, request: JoinRequest, job: JobSpec, now: datetime, *, others: Sequence[RoleState] = ()
) -> Refusal | None:
    """Why the request cannot be granted; None where it can.

    Args:
        state: The role whose nodes the request is about.
        request: What the machine asks for.
        job: The specification.
        now: The time.
        others: The job's other roles, where the same ticket admits machines, too.
    """
    if CAPABILITIES[job.backend].creates_nodes:
        text = f"its backend is {job.backend}, which makes the nodes itself; only jobs with backend: joined are joined"
        return Refusal(JoinRefusal.OTHER_BACKEND, text)
    if state.outcome is not None:
        return Refusal(JoinRefusal.ENDING, f"the job is ending: {state.outcome.reason}")
    command = job.roles[state.role].command
    if request.command is not None and list(request.command) != command:
        jobs, nodes = (shlex.join(command_without_secrets(words)) for words in (command, request.command))
        text = f"it runs `{jobs}`, and this node was started to run `{nodes}`"
        return Refusal(JoinRefusal.OTHER_COMMAND, text)
    if request.ticket and (refused := _ticket_refusal((state, *others), state.tickets, request, now)):
        return refused
    for rank in _places(state):
        if (newer := _newer_than(state, rank, request)) is not None:
            text = f"a newer process on {newer.host} has joined as {newer.node_id} and is node {rank}"
            return Refusal(JoinRefusal.DISPLACED, text)
        if (known := state.slot_owners.get(rank)) and _is_of(known, request) and _owner_of(state, rank) is None:
            return Refusal(
                JoinRefusal.OVER, f"its earlier place, incarnation {known.incarnation} of node {rank}, is over"
            )
    if state.rests:
        what = "job" if state.suspended else "role"
        return Refusal(JoinRefusal.NO_PLACE, f"the {what} is suspended; it has places again when it is resumed")
    if _choose(state, request, job, now) is None:
        text = "its only place is taken" if state.nodes_max == 1 else f"all its {state.nodes_max} places are taken"
        return Refusal(JoinRefusal.NO_PLACE, text)
    return None


def accept_machine(state: RoleInJob, event: Event, job: JobSpec, now: datetime) -> RoleInJob:
    """Assigns a place to a request that is not refused; a repeated request changes nothing."""
    if not isinstance(event, JoinRequest) or refusal(state, event, job, now) is not None:
        return state
    request = event
    rank = _choose(state, request, job, now)
    if rank is None:
        return state
    node, owner = state.nodes.get(rank), _owner_of(state, rank)
    if owner is not None and _is_of(owner, request):
        return state
    if node is not None and node.alive:
        if owner is None:
            node = node.replace(reason=f"{request.host or request.node_id} is joining")
            state = state.with_node(node)
        else:
            state = _record_loss(state, node, owner, request, now)
    known = state.slot_owners.get(rank)
    return state.replace(
        slot_owners={
            **state.slot_owners,
            rank: SlotOwner(
                node_id=request.node_id,
                session=request.session,
                stay=request.stay,
                host=request.host,
                started_at=request.started_at,
                boot=request.boot,
                uptime=request.uptime,
                since=now,
                incarnation=_incarnation(state.nodes.get(rank)),
                displaced=_displaced_sessions(known, request),
                ticket=request.ticket,
            ),
        }
    )


def apply_ticket(state: RoleInJob, event: Event, now: datetime) -> RoleInJob:
    """Adds a ticket, or revokes one: its machines lose their places."""
    match event:
        case TicketIssued(ticket=ticket):
            others = tuple(one for one in state.tickets if one.id != ticket.id)
            return state.replace(tickets=(*others, ticket))
        case TicketRevoked(id=revoked):
            state = state.replace(tickets=tuple(one for one in state.tickets if one.id != revoked))
            for rank in _places(state):
                owner, node = _owner_of(state, rank), state.nodes.get(rank)
                if owner is None or owner.ticket != revoked:
                    continue
                if node is not None and node.alive:
                    state = _lose(state, node, f"the ticket of {owner.node_id} was revoked", now)
                state = state.replace(slot_owners={key: one for key, one in state.slot_owners.items() if key != rank})
            return state
        case _:
            return state


def machines_view(state: JobState) -> MachinesView:
    """What the gateway has to know: the tickets, and which machine has which incarnation."""
    held = ((role, rank, _owner_of(role, rank)) for role in state.roles.values() for rank in _places(role))
    return MachinesView(
        uid=state.uid,
        tickets=state.tickets,
        machines=tuple(
            JoinedMachine(role=role.role, rank=rank, incarnation=owner.incarnation, session=owner.session)
            for role, rank, owner in held
            if owner is not None
        ),
    )


def place_of(state: RoleInJob, request: JoinRequest) -> NodeState | None:
    """The node that the request was given; None while there is none, or while its group does not know the node yet."""
    for rank in _places(state):
        owner, node = _owner_of(state, rank), state.nodes.get(rank)
        if owner is not None and _is_of(owner, request):
            there = node is not None and node.alive and node.incarnation == owner.incarnation
            return node if node is not None and there and node.phase is not NodePhase.REQUESTED else None
    return None


def describe_wait(state: RoleInJob, request: JoinRequest) -> str:
    """Why `place_of` has no node yet for a request that was granted."""
    for rank in _places(state):
        owner, node = _owner_of(state, rank), state.nodes.get(rank)
        if owner is not None and _is_of(owner, request) and node is not None and node.not_before is not None:
            return f"node {rank} was lost several times before it was ready; its place opens after a pause"
    return "its place is being prepared"


def next_request(state: RoleInJob, request: JoinRequest, now: datetime) -> timedelta:
    """The time until a machine whose request was granted, and that has no node yet, requests it again.

    One machine after the other has its turn, so that all together send no more requests than leave the job time to
    prepare their places: the server takes ten at a time. Those that have waited for longer come less often.
    """
    before = 0
    for rank in _places(state):
        owner, node = _owner_of(state, rank), state.nodes.get(rank)
        if owner is None:
            continue
        if _is_of(owner, request):
            opens = node.not_before - now if node is not None and node.not_before is not None else timedelta()
            waited = (now - owner.since) / _MORE_SELDOM
            return min(max(_FIRST_TURN + before * _TURN, waited, opens), _LAST_TURN)
        before += node is None or node.phase is NodePhase.REQUESTED
    return _FIRST_TURN


def _places(role: RoleState) -> range:
    return range(role.nodes_max)


def _owner_of(role: RoleState, rank: int) -> SlotOwner | None:
    """The machine that holds the place, or will hold it once its next incarnation exists."""
    owner, node = role.slot_owners.get(rank), role.nodes.get(rank)
    if owner is None or node is None or owner.incarnation > node.incarnation:
        return owner
    return owner if node.alive and owner.incarnation == node.incarnation else None


def _is_of(owner: SlotOwner, request: JoinRequest) -> bool:
    return (owner.session, owner.stay) == (request.session, request.stay) and _is_same_machine(owner, request)


def _is_same_machine(owner: SlotOwner, request: JoinRequest) -> bool:
    return (owner.ticket, owner.node_id) == (request.ticket, request.node_id)


def _ticket_refusal(
    roles: Sequence[RoleState], tickets: Sequence[Ticket], request: JoinRequest, now: datetime
) -> Refusal | None:
    """Why the request's ticket gives no place; None where it does."""
    ticket = next((one for one in tickets if one.id == request.ticket), None)
    if ticket is None:
        return Refusal(JoinRefusal.TICKET, f"the ticket {request.ticket} was revoked")
    known = [owner for role in roles for owner in role.slot_owners.values() if owner.ticket == ticket.id]
    if now >= ticket.expires_at and request.session not in {owner.session for owner in known}:
        return Refusal(JoinRefusal.TICKET, f"the ticket {ticket.id} expired at {ticket.expires_at:%Y-%m-%d %H:%M} UTC")
    return None if _places_of_others(roles, ticket, request) < ticket.nodes else _ticket_is_used_up(ticket)


def _places_of_others(roles: Sequence[RoleState], ticket: Ticket, request: JoinRequest) -> int:
    """The number of places that other machines with the same ticket have."""
    owners = (_owner_of(role, rank) for role in roles for rank in _places(role))
    return sum(
        owner is not None and owner.ticket == ticket.id and not _is_same_machine(owner, request) for owner in owners
    )


def _ticket_is_used_up(ticket: Ticket) -> Refusal:
    places = count(ticket.nodes, "node")
    text = f"the ticket {ticket.id} is for {places}, and other machines with it have taken as many places"
    return Refusal(JoinRefusal.NO_PLACE, text)


def _incarnation(node: NodeState | None) -> int:
    """The incarnation that a machine gets if it takes the place now."""
    if node is None:
        return 1
    return node.incarnation if node.alive else node.incarnation + 1


def _newer_than(state: RoleInJob, rank: int, request: JoinRequest) -> SlotOwner | None:
    """The owner that has replaced the requesting session."""
    known = state.slot_owners.get(rank)
    if known is None or not _is_same_machine(known, request):
        return None
    if request.session in known.displaced or (known.session == request.session and request.stay < known.stay):
        return known
    older = known.session != request.session and known.host == request.host and _began_before(request, known)
    return known if older and _owner_of(state, rank) is not None else None


def _began_before(request: JoinRequest, known: SlotOwner) -> bool:
    """Whether the requesting session is known to have begun first. Between different boots nothing tells: a clock may
    have been set back, and different machines may have one name."""
    if request.boot and known.boot:
        return request.boot == known.boot and request.uptime < known.uptime
    return request.started_at < known.started_at


def _choose(state: RoleInJob, request: JoinRequest, job: JobSpec, now: datetime) -> int | None:
    """Chooses a place: the one that the request has, had under its node ID, prefers, or the first free one."""
    own = [
        rank for rank in _places(state) if (known := state.slot_owners.get(rank)) and _is_same_machine(known, request)
    ]
    for rank in own:
        if _owner_of(state, rank) is not None:
            return rank
    for rank in own:
        if _is_free(state, rank, job, now) or _comes_back(state, rank):
            return rank
    free = [rank for rank in _places(state) if _is_free(state, rank, job, now)]
    return request.place if request.place in free else next(iter(free), None)


def _is_free(state: RoleInJob, rank: int, job: JobSpec, now: datetime) -> bool:
    owner, node = _owner_of(state, rank), state.nodes.get(rank)
    if node is None or not node.alive:
        return node is None and owner is None
    if node.phase not in _OPEN_PHASES:
        return False
    patience = job.timing.rendezvous.enter_timeout
    # A machine that took the place and never reported has probably died before it could.
    return owner is None or bool(patience and now - max(owner.since, node.since) >= patience)


def _comes_back(state: RoleInJob, rank: int) -> bool:
    """Whether the place will open again by itself: its next incarnation follows."""
    node = state.nodes.get(rank)
    if node is None or node.alive:
        return False
    return not stages.is_done(state, node)


def _record_loss(state: RoleInJob, node: NodeState, owner: SlotOwner, request: JoinRequest, now: datetime) -> RoleInJob:
    """Records that the predecessor is gone."""
    if _is_same_machine(owner, request):
        detail = f"{request.node_id} has joined again{f' from {request.host}' if request.host else ''}"
    else:
        detail = f"{owner.node_id} took the place and its agent never reported"
    return _lose(state, node, detail, now)


def _lose(state: RoleInJob, node: NodeState, detail: str, now: datetime) -> RoleInJob:
    """Records that a node is gone, as if a backend had reported it."""
    lost = NodeLost(rank=node.rank, incarnation=node.incarnation, time=now, detail=detail)
    return on_transition(state, lost, now)


def _displaced_sessions(known: SlotOwner | None, request: JoinRequest) -> tuple[str, ...]:
    if known is None or not _is_same_machine(known, request):
        return ()
    sessions = known.displaced if known.session == request.session else (*known.displaced, known.session)
    return sessions[-_REMEMBERED_SESSIONS:]
