"""How a rank reaches its dataset: through the node's agent; without Perdure, by itself."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from perdure_training.shards.spans import Span, gaps, merged

_ANSWER_WITHIN = 60.0
"""Seconds: the agent answers within 20, if only to say that it must be asked again."""

Json = dict[str, Any]

BEGINNING: Json = {"next": 0, "holes": []}
"""The position before anything was consumed."""


class Away(Exception):
    """There was no answer; the same request can be sent again."""


class Link(Protocol):
    """Sends a rank's request, and returns the answer. Both are described in docs/node-protocol.md."""

    def exchange(self, name: str, body: Json) -> Json:
        """Raises `Away` if there was no answer."""
        ...


class AgentLink:
    """The agent's socket in the node's run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exchange(self, name: str, body: Json) -> Json:
        connection = _UnixConnection(str(self._path))
        try:
            connection.request("POST", f"/v1/datasets/{name}", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Away(f"the agent does not answer: {error}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise Away(str(content.get("error", response.status)))
        return content


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
    directory = environment.get("PERDURE_PROGRESS_DIR")
    if directory and environment.get("PERDURE_RUN_ID") and "RANK" in environment:
        return AgentLink(Path(directory).parent / "agent.sock")
    return AloneLink(rank=int(environment.get("RANK", "0")), world_size=int(environment.get("WORLD_SIZE", "1")))


def _rest_of(span: Span, consumed: list[Span]) -> list[Span]:
    return [(max(first, span[0]), last) for first, last in gaps(consumed, span[1]) if last > span[0]]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("agent", timeout=_ANSWER_WITHIN)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_ANSWER_WITHIN)
        self.sock.connect(self._path)
