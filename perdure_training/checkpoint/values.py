"""The values of a training state: what is saved of them, and how they take it back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, cast

import torch

from perdure_training.checkpoint.optimizers import keep_types
from perdure_training.checkpoint.own_generators import is_generator, set_state, state_of
from perdure_training.checkpoint.staging import is_plain, is_split, meshes_of, read_state
from perdure_training.checkpoint.tensor_types import copy_tensor, kind_of, takes
from perdure_training.snapshots.arena import PAGE, Slot
from perdure_training.snapshots.private_map import PrivateMap

_REMEDY: Final = "restore what was saved"
PLAIN: Final = {int, float, str, bytes, bool, type(None)}
"""What lists of a million values have, such as the losses so far."""


def capture(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state dicts of objects, also of those in dictionaries, lists and tuples, and other values as they
    are."""
    return {name: _captured(value) for name, value in state.items()}


def _captured(value: Any) -> Any:
    if is_object(value):
        return value.state_dict()
    if is_generator(value):
        return state_of(value)
    if not _has_objects(value):
        return value
    if isinstance(value, dict):
        return {name: _captured(one) for name, one in cast("dict[Any, Any]", value).items()}
    found = [_captured(one) for one in cast("list[Any]", value)]
    return _tuple_as(cast("tuple[Any, ...]", value), found) if isinstance(value, tuple) else found


def is_object(value: object) -> bool:
    """Whether a value is saved by its `state_dict`."""
    return hasattr(value, "state_dict") and not isinstance(value, type)


def objects_in(value: object) -> list[Any]:
    """Returns the objects with `state_dict`, and the generators of random numbers, in a value, also in dictionaries,
    lists and tuples within it."""
    found: list[Any] = []
    _find_objects(value, found, set())
    return found


def _has_objects(value: object) -> bool:
    return isinstance(value, (dict, list, tuple)) and bool(objects_in(cast("object", value)))


def _tuple_as(tuple_: tuple[Any, ...], parts: Iterable[Any]) -> Any:
    """A tuple of the same kind, which may name its parts."""
    return getattr(tuple_, "_make", tuple)(parts)


def _find_objects(value: object, found: list[Any], seen: set[int]) -> None:
    if is_object(value) or is_generator(value):
        found.append(value)
    elif isinstance(value, (dict, list, tuple)) and id(cast("object", value)) not in seen:
        # A value may contain itself.
        seen.add(id(cast("object", value)))
        parts = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        if not PLAIN.issuperset(map(type, parts)):
            for part in parts:
                _find_objects(part, found, seen)


def load_snapshot(slot: Slot, state: MutableMapping[str, Any]) -> PrivateMap:
    """Loads a snapshot that was verified. It must stay as it is until the returned object's `detach` has returned: what
    objects keep of it is not copied yet.

    Raises:
        KeyError: if it has other names.
    """
    header = slot.header()
    assert header is not None, "it was verified, and only this rank writes it"
    memory = slot.map_privately()
    saved = read_state(
        lambda offset, size: memory.piece(PAGE + offset, size),
        index_at=header.index_at,
        size=header.size,
        meshes=meshes_of(capture(state)),
    )
    if saved.keys() != state.keys():
        raise KeyError(f"the snapshot has {sorted(saved)}, the state has {sorted(state)}: {_REMEDY}")
    put_into(state, saved)
    return memory


def put_into(state: MutableMapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives objects, generators, tensors, dictionaries and lists what was saved of them, which they may keep; other
    values are replaced.

    Raises:
        KeyError: if one of them cannot take it as it is.
    """
    for name, value in saved.items():
        target = state[name]
        if isinstance(target, torch.Tensor):
            _check(name, target, value)
            copy_tensor(target, value)
        else:
            state[name] = _put(name, target, value)


def _put(name: str, target: Any, value: Any) -> Any:
    """Returns what takes the place of `target`: itself, where it can be changed."""
    if isinstance(target, torch.Tensor):
        if not isinstance(value, torch.Tensor) or not takes(target, value):
            return value
        copy_tensor(target, value)
        return target
    if hasattr(target, "load_state_dict") and not isinstance(target, type):
        _load(name, target, value)
        return target
    if is_generator(target):
        set_state(name, target, value)
        return target
    if isinstance(target, (dict, list, tuple)) and isinstance(value, (dict, list, tuple)):
        return _put_each(name, cast("Any", target), cast("Any", value))
    return value


def _put_each(name: str, target: Any, value: Any) -> Any:
    """As `_put`, for values that contain others. The script may hold on to each of them."""
    has_objects = _has_objects(target)
    names, saved = _names_in(target), _names_in(value)
    if has_objects and (names != saved or isinstance(target, dict) != isinstance(value, dict)):
        raise KeyError(
            f"{name}: saved was a {_words(value, saved)}, the state has a {_words(target, names)}: {_REMEDY}"
        )
    both_dictionaries = isinstance(target, dict) and isinstance(value, dict)
    if not has_objects and type(target) is not type(value) and not both_dictionaries:
        return value
    if isinstance(target, dict):
        held = cast("dict[Any, Any]", target)
        # A checkpoint in storage has no types of dictionaries: what a `defaultdict` makes is of its type again.
        make = getattr(held, "default_factory", None)
        taken: dict[Any, Any] = {}
        for key, one in value.items():
            if key in held:
                taken[key] = _put(f"{name}.{key}", held[key], one)
            elif make is not None and isinstance(one, dict):
                taken[key] = _put(f"{name}.{key}", make(), cast("Any", one))
            else:
                taken[key] = one
        held.clear()
        held.update(taken)
        return held
    if names != saved:
        parts = list(value)
    else:
        parts = [_put(f"{name}.{place}", *pair) for place, pair in enumerate(zip(target, value, strict=True))]
    if isinstance(target, list):
        target[:] = parts
        return cast("list[Any]", target)
    return _tuple_as(target, parts)


def _names_in(value: Any) -> list[Any]:
    """The keys of a dictionary, in any order, or the places of a list or tuple."""
    return sorted(cast("dict[Any, Any]", value), key=repr) if isinstance(value, dict) else list(range(len(value)))


def _words(value: Any, names: Sequence[Any]) -> str:
    return f"{type(value).__name__} of {', '.join(map(str, names[:8]))}" if names else f"{type(value).__name__}"


def _load(name: str, target: Any, value: Any) -> None:
    """Has an object load its state dict, with the types that were saved."""
    if isinstance(target, torch.nn.Module):
        _check_types(name, target, value)
    target.load_state_dict(value)
    if isinstance(target, torch.optim.Optimizer):
        keep_types(target, value)
    elif isinstance(target, torch.nn.Module):
        for part, found in target.state_dict().items():
            saved = value.get(part)
            if not isinstance(found, torch.Tensor) or not isinstance(saved, torch.Tensor):
                continue
            if found.dtype != saved.dtype:
                raise KeyError(f"{name}.{part}: saved was {saved.dtype}, the state has {found.dtype}: {_REMEDY}")
            if not (is_plain(found) or is_split(found)) and takes(found, saved):
                # Its own copy may have computed it anew.
                copy_tensor(found, saved)


def _check_types(name: str, target: torch.nn.Module, value: Any) -> None:
    """Refuses parameters that would be converted from a type of tensors to another one; nothing is changed yet."""
    for part, found in [*target.named_parameters(), *target.named_buffers()]:
        saved = value.get(part) if isinstance(value, dict) else None
        if isinstance(saved, torch.Tensor) and not is_split(found) and kind_of(found) is not kind_of(saved):
            raise KeyError(f"{name}.{part}: saved was a {_type(saved)}, the state has a {_type(found)}: {_REMEDY}")


def _check(name: str, target: torch.Tensor, value: Any) -> None:
    """Raises KeyError if a tensor cannot take a saved value as it is: a copy would convert or repeat elements."""
    found = _form(value) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != _form(target):
        raise KeyError(f"{name}: saved was {found}, the state has {_form(target)}: {_REMEDY}")


def _type(tensor: torch.Tensor) -> str:
    return kind_of(tensor).__name__


def _form(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} of shape {list(tensor.shape)}"
    if not (is_plain(tensor) or is_split(tensor)):
        text += f", a {_type(tensor)}"
    return f"{text}, scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}" if tensor.is_quantized else text


def own_values(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Copies values that `put_into` must not give to a state because they are parts of it: an object that clears itself
    first would lose them. Modules and tensors copy what they are given."""
    return {name: _own(state[name], value) for name, value in saved.items()}


def _own(target: Any, value: Any) -> Any:
    if isinstance(target, torch.nn.Module | torch.Tensor):
        return value
    if isinstance(target, dict) and isinstance(value, dict) and _has_objects(cast("object", target)):
        held = cast("dict[Any, Any]", target)
        return {name: _own(held.get(name), one) for name, one in cast("dict[Any, Any]", value).items()}
    return copy.deepcopy(cast("object", value))
