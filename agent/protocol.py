"""Translates between the node's processes and the control plane: parses the bodies that the processes post, the
dataclasses of `node_api.bodies`, with pydantic, and describes worlds to them.

A report is accepted even if one of its fields is malformed: the field then has its default. Only a body that lacks a
required field, or is not JSON, is refused.
"""

from __future__ import annotations

import logging
import math
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from perdure.contract.agents import LARGEST_NUMBER
from perdure.contract.nodes import MOST_RANKS
from perdure.contract.worlds import KnownStates as DesiredStates
from perdure.contract.worlds import Member
from perdure.contract.worlds import UnsoundSteps as DesiredUnsound
from perdure.contract.worlds import World as DesiredWorld
from perdure_training.node_api.bodies import POSTS, Body, KnownStates, KnownStored, UnsoundSteps, World

logger = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
"""Maximum seconds of a long poll."""

_MOST_ITEMS = 256
"""Items of a list: exits, ports and devices of one node are fewer."""
_LONGEST_AHEAD = timedelta(days=1)
"""The largest error of a clock that is accepted: a job adds durations to reported times, which have a limit."""

_ROUNDS = 4
"""Maximum number of rounds: removing a field may make the object around it incomplete, and so on outwards."""

_ADAPTERS: dict[type[Body], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in set(POSTS.values())}

_Body = TypeVar("_Body", bound=Body)
_Location = tuple[int | str, ...]


class Malformed(Exception):
    """The content is not a valid body; the message says why."""


def read_body(kind: type[_Body], content: bytes) -> _Body:
    """Parses one body; malformed fields are left out.

    Raises:
        Malformed: if a field that has no default is missing or malformed, or the content is not JSON.
    """
    return _bounded(_read(kind, content))


def _read(kind: type[_Body], content: bytes) -> _Body:
    adapter: TypeAdapter[_Body] = _ADAPTERS[kind]
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        # Its traceback and this call would refer to each other, and keep the body until the garbage collector runs.
        problem = error.with_traceback(None)
    try:
        fields = from_json(content)
    except ValueError as error:
        raise Malformed(f"{kind.__name__}: not JSON: {error}") from None
    for _ in range(_ROUNDS):
        left_out = [_leave_out(fields, location) for location in _locations(problem)]
        if not all(left_out):
            break
        try:
            body = adapter.validate_python(fields)
        except ValidationError as error:
            problem = error.with_traceback(None)
        else:
            logger.warning("a %s has malformed fields, which are left out: %s", kind.__name__, problem)
            return body
    raise Malformed(str(problem))


def _bounded(body: _Body) -> _Body:
    """Returns a body without numbers that are too large, and with no more than the first items of lists.

    Raises:
        Malformed: if a number that has no default is too large.
    """
    changes: dict[str, Any] = {}
    for field in fields(body):
        value = getattr(body, field.name)
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            if field.default is MISSING:
                raise Malformed(f"{field.name}: the number is too large")
            changes[field.name] = field.default
        elif isinstance(value, tuple):
            items = cast("tuple[Any, ...]", value)[:_MOST_ITEMS]
            bounded = map(_bounded_item, items)
            changes[field.name] = tuple(item for item in bounded if item is not None)
    return replace(body, **changes) if changes else body


def _bounded_item(item: Any) -> Any:
    """Returns an item of a list; None for one that is left out."""
    if isinstance(item, Body):
        try:
            return _bounded(item)
        except Malformed:
            return None
    return item if abs(item) <= LARGEST_NUMBER else None


def bounded_wait(seconds: float) -> float:
    """Returns a time that a client may wait.

    Raises:
        ValueError: if it is no number: no timer of the process would be in order with it.
    """
    if math.isnan(seconds):
        raise ValueError("expected a number of seconds")
    return min(max(seconds, 0.0), LONGEST_WAIT)


def bounded_ranks(count: int) -> int:
    """Returns a number of ranks that a node can have."""
    return min(max(count, 1), MOST_RANKS)


def time_of(seconds: float | None) -> datetime | None:
    """Converts seconds since the epoch; returns None for invalid values."""
    try:
        time = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return None if time is None or time - datetime.now(UTC) > _LONGEST_AHEAD else time


def time_or_arrival(seconds: float | None) -> datetime:
    """Converts seconds since the epoch; returns the current time for invalid values."""
    return time_of(seconds) or datetime.now(UTC)


def _locations(error: ValidationError) -> list[_Location]:
    """Returns the locations to leave out, innermost and last first: for an object with a missing field, the whole
    object."""
    problems = error.errors(include_url=False, include_context=False)
    found = {one["loc"][:-1] if one["type"] == "missing" else one["loc"] for one in problems}
    return sorted(found, reverse=True)


def _leave_out(content: Any, location: _Location) -> bool:
    """Removes the value at a location; returns False if there is none, as for the whole body."""
    if not location:
        return False
    *way, last = location
    for step in way:
        content = content[step]
    if not isinstance(content, (dict, list)):
        return False
    del cast("dict[int | str, Any]", content)[last]
    return True


def world_of(world: DesiredWorld, rank: int, member: Member) -> World:
    """Returns a world as the processes of one of its members enter it."""
    return World(
        generation=world.generation,
        nodes=world.nodes,
        group_rank=member.group_rank,
        base_rank=member.base_rank,
        # In a role that serves ranks are slots, of which some may have no node.
        world_size=max(world.processes, member.base_rank + member.processes),
        store_address=world.store_address,
        store_port=world.store_port,
        store_host=world.store_rank == rank,
        stage=world.stage,
        unsound=None if world.unsound is None else _unsound_of(world.unsound),
        script_failures=world.script_failures,
        known=None if world.known is None else _known_of(world.known),
        keeps_processes=world.keeps_processes,
    )


def _known_of(states: DesiredStates) -> KnownStates:
    stored = tuple(KnownStored(folder=one.checkpoint.folder, loads=one.loads) for one in states.stored)
    return KnownStates(
        stored=stored, on_loss=states.on_loss, accepts_less=states.accepts_less, may_return=states.may_return
    )


def _unsound_of(steps: DesiredUnsound) -> UnsoundSteps:
    return UnsoundSteps(
        generation=steps.generation,
        after=steps.after,
        found_at=steps.found_at,
        earlier=tuple(map(_unsound_of, steps.earlier)),
    )
