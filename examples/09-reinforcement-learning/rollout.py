"""Plays episodes with the trainer's newest policy, and puts them into the queue until it is closed.

The seed of an episode is its number in the queue: a process that starts again plays what comes next, and nothing twice.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from grid import Trajectory
from world import make_policy, play

from perdure_training import roles
from perdure_training.roles.queue import Producer, QueueClosed

OUT = Path(os.environ["OUT"])
RANK = int(os.environ["RANK"])
PAUSE = float(os.environ.get("PAUSE", "0.02"))
"""Seconds that an episode takes longer, as if it were one of a large model."""
MINUTE = timedelta(minutes=1)


class Progress:
    """Lets others ask how far this process is, and the job see that it runs."""

    def played(self) -> int:
        return queue.next


def score(trajectory: Trajectory) -> float:
    while True:
        try:
            return roles.call(
                "reward", "score", len(trajectory.actions), trajectory.reached, timeout=MINUTE, wait=MINUTE
            )
        except (roles.RoleUnavailable, roles.CallTimeout) as problem:
            print("asking again:", problem, flush=True)
            time.sleep(0.2)


torch.set_num_threads(1)
queue = Producer(OUT / "trajectories", capacity=64)
policy, weights, loaded = make_policy(), OUT / "weights.pt", 0.0
roles.export(Progress())
with suppress(QueueClosed):
    while True:
        if weights.exists() and (changed := weights.stat().st_mtime) > loaded:
            policy.load_state_dict(torch.load(weights, weights_only=True))
            loaded = changed
        trajectory = play(policy, f"{RANK}-{queue.next}", seed=queue.next * 1000 + RANK)
        trajectory.score = score(trajectory)
        time.sleep(PAUSE)
        queue.put(trajectory, timeout=timedelta(minutes=10))
