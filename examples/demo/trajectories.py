"""What the reinforcement learning of `examples/09-reinforcement-learning` has written down, and what that shows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

QUEUE = "trajectories"


@dataclass(frozen=True)
class Made:
    """One step of one rank of the trainer, as far as it was begun."""

    time: float
    generation: int
    step: int
    trajectories: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """The steps that made the final model: of a step that was made again, the newest."""

    of_steps: dict[int, tuple[str, ...]]
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    """For each producer, the number before which all its trajectories count as trained on."""

    @property
    def doubled(self) -> int:
        """Trajectories that were trained on twice."""
        counts = Counter(name for names in self.of_steps.values() for name in names)
        return sum(count - 1 for count in counts.values())

    @property
    def lost(self) -> int:
        """Trajectories that count as trained on, and are in no step."""
        seen = {name for names in self.of_steps.values() for name in names}
        return sum(
            f"{producer}-{number}" not in seen for producer, end in self.consumed.items() for number in range(end)
        )


def read_made(out: Path) -> list[Made]:
    """Returns the steps that ranks have begun, in the order of time, as far as lines are complete."""
    made: list[Made] = []
    for path in out.glob("trained-*.csv"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                time, generation, step, names = line.rstrip("\n").split(",")
                made.append(Made(float(time), int(generation), int(step), tuple(names.split())))
    return sorted(made, key=lambda one: one.time)


def read_trained(out: Path) -> Trained:
    """Returns what the model was made of so far."""
    # Read before the steps: a step is written down before it counts as consumed.
    consumed = read_position(out)
    newest: dict[int, tuple[int, tuple[str, ...]]] = {}
    for made in read_made(out):
        generation, names = newest.get(made.step, (made.generation, ()))
        if made.generation >= generation:
            newest[made.step] = (made.generation, made.trajectories + (names if made.generation == generation else ()))
    return Trained({step: names for step, (_, names) in newest.items()}, consumed)


def read_position(out: Path) -> dict[str, int]:
    """Returns how many trajectories of each producer were trained on; see `perdure_training.roles.queue`."""
    try:
        return json.loads((out / QUEUE / "position.json").read_text())["next"]
    except FileNotFoundError:
        return {}


def put_by(out: Path, producer: int) -> int:
    """Returns how many trajectories a producer has put."""
    try:
        return int((out / QUEUE / str(producer) / "next").read_text())
    except FileNotFoundError:
        return 0
