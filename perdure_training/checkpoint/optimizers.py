"""Gives a new optimizer the state that it has after a step, so that a checkpoint can be loaded into it."""

from __future__ import annotations

from typing import Any

import torch


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Makes an optimizer that has made no step create its state; parameters and learning rates stay as they are.

    A state dict lists tensors only once they exist, and a checkpoint is loaded into the tensors that a state dict
    lists. `torch.distributed.checkpoint.state_dict` does the same. Where nothing is loaded, `optimizer.state` must be
    cleared: it has counted a step.

    Returns:
        Whether the optimizer had no state before, and has one now.
    """
    if optimizer.state:
        return False
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    if any(parameter.grad is not None for parameter in parameters):
        # A step would change the parameters.
        return False
    rates: list[Any] = []
    for group in optimizer.param_groups:
        rates.append(group.get("lr"))
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    return True
