"""How a rank reaches its dataset: through the node's agent; without Perdure, by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Protocol

from perdure_training.agent_link import Agent, AgentRefused, Away, Json, find_agent
from perdure_training.shards.spans import Span, gaps, merged

BEGINNING: Json = {"next": 0, "holes": []}
"""The position before anything was consumed."""


class Link(Protocol):
    """Sends a rank's request, and returns the answer. Both are described in docs/node-protocol.md."""

    def exchange(self, name: str, body: Json) -> Json:
        """Raises `Away` if there was no answer."""
        ...


class AgentLink:
    """The node's agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def exchange(self, name: str, body: Json) -> Json:
        try:
            return self._agent.post(f"/v1/datasets/{name}", body)
        except AgentRefused as error:
            raise Away(str(error)) from error


class AloneLink:
    """Ranks that no agent serves, as on a laptop: each takes the shards whose number belongs to its rank."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._rest: Iterator[Span] = iter(())
        self._term: Json | None = None

    def exchange(self, name: str, body: Json) -> Json:
        request: Json = body["request"]
        base: Json | None = None
        if body["term"] != self._term:
            loaded: Json = request["position"] or BEGINNING
            base, self._term = loaded, body["term"]
            self._rest = self._shards(body["parameters"], loaded)
        failed = [tuple(one["span"]) for one in request["failed"]]
        wanted = request["shards"]
        granted = failed[:wanted] + list(islice(self._rest, max(wanted - len(failed), 0)))
        return {"granted": merged(granted), "drained": wanted > 0 and not granted, "base": base}

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


def find_link(environment: Mapping[str, str] = os.environ) -> Link:
    """Returns the link of this process."""
    if agent := find_agent(environment):
        return AgentLink(agent)
    return AloneLink(rank=int(environment.get("RANK", "0")), world_size=int(environment.get("WORLD_SIZE", "1")))


def _rest_of(span: Span, consumed: list[Span]) -> list[Span]:
    return [(max(first, span[0]), last) for first, last in gaps(consumed, span[1]) if last > span[0]]
