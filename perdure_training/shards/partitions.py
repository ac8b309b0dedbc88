"""Reads a stream in shards: partitions that grow, each with offsets, which the job leases to its ranks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure_training.node_api.agent_client import Json
from perdure_training.shards.client import ShardClient
from perdure_training.shards.link import Link
from perdure_training.shards.shard import StreamShard
from perdure_training.shards.spans import Span, consumed_before, position_of

logger = logging.getLogger(__name__)

PARTITION_SIZE = 2**48
"""The part of the line of positions that a partition has. It is longer than any partition will be."""
MOST_PARTITIONS = 256
_LOOK_INTERVAL = 0.5
"""Seconds between two calls of `ends`."""
_WARN_INTERVAL = 60.0

Ends = Callable[[], tuple[Mapping[str, float], bool]]


class StreamClient(ShardClient[StreamShard]):
    """This rank's part of one stream.

    client = StreamClient("clicks", partitions=["0", "1"], ends=ends)
    for shard in client:
        process(shard.partition, list(shard))
        client.report(shard)
    """

    def __init__(
        self,
        name: str,
        *,
        partitions: Sequence[str] | Mapping[str, int],
        ends: Ends,
        shard_size: int = 64,
        link: Link | None = None,
        most_ahead: int = 200_000,
    ) -> None:
        """Creates the client; it contacts the agent at the first `fetch`.

        Args:
            name: The stream's name in the job: a letter, then up to 62 letters, digits, `.`, `_` and `-`.
            partitions: Their names, the same on all ranks; with the first offset of each, if it is not 0.
            ends: Returns the offset at which each partition ends now, `math.inf` for one without an end, and whether
                any of them may still grow. A thread of the client calls it repeatedly, on all ranks.
            shard_size: Samples of one shard.
            link: How the stream is reached; by default through the node's agent, and without Perdure by itself.
            most_ahead: The most shards that this rank keeps ahead.

        Raises:
            ValueError: if an argument is out of range, or this process has a client of that name already.
        """
        starts = dict.fromkeys(partitions, 0) if isinstance(partitions, Sequence) else dict(partitions)
        if not 1 <= len(starts) <= MOST_PARTITIONS:
            raise ValueError(f"partitions: expected 1 to {MOST_PARTITIONS}, found {len(starts)}")
        for partition, start in starts.items():
            if not 0 <= start < PARTITION_SIZE:
                raise ValueError(f"partitions: {partition}: expected an offset below 2**48, found {start}")
        if shard_size < 1:
            raise ValueError(f"shard_size: expected at least 1, found {shard_size}")
        self._ends_now = ends
        self._ends = [0] * len(starts)
        self._complete = False
        self._looked = self._warned = -math.inf
        self._numbers = {partition: number for number, partition in enumerate(starts)}
        self._partitions = list(starts)
        parameters: Json = {
            "size": PARTITION_SIZE,
            "shard_size": shard_size,
            "epochs": len(starts),
            "shuffle": False,
            "seed": 0,
            "partitions": self._partitions,
            "starts": list(starts.values()),
        }
        begins = range(0, PARTITION_SIZE * len(starts), PARTITION_SIZE)
        before = [(begin, begin + start) for begin, start in zip(begins, starts.values(), strict=True) if start]
        super().__init__(name, parameters, beginning=position_of(before), link=link, most_ahead=most_ahead)

    def read_arguments(self) -> tuple[Any, ...]:
        for number, (start, end) in enumerate(zip(self._parameters["starts"], self._ends, strict=True)):
            if end > start:
                return self._partitions[number], [start if end == PARTITION_SIZE else end - 1]
        raise RuntimeError("no partition of the stream has a sample")

    def span(self, shard: StreamShard) -> Span:
        first = self._numbers[shard.partition] * PARTITION_SIZE + shard.first
        return first, first + len(shard)

    def _shard(self, span: Span) -> StreamShard:
        number, first = divmod(span[0], PARTITION_SIZE)
        return StreamShard(partition=self._partitions[number], first=first, end=first + span[1] - span[0])

    def _to_save(self, position: Json) -> dict[str, Any]:
        """Returns the offset of each partition, with the spans before it that are not consumed."""
        consumed = consumed_before(position)
        saved: dict[str, Any] = {}
        for number, partition in enumerate(self._partitions):
            begin = number * PARTITION_SIZE
            own = [
                (max(first - begin, 0), min(end - begin, PARTITION_SIZE))
                for first, end in consumed
                if first < begin + PARTITION_SIZE and end > begin
            ]
            saved[partition] = position_of(own)
        return {"partitions": saved}

    def _validate_state(self, state: Mapping[str, Any]) -> Json:
        saved = state.get("partitions", {})
        if strangers := sorted(set(saved) - set(self._numbers)) or (not saved and ["none"]):
            raise ValueError(f"partitions: the position is of a stream with other ones: {', '.join(strangers)}")
        consumed: list[Span] = []
        for number, (partition, start) in enumerate(zip(self._partitions, self._parameters["starts"], strict=True)):
            own = consumed_before(saved[partition]) if partition in saved else [(0, start)] if start else []
            consumed += [(number * PARTITION_SIZE + first, number * PARTITION_SIZE + end) for first, end in own]
        return position_of(consumed)

    def _look(self) -> None:
        now = time.monotonic()
        if self._complete or now - self._looked < _LOOK_INTERVAL:
            return
        self._looked = now
        try:
            ends, may_grow = self._ends_now()
            for partition, end in ends.items():
                number = self._numbers[partition]
                self._ends[number] = max(self._ends[number], int(min(end, PARTITION_SIZE)))
            self._complete = not may_grow
        except Exception as error:
            # What the stream is asked may be away. This thread must not end.
            if now - self._warned >= _WARN_INTERVAL:
                self._warned = now
                logger.warning("stream %s: ends() has failed: %s: %s", self._name, type(error).__name__, error)

    def _growth(self) -> Json:
        return {"grown": self._ends, "complete": self._complete}
