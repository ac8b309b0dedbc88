"""One generation: who trains together, as one node needs to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class World:
    """One generation, as this node sees it."""

    generation: int
    nodes: int
    group_rank: int
    base_rank: int
    world_size: int
    store_address: str
    store_port: int
    store_host: bool

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> World:
        """Reads the agent's answer.

        Raises:
            KeyError, TypeError, ValueError: if it is no world.
        """
        return cls(
            generation=int(body["generation"]),
            nodes=int(body["nodes"]),
            group_rank=int(body["group_rank"]),
            base_rank=int(body["base_rank"]),
            world_size=int(body["world_size"]),
            store_address=str(body["store_address"]),
            store_port=int(body["store_port"]),
            store_host=bool(body["store_host"]),
        )
