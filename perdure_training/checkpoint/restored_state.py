"""A state that is to be restored, with the room that it lacks while its training has not begun."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from itertools import zip_longest
from typing import Any, Self, cast

import torch

from perdure_training.checkpoint.broadcast_buffers import names_of_rank_0
from perdure_training.checkpoint.generators import Generators
from perdure_training.checkpoint.optimizers import prepare_optimizer
from perdure_training.checkpoint.planned_state import StateOfRank
from perdure_training.checkpoint.values import capture, is_object, objects_in, own_values, put_into


class RestoredState:
    """A state that is to be restored, with the room that it lacks while its training has not begun. At the end of the
    context a state of which nothing was restored is as it was."""

    def __init__(self, state: MutableMapping[str, Any], *, replicated: bool) -> None:
        self._state = state
        optimizers = [value for value in objects_in(list(state.values())) if isinstance(value, torch.optim.Optimizer)]
        self._prepared = [optimizer for optimizer in optimizers if prepare_optimizer(optimizer)]
        self._filled = False
        objects = [name for name, value in state.items() if is_object(value) and not isinstance(value, torch.nn.Module)]
        self.target = StateOfRank(
            values=capture(state),
            objects=objects,
            each_rank=of_each_rank(state),
            replicated=replicated,
            from_rank_0=names_of_rank_0(state),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._filled:
            for optimizer in self._prepared:
                optimizer.state.clear()

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Gives the state what was saved of it."""
        whole = {name: _with_empty_parts(value, self.target.values.get(name)) for name, value in saved.items()}
        put_into(self._state, own_values(self._state, whole))
        self._filled = True


def of_each_rank(state: Mapping[str, Any]) -> frozenset[str]:
    """Names of which each rank has its own value, and a new rank keeps its own."""
    return frozenset(name for name, value in state.items() if isinstance(value, Generators))


def _with_empty_parts(saved: Any, own: Any) -> Any:
    """Adds the dictionaries without content that the state has and a checkpoint has no names for, such as those that
    `LambdaLR` saves of its functions: an object that loads its state dict expects them."""
    if isinstance(saved, dict) and isinstance(own, Mapping):
        found, known = cast("dict[Any, Any]", saved), cast("Mapping[Any, Any]", own)
        for name, one in found.items():
            found[name] = _with_empty_parts(one, known.get(name))
        found.update({name: one for name, one in known.items() if name not in found and _is_empty(one)})
    elif isinstance(saved, list) and isinstance(own, list):
        parts, known_parts = cast("list[Any]", saved), cast("list[Any]", own)
        left = known_parts[len(parts) :]
        parts[:] = [_with_empty_parts(*pair) for pair in zip_longest(parts, known_parts[: len(parts)])]
        if all(map(_is_empty, left)):
            parts.extend(left)
    return cast("object", saved)


def _is_empty(value: Any) -> bool:
    """Whether a value has dictionaries, and nothing in them."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, cast("Mapping[Any, Any]", value).values()))
    return isinstance(value, list) and bool(value) and all(map(_is_empty, cast("list[Any]", value)))
