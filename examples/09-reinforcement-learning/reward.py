"""Scores trajectories for the other roles: 1 for the goal at once, 0 for none."""

from __future__ import annotations

from grid import LONGEST

from perdure_training import roles


class Reward:
    """What the rollout calls. Any process of the role answers alike, so a call can be repeated."""

    def score(self, steps: int, reached: bool) -> float:
        return 1 - steps / LONGEST if reached else 0.0


roles.export(Reward()).join()
