"""How a rank reaches its dataset: through the node's agent; without Perdure, by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from typing import Any, Protocol

from perdure_training.node_api.agent_client import Agent, Json, find_agent
from perdure_training.shards.spans import Span, gaps, merge

BEGINNING: Json = {"next": 0, "holes": []}
"""The position before anything was consumed."""


class Link(Protocol):
    """Sends a rank's request, and returns the answer. Both are described in docs/node-protocol.md."""

    def exchange(self, name: str, body: Json) -> Json:
        """Raises `AgentAway` or `AgentRefused` if there was no answer; the request can be sent again after both."""
        ...


class AgentLink:
    """The node's agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def exchange(self, name: str, body: Json) -> Json:
        return self._agent.post(f"/v1/datasets/{name}", body)


class StandaloneLink:
    """Ranks that no agent serves, as on a laptop: each takes the shards whose number belongs to its rank."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._rest: Iterator[Span] = iter(())
        self._term: Json | None = None
        self._ends: list[int] = []
        """For a stream: the ends of its partitions."""

    def exchange(self, name: str, body: Json) -> Json:
        request: Json = body["request"]
        base: Json | None = None
        is_stream = bool(body["parameters"].get("partitions"))
        if is_stream:
            self._ends = list(request["grown"])
        if body["term"] != self._term:
            loaded: Json = request["position"] or BEGINNING
            base, self._term = loaded, body["term"]
            self._rest = (self._grown_shards if is_stream else self._shards)(body["parameters"], loaded)
        failed = [tuple(one["span"]) for one in request["failed"]]
        wanted = request["shards"]
        available = islice(self._rest, max(wanted - len(failed), 0))
        granted = failed[:wanted] + list(takewhile(bool, available))
        may_grow = is_stream and not request["complete"]
        return {"granted": merge(granted), "drained": wanted > 0 and not granted and not may_grow, "base": base}

    def _shards(self, parameters: Json, position: Json) -> Iterator[Span]:
        size, shard_size = parameters["size"], parameters["shard_size"]
        per_epoch = -(-size // shard_size)
        consumed = gaps([(first, end) for first, end in position["holes"]], position["next"])
        begin = position["holes"][0][0] if position["holes"] else position["next"]
        number = begin // size * per_epoch + begin % size // shard_size
        while not parameters["epochs"] or number < parameters["epochs"] * per_epoch:
            if number % self._world_size == self._rank:
                epoch, first = number // per_epoch * size, number % per_epoch * shard_size
                yield from _rest_of((epoch + first, epoch + min(first + shard_size, size)), consumed)
            number += 1

    def _grown_shards(self, parameters: Json, position: Json) -> Iterator[Any]:
        """Yields this rank's shards of a stream, of one partition after another, and () where there is none now."""
        size, shard_size, starts = (parameters[name] for name in ("size", "shard_size", "starts"))
        consumed = gaps([(first, end) for first, end in position["holes"]], position["next"])
        lines = [range(at, at + size) for at in range(0, size * len(starts), size)]
        nexts = [next((last for first, last in consumed if first == line[0]), line[0]) for line in lines]
        while True:
            found = False
            for partition, line in enumerate(lines):
                first, number = nexts[partition], (nexts[partition] - line[0]) // shard_size
                end = line[0] + min(self._ends[partition], (number + 1) * shard_size)
                if first < end:
                    nexts[partition], found = end, True
                    if (partition + number) % self._world_size == self._rank:
                        yield from _rest_of((first, end), consumed)
            if not found:
                yield ()


def find_link(environment: Mapping[str, str] = os.environ) -> Link:
    """Returns the link of this process."""
    if agent := find_agent(environment):
        return AgentLink(agent)
    return StandaloneLink(rank=int(environment.get("RANK", "0")), world_size=int(environment.get("WORLD_SIZE", "1")))


def _rest_of(span: Span, consumed: list[Span]) -> list[Span]:
    return [(max(first, span[0]), last) for first, last in gaps(consumed, span[1]) if last > span[0]]
