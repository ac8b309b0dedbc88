"""What a checkpoint needs of optimizers beyond their own `load_state_dict`: state to load into, and types as saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from perdure_training.checkpoint.staging import is_split


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Makes an optimizer of split parameters that has made no step create its state; parameters and learning rates stay
    as they are.

    How the state of a parameter is split, no checkpoint says. Other optimizers are given what was saved as it is, and
    make no step, which some cannot make without a loss, and others not without changing their parameters.
    `torch.distributed.checkpoint.state_dict` does the same for all. Where nothing is loaded, `optimizer.state` must be
    cleared: it has counted a step.

    Returns:
        Whether the optimizer had no state before, and has one now.
    """
    if optimizer.state:
        return False
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    if not any(map(is_split, parameters)) or any(parameter.grad is not None for parameter in parameters):
        # With gradients, a step would change the parameters.
        return False
    rates: list[Any] = []
    for group in optimizer.param_groups:
        rates.append(group.get("lr"))
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    _step_without_hooks(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    return True


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """It is no step of the training: what counts steps, or averages the parameters after each, must not see it."""
    step = cast("Callable[..., Any]", type(optimizer).step)
    if getattr(step, "hooked", False):
        step = cast("Any", step).__wrapped__
    step(optimizer)


def keep_types(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Gives an optimizer that has loaded a state the types that were saved.

    torch's `load_state_dict` converts all that belongs to a parameter to that one's type: master copies and moments of
    bfloat16 parameters lose most of their bits, and numbers of 8 bits become floats. An optimizer with a
    `load_state_dict` of its own knows better.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        if number in saved["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _of_types(saved["state"][number], optimizer.state[parameter])


def _of_types(saved: Any, loaded: Any) -> Any:
    """What was loaded, with the type of what was saved."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        same = is_split(loaded) or type(loaded) is type(saved)
        return loaded if same and loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        values = cast("dict[Any, Any]", saved)
        return {name: _of_types(values.get(name), one) for name, one in cast("dict[Any, Any]", loaded).items()}
    if isinstance(saved, list) and isinstance(loaded, list):
        pairs = zip(cast("list[Any]", saved), cast("list[Any]", loaded), strict=True)
        return [_of_types(one, other) for one, other in pairs]
    return loaded
