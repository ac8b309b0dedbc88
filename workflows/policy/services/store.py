"""Carries out the calls of ranks to the key-value store of their job: pure functions over `StoreState`.

Invariants:
    - Keys and barriers of a generation end with it: the first call of a newer generation removes them, and a call of an
      older one changes nothing. No rank ever reads what an earlier attempt has left, except lasting keys.
    - Each role has generations, and keys of them, of its own; the lasting keys are those of all.
    - A call that is repeated is carried out once: each client's newest change is remembered. A change of keys that
      ended with their generation is made again if it is repeated in the next one, by a process that continues.
    - A call that is refused changes nothing.
    - A node that waits is notified after each change that one of its calls may wait for, until it has been reached.
    - The state's size is bounded, whatever ranks send.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from pydantic import ConfigDict, Field

from perdure.base.words import count
from perdure.contract.base import Message, shorten
from perdure.contract.identity import NodeCredentials
from perdure.contract.store import StoreAction, StoreAnswer, StoreCall, StoreRequest, StoreView

MOST_KEYS = 10_000
"""Keys and barriers of a generation, or lasting ones."""
MOST_BYTES = 512 * 1024
"""Bytes of all keys and values. The state, with values as base64, stays far below the server's 2 MB."""
MOST_CLIENTS = 4_096
"""Clients whose newest change is remembered; beyond it, those that have been idle for longest are forgotten. A repeat
comes within seconds."""
MOST_WATCHED = 64 * 1024
"""Characters of watched keys of all nodes. Beyond it a node is notified after each change."""
ANSWER_BYTES = 512 * 1024
"""Bytes of values in one answer; a further call is answered next time."""
_MOST_NAMED = 8
"""Missing keys or ranks that an answer names."""
_MEMBER_BYTES = 8
"""Bytes that a rank counts for which has arrived at a barrier."""
_LONGEST_NUMBER = 20
"""Characters of a number of 64 bits."""
_WATCH_ALL = ""
"""Stands for all keys; no key is empty."""


class Barrier(Message):
    """A place where ranks wait for each other, again and again."""

    size: int
    round: int = 0
    """The number of rounds that are complete."""
    members: frozenset[int] = frozenset()
    """The ranks that have arrived in the present round."""


class Namespace(Message):
    """The keys of one generation, or those that last."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    values: dict[str, bytes] = Field(default={})
    barriers: dict[str, Barrier] = Field(default={})


class Change(Message):
    """The newest change that a client has made."""

    sequence: int
    answer: StoreAnswer
    role: str = ""
    """The role of the client; empty where that was the only one."""
    lasting: bool = False
    """Whether it has changed lasting keys."""


class Watch(Message):
    """A node that waits for keys."""

    node: NodeCredentials
    keys: frozenset[str] = frozenset()
    """Keys of the generation; those that last, and barriers, have a prefix. `_WATCH_ALL` for all."""
    changes: int = 0
    """The number of changes that the node is to be notified of; more than `notified`: it has not been reached yet."""
    notified: int = 0


class RoleKeys(Message):
    """The keys of a role that has not made the newest call."""

    generation: int
    own: Namespace


class StoreState(Message):
    """Everything that a `Store` workflow carries into its next run."""

    role: str = ""
    """The role that has made the newest call; empty before the first one, and of an earlier release."""
    generation: int = 0
    """The generation of this role."""
    own: Namespace = Namespace()
    """The keys and barriers of the generation."""
    others: dict[str, RoleKeys] = Field(default={})
    """The keys of the other roles."""
    lasting: Namespace = Namespace()
    """The lasting keys, which belong to the job."""
    clients: dict[str, Change] = Field(default={})
    """The least recent first."""
    watches: dict[str, Watch] = Field(default={})
    """Keyed by the node's path."""
    bytes: int = 0
    """The size of all keys and values."""


class _Refused(Exception):
    """The call cannot be carried out; the message is for its user."""


def answer_calls(state: StoreState, request: StoreRequest) -> tuple[StoreState, tuple[StoreAnswer, ...]]:
    """Carries out the calls of a node's ranks, in their order."""
    state = _turn_to(state, request.sender.role)
    if request.generation < state.generation:
        return state, tuple(StoreAnswer(superseded=True) for _ in request.calls)
    if request.generation > state.generation:
        state = _begin_generation(state, request.generation)
    answers: list[StoreAnswer] = []
    watched: set[str] = set()
    room = ANSWER_BYTES
    for call in request.calls:
        if room <= 0:
            answers.append(StoreAnswer(later=True))
            continue
        state, answer = _answer(state, call)
        if answer.waits:
            watched |= {_name(call, key) for key in call.keys}
        room -= sum(map(len, answer.values)) + sum(map(len, answer.keys))
        answers.append(answer)
    return _watch(state, request.sender, watched), tuple(answers)


def record_notification(state: StoreState, path: str, changes: int) -> StoreState:
    """Records how many changes a node has been notified of; it sends its calls again."""
    watch = state.watches.get(path)
    if watch is None:
        return state
    if watch.changes <= changes and not watch.keys:
        return state.replace(watches={p: w for p, w in state.watches.items() if p != path})
    reached = watch.replace(notified=max(watch.notified, changes))
    return state.replace(watches={**state.watches, path: reached})


def nodes_to_notify(state: StoreState) -> Mapping[str, Watch]:
    """Returns the nodes that have to learn of a change, by their paths."""
    return {path: watch for path, watch in state.watches.items() if watch.changes > watch.notified}


def view(state: StoreState) -> StoreView:
    """What users see of a store."""
    roles = (RoleKeys(generation=state.generation, own=state.own), *state.others.values())
    return StoreView(
        generation=max(role.generation for role in roles),
        keys=sum(len(role.own.values) for role in roles),
        lasting_keys=len(state.lasting.values),
        bytes=state.bytes,
        waiting_nodes=sum(bool(watch.keys) for watch in state.watches.values()),
    )


def _turn_to(state: StoreState, role: str) -> StoreState:
    """Returns the state with the keys of this role in place of those of the role before it."""
    if state.role in ("", role):
        return state.replace(role=role)
    others = {**state.others, state.role: RoleKeys(generation=state.generation, own=state.own)}
    turned = others.pop(role, RoleKeys(generation=0, own=Namespace()))
    return state.replace(role=role, generation=turned.generation, own=turned.own, others=others)


def _begin_generation(state: StoreState, generation: int) -> StoreState:
    return state.replace(
        generation=generation,
        own=Namespace(),
        # A change of keys that are gone is made again where it is repeated. Only clients of other roles, and those that
        # continue in the new generation, can repeat others.
        clients={name: one for name, one in state.clients.items() if _is_kept(state, one)},
        watches={path: watch for path, watch in state.watches.items() if watch.node.role != state.role},
        bytes=state.bytes - _weight(state.own),
    )


def _is_kept(state: StoreState, change: Change) -> bool:
    """Whether a change outlives the generation of the role that called last."""
    return change.lasting or (bool(state.others) and change.role != state.role)


def _answer(state: StoreState, call: StoreCall) -> tuple[StoreState, StoreAnswer]:
    known = state.clients.get(call.client)
    if known is not None and call.sequence <= known.sequence:
        return state, _repeat(known, call)
    try:
        changed, answer = _carry_out(state, call)
    except _Refused as error:
        return state, StoreAnswer(refused=str(error))
    if changed is None:
        return state, answer
    return _remember(_report_change(changed, call), call, answer), answer


def _repeat(known: Change, call: StoreCall) -> StoreAnswer:
    if call.sequence < known.sequence:
        return StoreAnswer(superseded=True)
    # A change that COMPARE_SET has made answers with the value that the call itself holds.
    return known.answer.replace(values=call.values[1:2])


def _carry_out(state: StoreState, call: StoreCall) -> tuple[StoreState | None, StoreAnswer]:
    """Returns the new state, None where nothing changes, and the answer.

    Raises:
        _Refused: if the call is not possible.
    """
    space = state.lasting if call.lasting else state.own
    values = space.values
    match call.action:
        case StoreAction.SET:
            return _with_values(state, call, dict(zip(call.keys, call.values, strict=True))), StoreAnswer()
        case StoreAction.GET | StoreAction.WAIT:
            if missing := [key for key in call.keys if key not in values]:
                return None, StoreAnswer(waits=True, missing=_abridge(missing))
            found = tuple(values[key] for key in call.keys) if call.action is StoreAction.GET else ()
            return None, StoreAnswer(values=found)
        case StoreAction.CHECK:
            return None, StoreAnswer(number=all(key in values for key in call.keys))
        case StoreAction.COUNT:
            return None, StoreAnswer(number=len(values))
        case StoreAction.LIST:
            return None, StoreAnswer(keys=tuple(values))
        case StoreAction.ADD:
            total = _number(call.keys[0], values.get(call.keys[0], b"0")) + call.amount
            if not -(2**63) <= total < 2**63:
                raise _Refused(f"key {call.keys[0]!r}: {total} does not fit into 64 bits")
            return _with_values(state, call, {call.keys[0]: b"%d" % total}), StoreAnswer(number=total)
        case StoreAction.APPEND:
            (key,), (value,) = call.keys, call.values
            return _with_values(state, call, {key: values.get(key, b"") + value}), StoreAnswer()
        case StoreAction.COMPARE_SET:
            return _compare_set(state, call, values)
        case StoreAction.DELETE:
            (key,) = call.keys
            if key not in values:
                return None, StoreAnswer(number=0)
            return _with_values(state, call, {}, deleted=key), StoreAnswer(number=1)
        case StoreAction.JOIN:
            return _join(state, call, space)
        case StoreAction.AWAIT_JOINS:
            barrier = space.barriers.get(call.keys[0])
            if barrier is not None and barrier.round > call.amount:
                return None, StoreAnswer()
            return None, StoreAnswer(waits=True, missing=_absent(barrier))
        case StoreAction.UNKNOWN:
            raise _Refused("the worker's release does not know this call")


def _compare_set(
    state: StoreState, call: StoreCall, values: Mapping[str, bytes]
) -> tuple[StoreState | None, StoreAnswer]:
    (key,), (expected, desired) = call.keys, call.values
    present = values.get(key)
    if present == expected or (present is None and not expected):
        return _with_values(state, call, {key: desired}), StoreAnswer(values=(desired,))
    # As torch's stores do: an unset key answers with what was expected.
    return None, StoreAnswer(values=(expected if present is None else present,))


def _join(state: StoreState, call: StoreCall, space: Namespace) -> tuple[StoreState, StoreAnswer]:
    name = call.keys[0]
    barrier = space.barriers.get(name)
    if barrier is None:
        if len(space.barriers) >= MOST_KEYS:
            raise _Refused(f"barrier {name!r}: the store has {MOST_KEYS} barriers already, which is the most")
        barrier = Barrier(size=call.size)
    if barrier.members and barrier.size != call.size:
        raise _Refused(
            f"barrier {name!r}: rank {call.member} waits for {count(call.size, 'rank')}, and others "
            f"wait for {barrier.size}"
        )
    round_joined = barrier.round
    members = barrier.members | {call.member}
    complete = len(members) >= call.size
    barrier = Barrier(size=call.size, round=round_joined + complete, members=frozenset() if complete else members)
    # Only this barrier has changed: a store may have ten thousand of them and of keys, and a request hundreds of calls.
    weight = state.bytes + _weight_of_barrier(name, barrier) - _weight_of_barrier(name, space.barriers.get(name))
    if weight > state.bytes:
        weight = _bounded(weight, call)
    state, changed = state.replace(bytes=weight), space.replace(barriers={**space.barriers, name: barrier})
    return _with_space(state, call, changed), StoreAnswer(number=round_joined, complete=complete)


def _absent(barrier: Barrier | None) -> tuple[str, ...]:
    if barrier is None:
        return ()
    absent = (str(rank) for rank in range(barrier.size) if rank not in barrier.members)
    return tuple(islice(absent, _MOST_NAMED))


def _with_values(state: StoreState, call: StoreCall, new: Mapping[str, bytes], *, deleted: str = "") -> StoreState:
    """Returns the state with values set and a key deleted.

    Raises:
        _Refused: if there would be too many keys or bytes.
    """
    space = state.lasting if call.lasting else state.own
    values = {**space.values, **new}
    removed = values.pop(deleted, None)
    if len(values) > MOST_KEYS and len(values) > len(space.values):
        raise _Refused(
            f"key {shorten(call.keys[0], 100)!r}: the store would have {len(values)} keys, and its limit is {MOST_KEYS}"
        )
    before = {key: space.values[key] for key in new if key in space.values}
    if removed is not None:
        before[deleted] = removed
    weight = state.bytes + _weight_of_values(new) - _weight_of_values(before)
    if weight > state.bytes:
        weight = _bounded(weight, call)
    changed = space.replace(values=values)
    return _with_space(state.replace(bytes=weight), call, changed)


def _with_space(state: StoreState, call: StoreCall, space: Namespace) -> StoreState:
    return state.replace(lasting=space) if call.lasting else state.replace(own=space)


def _bounded(weight: int, call: StoreCall) -> int:
    if weight > MOST_BYTES:
        raise _Refused(
            f"key {shorten(call.keys[0], 100)!r}: the store's keys and values would have {weight} bytes, and its limit "
            f"is {MOST_BYTES}; it is for coordination, not for data"
        )
    return weight


def _weight(space: Namespace) -> int:
    barriers = sum(_weight_of_barrier(name, one) for name, one in space.barriers.items())
    return _weight_of_values(space.values) + barriers


def _weight_of_barrier(name: str, barrier: Barrier | None) -> int:
    return 0 if barrier is None else len(name.encode()) + _MEMBER_BYTES * len(barrier.members)


def _weight_of_values(values: Mapping[str, bytes]) -> int:
    return sum(len(key.encode()) + len(value) for key, value in values.items())


def _number(key: str, value: bytes) -> int:
    try:
        if len(value) > _LONGEST_NUMBER:
            raise ValueError
        return int(value)
    except ValueError:
        raise _Refused(f"key {key!r} has a value that is not a whole number, so nothing can be added to it") from None


def _abridge(keys: list[str]) -> tuple[str, ...]:
    return tuple(shorten(key, 100) for key in keys[:_MOST_NAMED])


def _name(call: StoreCall, key: str) -> str:
    kind = "b" if call.action in (StoreAction.JOIN, StoreAction.AWAIT_JOINS) else "k"
    return f"{kind}{'l' if call.lasting else 'o'}{key}"


def _report_change(state: StoreState, call: StoreCall) -> StoreState:
    """Marks the nodes that wait for one of the call's keys."""
    if call.action is StoreAction.DELETE:
        return state
    changed = {_name(call, key) for key in call.keys} | {_WATCH_ALL}
    hit = {
        path: watch.replace(changes=watch.changes + 1, keys=frozenset())
        for path, watch in state.watches.items()
        if watch.keys & changed
    }
    return state.replace(watches={**state.watches, **hit}) if hit else state


def _watch(state: StoreState, node: NodeCredentials, keys: set[str]) -> StoreState:
    if not keys:
        return state
    watch = state.watches.get(node.path, Watch(node=node))
    others = sum(len(key) for path, one in state.watches.items() if path != node.path for key in one.keys)
    wanted = watch.keys | keys
    if others + sum(map(len, wanted)) > MOST_WATCHED:
        wanted = frozenset({_WATCH_ALL})
    changed = watch.replace(node=node, keys=wanted)
    return state.replace(watches={**state.watches, node.path: changed})


def _remember(state: StoreState, call: StoreCall, answer: StoreAnswer) -> StoreState:
    clients = dict(state.clients)
    clients.pop(call.client, None)
    clients[call.client] = Change(
        sequence=call.sequence,
        answer=answer.replace(values=()),
        role=state.role if state.others else "",
        lasting=call.lasting,
    )
    if len(clients) > MOST_CLIENTS:
        del clients[next(iter(clients))]
    return state.replace(clients=clients)
