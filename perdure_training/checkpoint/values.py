"""The values of a training state: what is saved of them, and how they take it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from perdure_training.checkpoint.staging import meshes_of, read_state
from perdure_training.snapshots.arena import Slot


def capture(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state dicts of objects, and other values as they are."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}


def load_snapshot(slot: Slot, state: MutableMapping[str, Any]) -> None:
    """Loads a snapshot that was verified.

    Raises:
        KeyError: if it has other names.
    """
    header = slot.header()
    assert header is not None, "it was verified, and only this rank writes it"
    saved = read_state(slot.read(), index_at=header.index_at, meshes=meshes_of(capture(state)))
    if saved.keys() != state.keys():
        raise KeyError(f"the snapshot has {sorted(saved)}, the state has {sorted(state)}: restore what was saved")
    put_into(state, saved)


def put_into(state: MutableMapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives objects and tensors what was saved of them; other values are replaced."""
    for name, value in saved.items():
        target = state[name]
        if isinstance(target, torch.nn.Module):
            # It copies the tensors itself, all others may keep them.
            target.load_state_dict(value)
        elif isinstance(target, torch.Tensor):
            with torch.no_grad():
                target.copy_(value)
        elif hasattr(target, "load_state_dict"):
            target.load_state_dict(copy.deepcopy(value))
        else:
            state[name] = copy.deepcopy(value)
