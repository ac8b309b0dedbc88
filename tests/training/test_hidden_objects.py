"""A model that a restore could not reach is refused with its place, before anything is trained."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from perdure_training.checkpoint import Checkpointer


@dataclass
class Run:
    """As many scripts keep what belongs together, without `state_dict`."""

    model: Any = None
    epoch: int = 0
    others: dict[str, Any] = field(default_factory=dict)


class Slots:
    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model


class LeavesItOut(Run):
    """Its pickle does not have the model."""

    def __getstate__(self) -> dict[str, Any]:
        return {"epoch": self.epoch}


class KnowsItself(Run):
    """Saves and restores what it contains."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


Pair = namedtuple("Pair", "one other")
LINEAR = nn.Linear(2, 2)


@cache
def adam() -> torch.optim.Optimizer:
    """An optimizer; torch imports its compiler for the first one, which takes seconds."""
    return torch.optim.Adam(LINEAR.parameters())


@cache
def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(adam(), 1)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        (lambda: {"run": Run(LINEAR)}, "run.model"),
        (lambda: {"run": Run(others={"best": [adam()]})}, "run.others['best'][0]"),
        (lambda: {"run": Run(others={"of": Slots(scheduler())})}, "run.others['of'].model"),
        (lambda: {"runs": [0, {"second": Run(LINEAR)}]}, "runs[1]['second'].model"),
        (lambda: {"pair": Pair(LINEAR, Run(nn.BatchNorm1d(2, affine=False)))}, "pair[1].model"),
        (lambda: {"model": LINEAR, "run": Run(LINEAR)}, "run.model"),
    ],
    ids=["module", "optimizer", "scheduler", "in containers", "buffers alone", "also by itself"],
)
def test_an_object_within_one_without_state_dict_is_refused_by_its_place(
    state: Callable[[], dict[str, Any]], place: str
):
    with pytest.raises(TypeError, match="state_dict and load_state_dict") as refused:
        Checkpointer().restore(state())
    assert f"state: {place} is within" in str(refused.value)


@pytest.mark.parametrize(
    "state",
    [
        lambda: {"run": KnowsItself(LINEAR)},
        lambda: {"run": LeavesItOut(LINEAR)},
        lambda: {"run": Run(nn.CrossEntropyLoss())},
        lambda: {"run": Run(torch.ones(3), others={"kind": nn.Linear})},
        lambda: {"all": [LINEAR, {"optimizer": adam()}, (scheduler(),)], "losses": [0.5] * 1000, "step": 3},
        lambda: {"cannot be pickled": Run(others={"call": lambda: LINEAR})},
    ],
    ids=["knows itself", "not in the pickle", "nothing to restore", "tensors and types", "reachable", "lambda"],
)
def test_what_a_restore_reaches_or_need_not_reach_is_taken(state: Callable[[], dict[str, Any]]):
    assert Checkpointer().restore(state()) is None


def test_a_state_that_contains_itself_is_looked_at_once():
    state: dict[str, Any] = {"model": LINEAR, "rest": []}
    state["rest"].append(state["rest"])
    assert Checkpointer().restore(state) is None
