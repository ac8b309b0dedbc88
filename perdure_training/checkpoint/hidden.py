"""Finds objects of a training state that a restore could not reach.

A value without `state_dict` is saved as a pickle, and a restore puts another object in its place. A model, an optimizer
or a scheduler within it would be another one, too, while the script trains the one that it has made: it would continue
with an untrained model, and no error. Such a state is refused before anything is trained.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from perdure_training.checkpoint.staging import Layout, Nowhere, is_plain, is_split
from perdure_training.checkpoint.values import PLAIN, is_object

_MOST_LOOKS = 100_000
"""Values through which a name is searched: an object may hold a whole dataset."""


def check_reachable(state: Mapping[str, Any]) -> None:
    """Refuses a state in which a module or another object with `load_state_dict` is within an object without, or which
    has tensors of a type that cannot be saved as what they are.

    Raises:
        TypeError: if there is one. It says where.
    """
    _check_types(state)
    for name, value in state.items():
        if hidden := _hidden_in(value, set()):
            kind, place = type(hidden[0]).__name__, _place_of(hidden[0], value, name)
            raise TypeError(
                f"state: {place} is within a value that has no state_dict and is saved as a whole: a restore would put "
                f"another object in its place, and the {kind} that the script has would stay as it is. Put the {kind} "
                "into the state under a name of its own, or give what contains it state_dict and load_state_dict"
            )


def _check_types(state: Mapping[str, Any]) -> None:
    """Refuses tensors that would be lost, or come back as other ones, while nothing is trained yet."""
    known: set[type] = set()
    for name, value in state.items():
        for place, tensor in _tensors_of(value, name, set()):
            part = tensor._local_tensor if is_split(tensor) else tensor  # pyrefly: ignore[protected-access]
            if is_plain(part) or type(part) in known or part.device.type == "meta":
                continue
            known.add(type(part))
            try:
                Layout(tensor)
            except Exception as error:
                raise TypeError(
                    f"state: {place} is a {type(part).__name__}, which cannot be saved as such: {error}. Leave it out"
                    " of the state, or make its class one that can be pickled, such as a class of a module"
                ) from error


def _tensors_of(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a value and where they are, as far as it is known before a training what objects have."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, torch.nn.Module):
        for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{place}.{name}", tensor
    elif isinstance(value, (dict, list, tuple)) and id(cast("object", value)) not in seen:
        seen.add(id(cast("object", value)))
        parts = cast("Any", value).items() if isinstance(value, dict) else enumerate(cast("Any", value))
        if not PLAIN.issuperset(type(inner) for _, inner in parts):
            parts = cast("Any", value).items() if isinstance(value, dict) else enumerate(cast("Any", value))
            for name, inner in parts:
                yield from _tensors_of(inner, f"{place}.{name}", seen)


class _Finder(pickle.Pickler):
    """Walks what is saved of a value, and keeps the objects that would be saved as a part of it."""

    def __init__(self) -> None:
        super().__init__(Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self.found: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        if isinstance(obj, torch.Tensor):
            return 0
        if _is_restorable(obj):
            self.found.append(obj)
            return 1
        return None


def _hidden_in(value: Any, seen: set[int]) -> list[object]:
    """The objects that are pickled as a part of a value. Those in dictionaries, lists and tuples are restored."""
    if type(value) in PLAIN or is_object(value) or isinstance(value, torch.Tensor) or id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, (dict, list, tuple)):
        parts = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        return [hidden for part in parts for hidden in _hidden_in(part, seen)]
    finder = _Finder()
    # A value that cannot be pickled is refused when it is saved.
    with contextlib.suppress(Exception):
        finder.dump(value)
    return finder.found


def _is_restorable(value: object) -> bool:
    if not is_object(value) or not callable(getattr(value, "load_state_dict", None)):
        return False
    # A loss function is a module, and has nothing to restore.
    return not isinstance(value, torch.nn.Module) or bool(value.state_dict())


def _place_of(hidden: object, within: Any, name: str) -> str:
    """How a script reaches an object from a value; as much of it as is found."""
    seen, looks = {id(within)}, [(name, within)]
    for place, value in looks:
        for part, inner in _parts_of(value):
            if inner is hidden:
                return place + part
            if id(inner) not in seen and len(looks) < _MOST_LOOKS:
                seen.add(id(inner))
                looks.append((place + part, inner))
    return f"{name}: a {type(hidden).__name__}"


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in cast("dict[Any, Any]", value).items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(cast("list[Any]", value)))
    else:
        slots = (slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ()))
        names = [*getattr(value, "__dict__", {}), *slots]
        yield from ((f".{one}", getattr(value, one)) for one in names if hasattr(value, one))
