"""Gives a new state the structure that it had when it was saved, as far as it is made while a training runs.

A checkpoint is loaded into the tensors that a state has, by their names. What an optimizer keeps of a parameter exists
only after its first step with a gradient of that parameter, and other objects grow as well.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from perdure_training.checkpoint.dictionary_types import DictionaryType, Path
from perdure_training.checkpoint.staging import is_split

_NOT_A_TEXT = re.compile(r"[-+]?[0-9.]+|None|True|False|\(.*")
"""Keys that were other values than texts, for all that a checkpoint says."""


def as_saved(
    value: Any, saved: Mapping[Path, Any], *, is_object: bool, types: Mapping[Path, DictionaryType] | None = None
) -> Any:
    """Returns a value with room for what was saved of it.

    Args:
        value: The value, or what an object's `state_dict` returns. A part of it that was saved in the same form stays.
        saved: What a checkpoint's metadata says of each part, by its path in the value.
        is_object: Whether an object judges what it is given. Otherwise only the state of optimizers takes the structure
            that was saved. Dictionaries take the values that they lack if these have no tensors, and a `Counter` or a
            `defaultdict` takes any: what else is missing would be lost unnoticed.
        types: The types of the dictionaries that were saved, by their paths in the value.
    """
    return _as_saved(value, saved, _Types(types or {}), follows=is_object)


@dataclass(frozen=True)
class _Types:
    """The types of dictionaries within a value."""

    known: Mapping[Path, DictionaryType]
    at: Path = ()
    """Where the value is."""

    def of(self, name: str | int) -> _Types:
        return _Types(self.known, (*self.at, name))

    @property
    def here(self) -> DictionaryType | None:
        return self.known.get(self.at)


def _as_saved(value: Any, saved: Mapping[Path, Any], types: _Types, *, follows: bool, numbered: bool = False) -> Any:
    """With `follows` the result has what was saved and nothing else; with `numbered`, new keys may be numbers."""
    if () in saved:
        return _leaf(value, saved[()]) if follows else value
    parts: dict[str | int, dict[Path, Any]] = {}
    for path, described in saved.items():
        parts.setdefault(path[0], {})[path[1:]] = described
    if any(isinstance(name, int) for name in parts):
        return _list_as_saved(value, parts, types, follows=follows)
    if not isinstance(value, dict) and not (follows and value is None):
        return value
    held = cast("dict[Any, Any]", value or {})
    makes = isinstance(value, (Counter, defaultdict))
    known = types.here.keys if types.here is not None else {}
    of_optimizer = held.keys() >= {"state", "param_groups"}
    found: dict[Any, Any] = {"state": {}} if of_optimizer else {}
    keys = {str(key): key for key in held}
    for name, part in parts.items():
        is_state = of_optimizer and name == "state"
        if name in keys:
            key = keys[str(name)]
            found[key] = _as_saved(held[key], part, types.of(name), follows=follows or is_state, numbered=is_state)
        elif (follows or makes or not _has_tensors(part)) and (
            numbered or name in known or not _NOT_A_TEXT.fullmatch(str(name))
        ):
            key = known.get(str(name), int(name) if numbered and str(name).isdigit() else name)
            found[key] = _as_saved(None, part, types.of(name), follows=True)
    # An empty dictionary has no place in a checkpoint.
    kept: dict[Any, Any] = {key: one for key, one in held.items() if not (follows and parts) or _is_empty(one)}
    both = kept | found
    return both if value is not None or types.here is None else types.here.make(both)


def _has_tensors(part: Mapping[Path, Any]) -> bool:
    return any(isinstance(described, TensorStorageMetadata) for described in part.values())


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not cast("dict[Any, Any]", value)


def _list_as_saved(value: Any, parts: Mapping[str | int, Mapping[Path, Any]], types: _Types, *, follows: bool) -> Any:
    held = cast("list[Any]", value) if isinstance(value, list) else []
    if set(parts) != {*range(len(parts))} or not (follows or len(held) == len(parts)):
        return cast("Any", value)
    held = held + [None] * (len(parts) - len(held))
    found: list[Any] = [
        _as_saved(held[place], parts[place], types.of(place), follows=follows) for place in range(len(parts))
    ]
    return found


def _leaf(value: Any, described: Any) -> Any:
    """Room for a value: a tensor, or anything for other values, which are replaced."""
    if not isinstance(described, TensorStorageMetadata):
        return value if isinstance(value, torch.Tensor) else None
    dtype = described.properties.dtype
    if isinstance(value, torch.Tensor) and (is_split(value) or (value.dtype, value.shape) == (dtype, described.size)):
        return value
    if len(described.chunks) > 1:
        # A split tensor, of which only the state could say how.
        return value
    return torch.empty(described.size, dtype=dtype)


def set_value(value: Any, path: Path, content: object) -> None:
    """Sets what is at a path within dictionaries and lists, whose keys may be other values than texts."""
    for name in path[:-1]:
        value = value[_key(value, name)]
    value[_key(value, path[-1])] = content


def _key(value: Any, name: str | int) -> Any:
    if isinstance(value, list) or name in value:
        return name
    if str(name).isdigit() and int(name) in value:
        # Not by a search, which for each of an optimizer's many parameters would take as long as there are of them.
        return int(name)
    return next((key for key in value if str(key) == name), name)
