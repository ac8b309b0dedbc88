"""The types and the keys of a state's dictionaries, which the layout of a checkpoint in storage has no place for.

A `Counter` by class that grows while a training runs comes back with its type, and numbers as keys as numbers. They are
stored with a checkpoint's metadata, in a form that needs none of the script's classes before Perdure reads it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata

_TYPES = "perdure_types"
"""Attribute of a checkpoint's metadata, which torch pickles with it and does not know."""

Path = tuple[str | int, ...]
"""What leads to a value, as a checkpoint has it: the texts of the keys of dictionaries, and places in lists."""


@dataclass(frozen=True)
class DictionaryType:
    """What a dictionary is apart from its values."""

    empty: dict[Any, Any]
    """One of its type without values."""
    keys: Mapping[str, Any]
    """The keys that are no texts, by their texts."""

    def make(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns a dictionary of the type with these values."""
        made = self.empty.copy()
        # Not `update`, by which a `Counter` adds.
        for key, value in values.items():
            made[key] = value
        return made


def types_in(state: Mapping[str, Any]) -> dict[Path, bytes]:
    """Describes the dictionaries of a state that are of types of their own, or whose keys are not all texts."""
    found: dict[Path, bytes] = {}
    for name, value in state.items():
        _describe((str(name),), value, found)
    return found


def record_types(metadata: Metadata, types: Iterable[Mapping[Path, bytes]]) -> None:
    """Records the types in a checkpoint's metadata.

    Args:
        metadata: The checkpoint's.
        types: Those of each rank; of several for one dictionary the first rank's count.
    """
    recorded: dict[Path, bytes] = {}
    for of_rank in types:
        recorded = {**of_rank, **recorded}
    setattr(metadata, _TYPES, recorded)


def recorded_types(metadata: Metadata) -> dict[Path, DictionaryType]:
    """Returns the types that a checkpoint's metadata has, as far as the script still has their classes."""
    found: dict[Path, DictionaryType] = {}
    for path, content in cast("dict[Path, bytes]", getattr(metadata, _TYPES, {})).items():
        with contextlib.suppress(Exception):
            found[path] = DictionaryType(*pickle.loads(content))
    return found


def _describe(path: Path, value: Any, found: dict[Path, bytes]) -> None:
    if isinstance(value, dict):
        values = cast("dict[Any, Any]", value)
        keys = {str(key): key for key in values if not isinstance(key, str)}
        if keys or type(values) is not dict:
            # A type without a name, or a key: its values are stored as those of a plain dictionary.
            with contextlib.suppress(Exception):
                found[path] = pickle.dumps((_empty(values), keys))
        for key, inner in values.items():
            _describe((*path, str(key)), inner, found)
    elif isinstance(value, list):
        for place, inner in enumerate(cast("list[Any]", value)):
            if isinstance(inner, (dict, list)):
                _describe((*path, place), inner, found)


def _empty(value: dict[Any, Any]) -> dict[Any, Any]:
    if type(value) is defaultdict:
        return defaultdict(value.default_factory)
    return type(value)() if type(value) in (Counter, OrderedDict) else {}
