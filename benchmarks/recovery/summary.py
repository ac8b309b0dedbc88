"""Computes the published figures from the trials: medians, success rates, ratios to the better peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from pydantic import BaseModel

from .records import OURS, PEERS, Composition, Scenario, SystemName, TrialRecord

SINGLE_FAULTS = {"a": Scenario.WORKER, "b": Scenario.NODE_REPLACED, "c": Scenario.NODE_LOST}
"""Scenarios with one fault, by the names that the last line gives them."""


@dataclass(frozen=True)
class Cell:
    """All trials of one system in one scenario."""

    trials: int
    recovered: int
    median_seconds: float | None
    """The median of the trials that recovered; a hang has no duration."""
    slowest_seconds: float | None
    median_steps_redone: float | None = None
    median_caught_up_seconds: float | None = None
    errors: tuple[str, ...] = ()


class SteadyCost(BaseModel):
    """The cost of one kind of process while a job runs undisturbed."""

    what: str
    processes: int
    cpu_percent: float
    """Percent of one core, per process."""
    rss_mb: float
    """Resident memory per process."""
    private_mb: float = 0.0
    """What of it no other process shares."""


class Steady(BaseModel):
    """The cost of the control plane while a job runs undisturbed."""

    seconds: float
    costs: tuple[SteadyCost, ...]
    job_events_per_minute: float
    """History events of the TrainingJob workflow."""
    job_events_before: int = 0
    """Those of its start."""

    def cost_of(self, what: str) -> SteadyCost | None:
        return next((cost for cost in self.costs if cost.what == what), None)


class Headline(BaseModel):
    """The last line of the output."""

    a_ratio: float | None
    b_ratio: float | None
    c_ratio: float | None
    recovered: int
    runs: int
    lease_only_s: float | None
    agent_rss_mb: float | None
    agent_private_mb: float | None
    agent_cpu_pct: float | None
    decision_ms_p50: float | None
    a_p95_s: float | None = None
    """The 95th percentile of Perdure's trials of (a) that recovered."""
    d_recovered: tuple[bool, ...] = ()
    """The result of each of Perdure's trials of (d)."""
    e_recovered: tuple[bool, ...] = ()
    a_lost_steps: float | None = None
    """Steps that were made again, the median of Perdure's trials."""
    b_lost_steps: float | None = None
    c_lost_steps: float | None = None
    a_caught_up_s: float | None = None
    """Seconds until the job was past the step that it had, the median of Perdure's trials."""
    b_caught_up_s: float | None = None
    c_caught_up_s: float | None = None


def median_of(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def summarize(records: Sequence[TrialRecord], system: SystemName, scenario: Scenario) -> Cell | None:
    """Returns one cell of the table; None if there are no trials."""
    trials = [record for record in records if (record.system, record.scenario) == (system, scenario)]
    if not trials:
        return None
    seconds = [record.seconds for record in trials if record.recovered and record.seconds is not None]
    return Cell(
        trials=len(trials),
        recovered=sum(record.recovered for record in trials),
        median_seconds=median_of(seconds),
        slowest_seconds=max(seconds, default=None),
        median_steps_redone=median_of(record.steps_redone for record in trials if record.recovered),
        median_caught_up_seconds=median_of(record.caught_up_seconds for record in trials if record.recovered),
        errors=tuple(record.error for record in trials if record.error),
    )


def ratio_to_better_peer(records: Sequence[TrialRecord], scenario: Scenario) -> float | None:
    """Returns Perdure's median divided by the smallest median of a peer; peers that never recovered have none."""
    ours = summarize(records, SystemName.PERDURE, scenario)
    theirs = [
        cell.median_seconds
        for peer in PEERS
        if (cell := summarize(records, peer, scenario)) and cell.median_seconds is not None
    ]
    if ours is None or ours.median_seconds is None or not theirs:
        return None
    return ours.median_seconds / min(theirs)


def median_composition(records: Iterable[TrialRecord]) -> Composition:
    """Returns the median of each phase over the trials that measured it."""
    parts = [record.composition for record in records if record.recovered]
    return Composition(**{name: median_of(getattr(part, name) for part in parts) for name in Composition.model_fields})


def decision_seconds(records: Iterable[TrialRecord]) -> list[float]:
    """Returns the time that the control plane adds when there is nothing to wait for: after a rank was killed.

    It counts from the exit, as the node's launcher observed it, until the last surviving agent has the next world:
    agent, Temporal server, decision and back. The decision alone is too short for the workflow's own clock.
    """
    parts = [
        record.composition
        for record in records
        if (record.system, record.scenario) == (SystemName.PERDURE, Scenario.WORKER)
    ]
    return [
        part.commanded - part.happened for part in parts if part.commanded is not None and part.happened is not None
    ]


def seconds_of(records: Iterable[TrialRecord], scenario: Scenario) -> list[float]:
    """Returns the seconds of Perdure's trials that recovered."""
    ours = (record for record in records if (record.system, record.scenario) == (SystemName.PERDURE, scenario))
    return [record.seconds for record in ours if record.recovered and record.seconds is not None]


def recoveries(records: Iterable[TrialRecord], scenario: Scenario) -> tuple[bool, ...]:
    """Returns whether each of Perdure's trials recovered."""
    ours = (record for record in records if (record.system, record.scenario) == (SystemName.PERDURE, scenario))
    return tuple(record.recovered for record in ours)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that is not exceeded by at least this share of all."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


def headline(records: Sequence[TrialRecord], steady: Steady | None) -> Headline:
    ours = [record for record in records if record.system in OURS]
    withheld = [record for record in records if record.system is SystemName.PERDURE_WITHHELD]
    agent = steady.cost_of("agent") if steady else None
    decision = median_of(decision_seconds(records))

    cells = {name: summarize(records, SystemName.PERDURE, scenario) for name, scenario in SINGLE_FAULTS.items()}

    def rounded(value: float | None, digits: int) -> float | None:
        return None if value is None else round(value, digits)

    return Headline(
        a_ratio=rounded(ratio_to_better_peer(records, Scenario.WORKER), 3),
        b_ratio=rounded(ratio_to_better_peer(records, Scenario.NODE_REPLACED), 3),
        c_ratio=rounded(ratio_to_better_peer(records, Scenario.NODE_LOST), 3),
        recovered=sum(record.recovered for record in ours),
        runs=len(ours),
        lease_only_s=rounded(median_of(record.seconds for record in withheld), 2),
        agent_rss_mb=rounded(agent.rss_mb if agent else None, 1),
        agent_private_mb=rounded(agent.private_mb if agent else None, 1),
        agent_cpu_pct=rounded(agent.cpu_percent if agent else None, 2),
        decision_ms_p50=rounded(None if decision is None else decision * 1000, 1),
        a_p95_s=rounded(percentile(seconds_of(records, Scenario.WORKER), 0.95), 3),
        d_recovered=recoveries(records, Scenario.RANK_DURING_REPAIR),
        e_recovered=recoveries(records, Scenario.SLOW_TO_DIE),
        **{f"{name}_lost_steps": cell.median_steps_redone if cell else None for name, cell in cells.items()},
        **{
            f"{name}_caught_up_s": rounded(cell.median_caught_up_seconds, 2) if cell else None
            for name, cell in cells.items()
        },
    )
