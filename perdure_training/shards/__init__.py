"""Reads a dataset in shards that the job leases to its ranks; docs/data.md is the guide.

    from perdure_training.shards import ShardingClient

    client = ShardingClient("train", size=len(dataset), epochs=3, shuffle=True)
    for shard in client:
        for index in shard:
            train(dataset[index])
        client.report(shard)

`ShardBatches`, `ShardStream` and `ElasticSampler` need torch, and are imported from it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure_training.shards.client import ShardsRefused
from perdure_training.shards.micro_batches import MicroBatches
from perdure_training.shards.partitions import StreamClient
from perdure_training.shards.shard import Shard, StreamShard
from perdure_training.shards.sharding_client import ShardingClient

if TYPE_CHECKING:
    from perdure_training.shards.batches import ShardBatches
    from perdure_training.shards.elastic_sampler import ElasticSampler
    from perdure_training.shards.stream import ShardStream

__all__ = [
    "ElasticSampler",
    "MicroBatches",
    "Shard",
    "ShardBatches",
    "ShardStream",
    "ShardingClient",
    "ShardsRefused",
    "StreamClient",
    "StreamShard",
]


def __getattr__(name: str) -> Any:
    if name == "ShardBatches":
        from perdure_training.shards.batches import ShardBatches

        return ShardBatches
    if name == "ElasticSampler":
        from perdure_training.shards.elastic_sampler import ElasticSampler

        return ElasticSampler
    if name == "ShardStream":
        from perdure_training.shards.stream import ShardStream

        return ShardStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
