"""The number of a rank on its node: files of a node are named by it, and its first rank does what one has to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FIRST_RANK_VARIABLE: Final = "PERDURE_FIRST_RANK"
"""The rank of the node's first process."""


def local_rank_of(environment: Mapping[str, str]) -> int:
    """Returns the number of this rank among those of its node.

    LOCAL_RANK is that number mostly, but 0 in all ranks with torchrun's `--virtual-local-rank`, where it is the number
    of the rank's only GPU.
    """
    local, rank, first = (environment.get(name, "") for name in ("LOCAL_RANK", "RANK", FIRST_RANK_VARIABLE))
    if rank.isdecimal() and first.isdecimal() and int(rank) >= int(first):
        return int(rank) - int(first)
    return int(local) if local.isdecimal() else 0
