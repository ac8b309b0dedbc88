"""Desired states as a group sends them to the agent of one node."""

from __future__ import annotations

from typing import Any

from perdure.contract import ApplyDesired, Member, NodeCredentials, NodeDesired, World


def desired_world(
    node: NodeCredentials,
    generation: int,
    *,
    nodes: int = 1,
    processes: int = 1,
    store_host: bool = True,
    group_rank: int = 0,
    base_rank: int = 0,
    restart_command: bool = False,
    **fields: Any,
) -> World:
    """A world as one member sees it."""
    member = Member(
        incarnation=node.incarnation,
        group_rank=group_rank,
        base_rank=base_rank,
        processes=processes // nodes,
        restart_command=restart_command,
    )
    store: dict[str, Any] = {
        "store_address": "127.0.0.1",
        "store_port": 29501,
        "store_rank": node.rank + (not store_host),
    }
    return World(generation=generation, members={node.rank: member}, nodes=nodes, processes=processes, **store | fields)


class Desires:
    """What a group desires of one node, and all that it has desired before."""

    def __init__(self, node: NodeCredentials) -> None:
        self._node = node
        self._desired = NodeDesired()
        self.version = 0

    def next(self, *, node: NodeCredentials | None = None, **desired: Any) -> ApplyDesired:
        """The next desired state, which differs from the one before it in these fields."""
        self.version += 1
        self._desired = self._desired.replace(**desired)
        return ApplyDesired(node=node or self._node, version=self.version, desired=self._desired)
