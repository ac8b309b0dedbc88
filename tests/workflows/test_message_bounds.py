"""Tests that no message is larger than the server takes, whatever a node's processes put into it."""

from __future__ import annotations

import math
import types
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel, ValidationError

from perdure.agent.stacks import stacks_of
from perdure.contract import Failure, FailureKind, GroupTransitions, NodeCredentials, NodePhase, NodeView, RankExit
from perdure.contract.routes import Destination, routed_to
from perdure.contract.transitions import KINDS, NodeChecked
from perdure.workflows.delivery import Delivery
from perdure_training.node_api.bodies import RankStacks, StacksReport
from tests.workflows.batches import batch, run

MessageT = TypeVar("MessageT", bound=BaseModel)
LARGEST = 1_500_000
"""Bytes; the server takes 2 MiB of arguments, and encryption adds a little."""
LONG = "\N{PILE OF POO}" * 5_000
"""Four bytes a character."""
ITEMS = 300
"""More than any list of a message may have."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODE = NodeCredentials(uid="01234567", role="r" * 63, rank=9_999, incarnation=9_999, token="t" * 64)


def filled(kind: Any) -> Any:
    """The largest value that a sender may try to put into a field of this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is NodeCredentials:
        return NODE.model_dump()
    if origin is Annotated:
        return filled(arguments[0])
    if origin in (Union, types.UnionType):
        return filled(next(one for one in arguments if one is not type(None)))
    if origin is Literal:
        return arguments[0]
    if origin is tuple:
        return [filled(arguments[0])] * ITEMS if arguments[-1] is Ellipsis else [filled(one) for one in arguments]
    if origin is dict:
        return {number if arguments[0] is int else f"{number:0200}": filled(arguments[1]) for number in range(ITEMS)}
    assert isinstance(kind, type), kind
    kind = cast("type[Any]", kind)
    if issubclass(kind, BaseModel):
        return {field.alias or name: filled(field.annotation) for name, field in kind.model_fields.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {field.name: filled(hints[field.name]) for field in fields_of(kind)}
    if issubclass(kind, tuple):
        return [filled(one) for one in get_type_hints(kind, include_extras=True).values()]
    if issubclass(kind, Enum):  # pyrefly: ignore[bad-argument-type]
        return next(one.value for one in kind)  # pyrefly: ignore[not-iterable]
    values: dict[Any, Any] = {
        bool: True,
        str: LONG,
        int: 2**31,
        float: 0.1234567890123456,
        datetime: NOW,
        timedelta: timedelta(days=1),
    }
    return values[kind]


def accepted(kind: type[MessageT]) -> MessageT:
    """The largest message of a kind that is valid: what is refused is made smaller until it is not."""
    data = filled(kind)
    while True:
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            for one in error.errors():
                shrink(data, one["loc"], one["type"])


def shrink(data: Any, place: tuple[int | str, ...], problem: str) -> None:
    parent = data
    for step in place[:-1]:
        # A place also names the member of a union that was tried.
        parent = parent[step] if isinstance(parent, list) or step in parent else parent
    last = place[-1]
    value = parent[last]
    match value:
        case str() if "pattern" in problem:
            parent[last] = "a" if value == "a" * 64 else "a" * 64
        case str() | list():
            parent[last] = value[: len(value) // 2]
        case dict():
            parent[last] = dict(list(value.items())[: len(value) // 2])
        case _:
            parent[last] = 1


SIGNALS = [(name, kind) for to in (Destination.JOB, Destination.GROUP) for name, kind in routed_to(to).items()]


@pytest.mark.parametrize(("name", "kind"), SIGNALS)
def test_what_a_node_puts_into_a_message_is_bounded(name: str, kind: type[BaseModel]):
    assert len(accepted(kind).model_dump_json().encode()) < LARGEST, name


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_a_transition_leaves_room_for_a_table(name: str, kind: type[BaseModel]):
    assert len(accepted(kind).model_dump_json().encode()) < LARGEST / 2, name


def with_numbers(data: Any, number: float) -> Any:
    """The data with this number in place of each that need not be whole."""
    match data:
        case dict():
            return {key: with_numbers(value, number) for key, value in data.items()}
        case list():
            return [with_numbers(value, number) for value in data]
        case float():
            return number
        case _:
            return data


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [*(kind for _, kind in SIGNALS), *KINDS.values()])
def test_a_message_with_a_number_that_is_not_finite_is_refused_or_can_be_read_wherever_it_is_passed_on(
    kind: type[BaseModel], number: float
):
    data = with_numbers(accepted(kind).model_dump(mode="json", by_alias=True), number)
    try:
        message = kind.model_validate(data)
    except ValidationError:
        return
    kind.model_validate_json(message.model_dump_json())


def test_all_that_a_large_group_sends_at_once_is_bounded():
    """A group whose job adopts it while transitions wait: the table of all nodes, whose texts are long."""
    largest = accepted(NodeChecked)
    view = NodeView(
        rank=0,
        incarnation=1,
        token="t" * 64,
        phase=NodePhase.LOST,
        since=NOW,
        reason=LONG,
        host=LONG[:250],
        log_path=LONG[:1_000],
        avoids=(LONG[:250],) * 200,
    )
    group, told = batch(), list[GroupTransitions]()
    for rank in range(8):
        group.add(largest.model_copy(update={"rank": rank}))
    group.report_adoption(tuple(view.replace(rank=rank) for rank in range(128)))
    group.report_end()
    run(group, lambda message: told.append(message) or Delivery.TAKEN)
    assert max(len(message.model_dump_json().encode()) for message in told) < LARGEST
    assert [one.rank for message in told for one in message.transitions] == list(range(8))
    [table] = [message.adopted for message in told if message.adopted is not None]
    assert [(node.rank, node.token, node.phase) for node in table] == [
        (rank, "t" * 64, NodePhase.LOST) for rank in range(128)
    ]


def test_the_first_of_many_errors_are_kept_whole_and_none_is_lost():
    exits = tuple(
        RankExit(local_rank=rank, error=f"{rank} " + "e" * 3_000, traceback="t" * 2_000) for rank in range(256)
    )
    kept = Failure(sender=NODE, sequence=1, time=NOW, generation=1, kind=FailureKind.RANKS, ranks=exits).ranks
    assert kept[:50] == exits[:50]
    assert [one.error and one.error.split()[0] for one in kept] == [str(rank) for rank in range(256)]


@pytest.mark.parametrize("frames", [10, 1_000])
def test_the_stacks_of_a_node_are_bounded_and_begin_with_the_innermost_call(frames: int):
    text = "\n".join(f'  File "/home/{LONG[:100]}/train.py", line {line} in step' for line in range(1, frames + 1))
    ranks = tuple(RankStacks(global_rank=rank, pid=1, text=text) for rank in range(64))
    stacks = stacks_of(0, StacksReport(request=1, ranks=ranks))
    assert len(stacks.model_dump_json().encode()) < LARGEST
    assert all(rank.threads[0].frames[0].line == 1 for rank in stacks.ranks)
