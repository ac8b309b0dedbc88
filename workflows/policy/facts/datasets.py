"""A dataset has set shards aside that failed repeatedly; the job names them to its users."""

from __future__ import annotations

from perdure.contract import ShardsSetAside
from perdure.workflows.policy.state.job import RoleInJob

_MOST_DATASETS = 32
"""Datasets whose failed shards the job names."""


def on_shards_set_aside(state: RoleInJob, aside: ShardsSetAside) -> RoleInJob:
    """Takes in the samples of a dataset that are not processed."""
    known, reported = state.unprocessed, aside.unprocessed
    if reported.dataset not in known and len(known) >= _MOST_DATASETS:
        return state
    return state.replace(unprocessed={**known, reported.dataset: reported})
