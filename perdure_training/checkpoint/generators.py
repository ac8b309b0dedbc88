"""The state of the random number generators of this process, as an object that a checkpoint can contain."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


class Generators:
    """The default generators of Python, NumPy (where it is imported), and torch on CPU and GPUs.

    After a restore a rank draws the numbers that it would have drawn. A rank that takes over another rank's state draws
    that rank's numbers.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the present state."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = numpy.random.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to an earlier state."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            torch.cuda.set_rng_state_all(state["cuda"])
        if "numpy" in state:
            # Not a dependency: the script that saved this state uses it.
            importlib.import_module("numpy").random.set_state(state["numpy"])
