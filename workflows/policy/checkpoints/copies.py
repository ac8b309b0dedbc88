"""Which node keeps the copies of what another node's script has saved, where the job has no storage for them."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Mapping

_APART = 3
"""Halves of a copy by which a node of another rack may keep more than one of the same rack: it is chosen before it, but
the few nodes of a small rack do not keep the copies of all others."""


def copies_token(receiver_token: str, *, role: str, rank: int) -> str:
    """The token that a node shows to the receiver of its copies; it gives access to that rank's copies only.

    Args:
        receiver_token: The secret of the receiver's incarnation, which the node itself never learns.
        role: The role of the node whose copies they are.
        rank: Its rank, which a replacement has, too.
    """
    return hmac.new(receiver_token.encode(), f"copies/{role}-{rank}".encode(), "sha256").hexdigest()


def choose_target(rank: int, *, targets: Mapping[int, int], receivers: Mapping[int, str]) -> int | None:
    """Chooses the rank that keeps a node's copies: the one that does, while it can, so that a replacement finds them.

    Otherwise one with the fewest, in another rack if one there does not keep many more, and of these the next in the
    order of ranks.

    Args:
        rank: The node whose copies they are.
        targets: By rank, the rank that keeps its copies.
        receivers: The ranks that can keep copies, with their racks; empty where that is unknown.
    """
    if (known := targets.get(rank)) is not None and known in receivers:
        return known
    load = Counter(target for owner, target in targets.items() if owner != rank)
    others = [other for other in receivers if other != rank]

    def cost(other: int) -> int:
        own, its = receivers.get(rank, ""), receivers[other]
        return 2 * load[other] + (0 if own and its and own != its else _APART)

    # False comes first: those after the rank, and then those before it.
    return min(others, key=lambda other: (cost(other), other < rank, other), default=None)
