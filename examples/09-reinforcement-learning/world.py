"""The policy, which trainer and rollout share: an agent finds its way to a goal on a grid."""

from __future__ import annotations

import random

import torch
from grid import LONGEST, MOVES, SIZE, Trajectory
from torch import Tensor, nn


def make_policy() -> nn.Module:
    """Returns a policy with the weights that all processes begin with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, len(MOVES)))


def play(policy: nn.Module, name: str, seed: int) -> Trajectory:
    """Plays an episode: the same one for the same policy and seed."""
    chance = random.Random(seed)
    x, y, to_x, to_y = (chance.randrange(SIZE) for _ in range(4))
    trajectory = Trajectory(name)
    with torch.no_grad():
        while (x, y) != (to_x, to_y) and len(trajectory.actions) < LONGEST:
            observation = [(to_x - x) / SIZE, (to_y - y) / SIZE]
            chances = torch.softmax(policy(torch.tensor(observation)), 0).tolist()
            action = chance.choices(range(len(MOVES)), chances)[0]
            trajectory.observations.append(observation)
            trajectory.actions.append(action)
            x = min(max(x + MOVES[action][0], 0), SIZE - 1)
            y = min(max(y + MOVES[action][1], 0), SIZE - 1)
    trajectory.reached = (x, y) == (to_x, to_y)
    return trajectory


def loss_of(policy: nn.Module, trajectories: list[Trajectory], baseline: float) -> Tensor:
    """Returns the loss whose gradient makes the actions of good episodes likelier, and keeps the others possible."""
    played = [one for one in trajectories if one.actions]
    observations = torch.tensor([row for one in played for row in one.observations])
    actions = torch.tensor([action for one in played for action in one.actions])
    gains = torch.tensor([one.score - baseline for one in played for _ in one.actions])
    gains = (gains - gains.mean()) / (gains.std() + 1e-3)
    chances = torch.log_softmax(policy(observations), 1)
    entropy = -(chances * chances.exp()).sum(1).mean()
    return -(gains * chances.gather(1, actions.unsqueeze(1)).squeeze(1)).mean() - 0.01 * entropy
