"""What datasets tell their job: shards that failed repeatedly and are set aside, and that nothing can be read."""

from __future__ import annotations

from perdure.contract import ShardsSetAside
from perdure.workflows.policy.state.job import RoleInJob

_MOST_DATASETS = 32
"""Datasets of which the job names what fails."""


def on_shards_set_aside(state: RoleInJob, report: ShardsSetAside) -> RoleInJob:
    """Takes in the samples of a dataset that are not processed, and whether it can be read."""
    name, away = report.unprocessed.dataset, report.unreadable
    if report.unprocessed.samples and (name in state.unprocessed or len(state.unprocessed) < _MOST_DATASETS):
        state = state.replace(unprocessed={**state.unprocessed, name: report.unprocessed})
    if away == state.unreadable.get(name):
        return state
    others = {other: known for other, known in state.unreadable.items() if other != name}
    if away is None:
        return state.replace(unreadable=others)
    return state.replace(unreadable={**others, name: away}) if len(others) < _MOST_DATASETS else state
