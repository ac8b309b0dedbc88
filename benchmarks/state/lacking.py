"""Which bytes of a split state a node does not have: counted from the shapes, apart from the library's own count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 1024
BYTES_PER_PARAMETER = 12
"""Parameter, and the two moments of AdamW, in 32 bits."""


def layers_of(megabytes: float) -> int:
    """The number of layers of a model whose state, with the optimizer's, has about that size."""
    return max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / WIDTH**2))


def shapes(layers: int) -> list[tuple[int, int]]:
    """Rows of each parameter, and bytes of a row with the optimizer's moments: FSDP2 splits the rows."""
    row = BYTES_PER_PARAMETER
    return [shape for _ in range(layers) for shape in ((WIDTH, row), (WIDTH, row), (WIDTH, WIDTH * row))]


def rows_of(rank: int, *, world_size: int, rows: int) -> range:
    """The rows that a rank has."""
    share = -(-rows // world_size)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


def bytes_lacked(
    parameters: Iterable[tuple[int, int]], *, rank: int, world_size: int, former: int, here: Sequence[int]
) -> int:
    """Bytes that a rank of a new world needs and that are not in the memory of its node.

    Args:
        parameters: Rows, and bytes of a row, of each.
        rank: The rank.
        world_size: The size of its world.
        former: The size of the world that saved the state.
        here: The ranks of that world whose parts are on the node.
    """
    lacked = 0
    for rows, size in parameters:
        needed = set(rows_of(rank, world_size=world_size, rows=rows))
        for one in here:
            needed.difference_update(rows_of(one, world_size=former, rows=rows))
        lacked += len(needed) * size
    return lacked
