"""Training steps with and without telemetry, in turn in one process: what a difference between two runs would hide."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from perdure_training import report
from perdure_training.events import TrainerEvents

STEPS = 32
"""Steps of a block; blocks with and without telemetry alternate. A block is longer than the second after which events
are sent to a collector: a shorter one would have more requests than a training has."""


@dataclass(frozen=True)
class Ratio:
    """Blocks with telemetry, each divided by its neighbor without."""

    pairs: tuple[float, ...]

    @property
    def percent(self) -> float:
        """What telemetry adds: the median of the pairs."""
        return (median(self.pairs) - 1) * 100

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of that median, whatever the distribution is."""
        ordered, count = sorted(self.pairs), len(self.pairs)
        half = 0.98 * math.sqrt(count)
        low, high = max(math.floor(count / 2 - half), 0), min(math.ceil(count / 2 + half), count - 1)
        return (ordered[low] - 1) * 100, (ordered[high] - 1) * 100


@dataclass(frozen=True)
class Overhead:
    """The steps of all blocks."""

    step_ms: float
    """A step without telemetry, the median of the blocks."""
    wall: Ratio
    """The ratio of the elapsed time."""
    cpu: Ratio
    """The ratio of the process's processor time, which other programs of the machine change less."""


def measure_overhead(events: TrainerEvents, *, pairs: int) -> Overhead:
    """Measures steps of a small network on one thread.

    Args:
        events: Gets a span and the metrics of each step.
        pairs: The number of blocks with telemetry, and of those without.
    """
    step = training()
    for _ in range(STEPS):
        step()
    silent, loud = list[tuple[float, float]](), list[tuple[float, float]]()
    for pair in range(pairs):
        # The order alternates, so that neither kind gains an advantage.
        for telemetry in (False, True) if pair % 2 else (True, False):
            wall, cpu = time.perf_counter(), time.process_time()
            for number in range(STEPS):
                if telemetry:
                    with events.step(step=number):
                        loss = step()
                    events.metrics(step=number, loss=loss, learning_rate=0.1)
                    report(step=number, loss=loss, mfu=0.4)
                else:
                    step()
            wall = time.perf_counter() - wall
            # What waits is exported in no block's time, and belongs to the processor time of this one.
            events.flush()
            (loud if telemetry else silent).append((wall, time.process_time() - cpu))
    return Overhead(
        step_ms=median(wall for wall, _ in silent) / STEPS * 1000,
        wall=_ratio([wall for wall, _ in loud], [wall for wall, _ in silent]),
        cpu=_ratio([cpu for _, cpu in loud], [cpu for _, cpu in silent]),
    )


def _ratio(loud: Sequence[float], silent: Sequence[float]) -> Ratio:
    return Ratio(tuple(one / other for one, other in zip(loud, silent, strict=True)))


def training() -> Callable[[], float]:
    """Returns a step of a small network, on one thread."""
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
