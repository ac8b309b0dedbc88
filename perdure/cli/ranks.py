"""How commands name global ranks: as people write them, and as they read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.client.client import Client


def parse_ranks(text: str) -> range:
    """Reads `5` or `120-127`.

    Raises:
        PerdureError: if it is neither.
    """
    from perdure.base.errors import PerdureError

    first, span, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not span)):
        raise PerdureError(f'--rank: got "{text}"; expected a global rank such as 5, or a range such as 120-127')
    return range(int(first), int(last or first) + 1)


async def node_numbers(client: Client, name: str, ranks: range, role: str | None) -> frozenset[int]:
    """Returns the nodes that run these ranks now.

    Raises:
        PerdureError: if no node does.
    """
    from perdure.base.errors import PerdureError
    from perdure.client.views import nodes_of_ranks

    roles = () if role else (await client.status(name)).roles
    if len(roles) > 1:
        raise PerdureError(f"--rank: each role has ranks of its own; choose one by --role: {', '.join(roles)}")
    found = nodes_of_ranks(await client.nodes(name, role=role), ranks)
    if not found:
        raise PerdureError(f"{name} has no world with rank {ranks.start} now; choose by --node instead")
    return found


async def running_roles(client: Client, name: str, role: str | None) -> tuple[str, ...]:
    """Returns the given role, or all roles of the job that have a world; the leading one if none has."""
    if role is not None:
        return (role,)
    status = await client.status(name)
    return tuple(one.name for one in status.by_role if one.nodes) or (status.role,)


def rank_numbers(ranks: Iterable[int]) -> str:
    """Writes `rank 5`, or `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    written = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {written}" if written.isdecimal() else f"ranks {written}"
