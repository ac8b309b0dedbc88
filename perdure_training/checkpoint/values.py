"""The values of a training state: what is saved of them, and how they take it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from perdure_training.checkpoint.staging import meshes_of, read_state
from perdure_training.snapshots.arena import PAGE, Slot
from perdure_training.snapshots.private_map import PrivateMap


def capture(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state dicts of objects, and other values as they are."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}


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
        raise KeyError(f"the snapshot has {sorted(saved)}, the state has {sorted(state)}: restore what was saved")
    put_into(state, saved)
    return memory


def put_into(state: MutableMapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives objects and tensors what was saved of them, which they may keep; other values are replaced."""
    for name, value in saved.items():
        target = state[name]
        if isinstance(target, torch.Tensor):
            _check(name, target, value)
            with torch.no_grad():
                target.copy_(value)
        elif hasattr(target, "load_state_dict"):
            target.load_state_dict(value)
        else:
            state[name] = value


def _check(name: str, target: torch.Tensor, value: Any) -> None:
    """Raises KeyError if a tensor cannot take a saved value as it is: a copy would convert or repeat elements."""
    found = _form(value) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != _form(target):
        raise KeyError(f"{name}: saved was {found}, the state has {_form(target)}: restore what was saved")


def _form(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} of shape {list(tensor.shape)}"
    return f"{text}, scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}" if tensor.is_quantized else text


def own_values(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Copies values that `put_into` must not give to a state because they are parts of it: an object that clears itself
    first would lose them. Modules and tensors copy what they are given."""
    takes = (torch.nn.Module, torch.Tensor)
    return {name: value if isinstance(state[name], takes) else copy.deepcopy(value) for name, value in saved.items()}
