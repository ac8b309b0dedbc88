"""Says what was found where no step is made, for people: what each kind of hang is, and the sign that tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.contract import Hang, HangKind
from perdure.workflows.policy.diagnosis import collectives

_NAMED = 8


class _Kind(NamedTuple):
    """What ranks that hang in one way do, and how that is known; `{names}` are these ranks."""

    verb: str
    what: str
    sign: str = ""
    """What the kernel shows of them, for the kinds of ranks that are not where the others wait."""


_COMPUTED = "{names} computed in the same calls at each look: for longer than any pause before"
_KINDS = {
    HangKind.STOPPED: _Kind("be", "stopped (SIGSTOP)"),
    HangKind.KERNEL: _Kind("sleep", "in the kernel, where no signal arrives"),
    HangKind.MISMATCH: _Kind("wait", "in another call"),
    HangKind.DATA_LOADER: _Kind(
        "wait",
        "for data loader workers that do nothing",
        "{names} and the data loader's workers used no processor between the looks",
    ),
    HangKind.ASLEEP: _Kind(
        "sleep",
        "outside of any collective",
        "{names} slept in the same calls at each look, and nothing ran: for longer than any pause before",
    ),
    HangKind.LOOP: _Kind("compute", "in the same calls without an end", _COMPUTED),
    HangKind.INTERPRETER: _Kind("wait", "while another thread of the process computes", _COMPUTED),
    HangKind.WORKS: _Kind("do", "something else"),
    HangKind.UNKNOWN: _Kind("may", "hang"),
}


def describe(hang: Hang) -> str:
    """What was found, as one clause for people."""
    at = f", in {hang.at}" if hang.at else ""
    collective = collectives.words(hang.collective) if hang.collective is not None else ""
    waits_in = ": ".join(part for part in (hang.waits_in, collective) if part)
    waiting = f"; {rank_names(hang.waiting, hang.waits)} {verb(hang.waits, 'wait')} in {waits_in}" if hang.waits else ""
    match hang.kind:
        case HangKind.DEBUGGED:
            return "a debugger is attached to a rank"
        case HangKind.ALIKE:
            return f"all ranks wait in {waits_in}"
        case HangKind.MISMATCH if not hang.ranks:
            return f"ranks wait for each other in different calls{at}{waiting}"
        case _:
            kind = _KINDS[hang.kind]
    who = rank_names(hang.ranks) + (f" of node {hang.node}" if hang.node is not None else "")
    return f"{who} {verb(len(hang.ranks), kind.verb)} {kind.what}{at}{waiting}"


def sign_of(kind: HangKind, names: str) -> str:
    """What the kernel shows of ranks that hang in this way."""
    return _KINDS[kind].sign.format(names=names)


def rank_names(ranks: Sequence[int], number: int | None = None) -> str:
    """Names ranks, the first of many."""
    total = len(ranks) if number is None else number
    shown = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {total - _NAMED} more" if total > _NAMED else ""
    return f"rank{'s' if total > 1 else ''} {shown}{more}"


def verb(number: int, verb: str) -> str:
    """The verb for one or several ranks."""
    irregular = {"be": ("is", "are"), "do": ("does", "do"), "have": ("has", "have"), "may": ("may", "may")}
    one, several = irregular.get(verb, (f"{verb}s", verb))
    return several if number > 1 else one
