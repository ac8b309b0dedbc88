"""Finds the node or the link that is slow, from the bandwidth of pairs of nodes.

| a pair is slow | so |
|-|-|
| and one of its nodes is slow in every pair | that node is |
| and both are fast with another node | the link between them is |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from perdure.contract import Check

SHARE = 0.3
"""The least share of the median of all nodes with which a link passes: other traffic takes part of it."""

Pair = tuple[int, int]
"""Two nodes, of which the first one listens."""


def neighbours(nodes: Sequence[int], measured: Mapping[Pair, Check]) -> tuple[tuple[Pair, ...], ...]:
    """The first round, in parts whose pairs are measured together: no node is in two of them."""
    del measured
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    left = ((nodes[-1], nodes[0]),) if len(nodes) % 2 and len(nodes) > 1 else ()
    return tuple(part for part in (tuple(pairs), left) if part)


def slowest_with_fastest(nodes: Sequence[int], measured: Mapping[Pair, Check]) -> tuple[tuple[Pair, ...], ...]:
    """The second round, in which no pair is measured again."""
    best = _best(measured)
    order = sorted(nodes, key=lambda node: (best.get(node, 0.0), node))
    known = {frozenset(pair) for pair in measured}
    pairs: list[Pair] = []
    while len(order) > 1:
        slow = order.pop(0)
        partner = next((fast for fast in reversed(order) if frozenset((slow, fast)) not in known), None)
        if partner is not None:
            order.remove(partner)
            pairs.append((slow, partner))
    return (tuple(pairs),) if pairs else ()


def judge(measured: Mapping[Pair, Check]) -> Mapping[int, tuple[Check, ...]]:
    """The checks of each node's links, those that are slow with their problem."""
    best = _best(measured)
    usual = median(best.values()) if best else 0.0
    bound = SHARE * usual
    source = f"{SHARE:.0%} of the median of {len(best)} nodes"
    slow = {node for node, value in best.items() if value < bound}
    found: dict[int, list[Check]] = {}
    for pair, check in measured.items():
        value = check.value or 0.0
        names = sorted(slow.intersection(pair))
        problem = "" if check.value is not None and value >= bound else _problem(check, pair, names)
        for node, other in (pair, pair[::-1]):
            # A node that is fast with others is not to blame for one that is slow with all.
            counts = not names or node in names
            judged = check.replace(name="link", subject=f"node {other}", bound=bound or None, bound_source=source)
            found.setdefault(node, []).append(judged.replace(problem=problem if counts else ""))
    return {node: tuple(checks) for node, checks in found.items()}


def _best(measured: Mapping[Pair, Check]) -> dict[int, float]:
    """The best figure of each node."""
    best: dict[int, float] = {}
    for pair, check in measured.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), check.value or 0.0)
    return best


def _problem(check: Check, pair: Pair, slow: Iterable[int]) -> str:
    said = check.problem or f"{check.value or 0.0:,.0f} {check.unit}"
    named = [f"node {node}" for node in slow]
    if named:
        return f"{said}: {' and '.join(named)} {'are' if len(named) > 1 else 'is'} slow with every other node"
    return f"{said}: the link between node {pair[0]} and node {pair[1]} is slow, and both are fast with others"
