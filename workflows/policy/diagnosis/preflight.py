"""Judges what checks of machines have measured: a figure is low beside those of the job's other machines or beside the
machine's own earlier ones, or beyond a fixed bound.

A bound says that something is broken and not that it could be faster: machines differ, and other work slows some of
them for a moment. So a node has failed only where a second run says the same, and what all nodes have in common is no
fault of one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perdure.contract import Check, NodeChecks

_SHARES = {"processor": 0.5, "memory": 0.4, "disk": 0.1, "matmul": 0.7}
"""The least share of the median of other machines, or of the machine's own earlier figures, with which a figure passes.
Disks differ most from one moment to the next, and devices that compute nothing else least."""

_MOST_COMPARED = 32
"""Machines with which one is compared: a median needs no more."""


@dataclass(frozen=True)
class _Bound:
    """A bound that does not depend on other machines."""

    worst: float
    most: bool
    """It is the largest value that passes, whatever its sign; otherwise the least one."""
    source: str


_BOUNDS = {
    "room": _Bound(64.0, most=False, source="the log of a node takes so many MB"),
    "clock": _Bound(5.0, most=True, source="reports that are older count as late"),
}


def judge(nodes: Iterable[NodeChecks]) -> tuple[NodeChecks, ...]:
    """Gives each check its bound and its verdict.

    Args:
        nodes: The nodes that were checked. Those of one machine are not compared with each other: their figures differ
            by what else runs there.
    """
    known = tuple(nodes)
    return tuple(node.replace(checks=tuple(_judged(node, check, known) for check in node.checks)) for node in known)


def better(first: Sequence[Check], second: Sequence[Check]) -> tuple[Check, ...]:
    """Takes the better one of two runs of each check: a moment's load is no fault of a machine."""
    again = {check.key: check for check in second}
    return tuple(min((check, again.pop(check.key, check)), key=_how_bad) for check in first) + tuple(again.values())


def stand_out(nodes: Iterable[NodeChecks]) -> Mapping[int, tuple[Check, ...]]:
    """The nodes that fail a check which another node passes, with these checks.

    A machine that is slower than before is busy for a moment where another node of it is not: only another machine says
    more.
    """
    known = tuple(nodes)
    passed = {(check.name, node.host) for node in known for check in node.checks if not check.problem}

    def stands_out(node: NodeChecks, check: Check) -> bool:
        hosts = {host for name, host in passed if name == check.name}
        return bool(hosts - {node.host} if check.is_slower_than_before else hosts)

    found = {node.node: tuple(check for check in node.failed if stands_out(node, check)) for node in known}
    return {node: checks for node, checks in found.items() if checks}


def describe(check: Check) -> str:
    """Describes a failed check, for people."""
    return f"{check.name}{f' of {check.subject}' if check.subject else ''}: {check.problem}"


def _judged(node: NodeChecks, check: Check, others: Sequence[NodeChecks]) -> Check:
    if check.value is None:
        return check if check.problem else check.replace(problem="nothing was measured")
    if (bound := _BOUNDS.get(check.name)) is not None:
        low = abs(check.value) > bound.worst if bound.most else check.value < bound.worst
        return _with_bound(check, bound.worst, bound.source, low=low, word="more" if bound.most else "less")
    if (share := _SHARES.get(check.name)) is None:
        return check
    alike = _figures(node, check, others)
    of_others, own = median(alike) if alike else 0.0, check.usual or 0.0
    if not (alike or own):
        return check.replace(bound_source="no other machine to compare with")
    usual, figures = of_others, f"{len(alike)} other figures"
    if own > of_others:
        usual, figures = own, f"{check.earlier} earlier figures of this machine"
    source = f"{share:.0%} of the median of {figures}, {_number(usual)}"
    low = check.value < usual * share
    judged = check.replace(is_slower_than_before=low and check.value >= of_others * share)
    return _with_bound(judged, usual * share, source, low=low, word="less")


def _with_bound(check: Check, bound: float, source: str, *, low: bool, word: str) -> Check:
    assert check.value is not None
    value, unit = _number(check.value), check.unit
    problem = f"{value} {unit} is {word} than {_number(bound)} {unit}: {source}" if low else ""
    return check.replace(bound=bound, bound_source=source, problem=check.problem or problem)


def _figures(node: NodeChecks, check: Check, others: Sequence[NodeChecks]) -> list[float]:
    """The figures of other machines, and those of the machine's other devices."""
    found: list[float] = []
    compared: set[int] = set()
    for other in others:
        own = other.node == node.node
        if (not own and other.host and other.host == node.host) or len(compared) >= _MOST_COMPARED:
            continue
        for one in other.checks:
            is_alike = one.name == check.name and (one.name != "disk" or one.subject == check.subject)
            if is_alike and one.value is not None and not (own and (one.name != "matmul" or one.key == check.key)):
                found.append(one.value)
                compared.add(other.node)
    return found


def _how_bad(check: Check) -> tuple[bool, float]:
    if check.value is None:
        return True, 0.0
    less_is_better = check.unit == "s"
    return bool(check.problem), abs(check.value) if less_is_better else -check.value


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
