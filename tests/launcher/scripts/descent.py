"""A PyTorch optimizer for scripts that are started hundreds of times.

Its steps are counted like those of any other optimizer. PyTorch's own optimizers import PyTorch's compiler when they
are created, which takes as long as importing PyTorch itself; the scripts in `kinds` and the examples use those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Descent(torch.optim.Optimizer):
    """Goes down the gradient, and forgets it."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(self.defaults | param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
                parameter.grad = None
