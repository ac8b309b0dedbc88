"""Training steps with and without events, in turn in one process: what a difference between two runs would hide."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from perdure_training.events import TrainerEvents

STEPS = 20
"""Steps of a block; blocks with and without events alternate."""


@dataclass(frozen=True)
class Overhead:
    """The steps of all blocks."""

    step_ms: float
    """A step without events, the median of the blocks."""
    pairs: tuple[float, ...]
    """The time of each block with events, divided by that of its neighbor without."""

    @property
    def percent(self) -> float:
        """What events add to a step: the median of the pairs."""
        return (median(self.pairs) - 1) * 100

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the pairs, in percent."""
        ordered = sorted(self.pairs)
        return tuple((ordered[len(ordered) * part // 4] - 1) * 100 for part in (1, 3))  # pyright: ignore[reportReturnType]


def measure_overhead(events: TrainerEvents, *, pairs: int) -> Overhead:
    """Measures steps of a small network on one thread.

    Args:
        events: Gets a span and the metrics of each step.
        pairs: The number of blocks with events, and of those without.
    """
    step = _training()
    for _ in range(STEPS):
        step()
    silent, loud = list[float](), list[float]()
    for pair in range(pairs):
        # The order alternates, so that neither kind gains an advantage.
        for with_events in (False, True) if pair % 2 else (True, False):
            began = time.perf_counter()
            for number in range(STEPS):
                if with_events:
                    with events.step(step=number):
                        loss = step()
                    events.metrics(step=number, loss=loss, learning_rate=0.1)
                else:
                    step()
            (loud if with_events else silent).append(time.perf_counter() - began)
    ratios = tuple(with_events / without for with_events, without in zip(loud, silent, strict=True))
    return Overhead(step_ms=median(silent) / STEPS * 1000, pairs=ratios)


def _training() -> Callable[[], float]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(256, 512)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
