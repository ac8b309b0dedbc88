"""Reads a dataset with indices in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure_training.node_api.agent_client import Json
from perdure_training.shards.client import ShardClient
from perdure_training.shards.link import BEGINNING, Link
from perdure_training.shards.permutation import Permutation
from perdure_training.shards.shard import Shard
from perdure_training.shards.spans import Span


class ShardingClient(ShardClient[Shard]):
    """This rank's part of one dataset."""

    def __init__(
        self,
        name: str,
        *,
        size: int,
        shard_size: int = 64,
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        link: Link | None = None,
    ) -> None:
        """Creates the client; it contacts the agent at the first `fetch`.

        Args:
            name: The dataset's name in the job: a letter, then up to 62 letters, digits, `.`, `_` and `-`.
            size: Samples.
            shard_size: Samples of one shard.
            epochs: How often the dataset is read; 0 for endlessly.
            shuffle: Permute the samples of each epoch, each epoch differently.
            seed: Of the permutations.
            link: How datasets are reached; by default through the node's agent, and without Perdure by themselves.

        Raises:
            ValueError: if an argument is out of range, or this process has a client of that name already.
        """
        for field, value, least in (("size", size, 1), ("shard_size", shard_size, 1), ("epochs", epochs, 0)):
            if value < least:
                raise ValueError(f"{field}: expected at least {least}, found {value}")
        parameters = {"size": size, "shard_size": shard_size, "epochs": epochs, "shuffle": shuffle, "seed": seed}
        super().__init__(name, parameters, beginning=BEGINNING, link=link)
        self._permutation: tuple[int, Permutation] | None = None

    def span(self, shard: Shard) -> Span:
        first = shard.epoch * self._parameters["size"] + shard.first
        return first, first + len(shard)

    def read_arguments(self) -> tuple[Any, ...]:
        return ([0],)

    def _shard(self, span: Span) -> Shard:
        epoch, first = divmod(span[0], self._parameters["size"])
        permutation = None
        if self._parameters["shuffle"]:
            if self._permutation is None or self._permutation[0] != epoch:
                known = Permutation(self._parameters["size"], seed=self._parameters["seed"], epoch=epoch)
                self._permutation = epoch, known
            permutation = self._permutation[1]
        return Shard(epoch=epoch, first=first, end=first + span[1] - span[0], permutation=permutation)

    def _to_save(self, position: Json) -> dict[str, Any]:
        kept = {name: self._parameters[name] for name in ("size", "shuffle", "seed")}
        return {**kept, "next": position["next"], "holes": [[first, end] for first, end in position["holes"]]}

    def _validate_state(self, state: Mapping[str, Any]) -> Json:
        for field in ("size", "shuffle", "seed"):
            if state.get(field) != self._parameters[field]:
                raise ValueError(
                    f"{field}: the position is of a dataset with {state.get(field)}, not {self._parameters[field]}"
                )
        return {"next": int(state["next"]), "holes": [[int(first), int(end)] for first, end in state["holes"]]}
