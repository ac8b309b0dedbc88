"""From trials to the figures that are claimed: medians, success rates, ratios to the better peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from pydantic import BaseModel

from .records import OURS, PEERS, Composition, Scenario, SystemName, TrialRecord


@dataclass(frozen=True)
class Cell:
    """All trials of one system in one scenario."""

    trials: int
    recovered: int
    median_seconds: float | None
    """Of those that recovered: a hang has no length."""
    slowest_seconds: float | None
    errors: tuple[str, ...] = ()


class SteadyCost(BaseModel):
    """One kind of process while a job runs undisturbed."""

    what: str
    processes: int
    cpu_percent: float
    """Of one core, per process."""
    rss_mb: float
    """Per process."""


class Steady(BaseModel):
    """What the control plane costs while nothing happens."""

    seconds: float
    costs: tuple[SteadyCost, ...]
    job_events_per_minute: float
    """History events of TrainingJob."""

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
    agent_cpu_pct: float | None
    decision_ms_p50: float | None
    a_p95_s: float | None = None
    """Of Perdure's trials of (a) that recovered."""
    d_recovered: tuple[bool, ...] = ()
    """Perdure's trials, one by one."""
    e_recovered: tuple[bool, ...] = ()


def median_of(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def summarize(records: Sequence[TrialRecord], system: SystemName, scenario: Scenario) -> Cell | None:
    """One cell of the table; None where nothing was tried."""
    trials = [record for record in records if (record.system, record.scenario) == (system, scenario)]
    if not trials:
        return None
    seconds = [record.seconds for record in trials if record.recovered and record.seconds is not None]
    return Cell(
        trials=len(trials),
        recovered=sum(record.recovered for record in trials),
        median_seconds=median_of(seconds),
        slowest_seconds=max(seconds, default=None),
        errors=tuple(record.error for record in trials if record.error),
    )


def ratio_to_better_peer(records: Sequence[TrialRecord], scenario: Scenario) -> float | None:
    """Perdure's median over the smallest median of a peer; peers that never recovered have none."""
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
    """The median of each part, over the trials that know it."""
    parts = [record.composition for record in records if record.recovered]
    return Composition(**{name: median_of(getattr(part, name) for part in parts) for name in Composition.model_fields})


def decision_seconds(records: Iterable[TrialRecord]) -> list[float]:
    """What the control plane adds, where there is nothing to wait for: a rank was killed.

    From the exit, as the node's launcher saw it, until the last surviving agent holds the next world: agent, Temporal
    server, decision and back. The decision alone takes no time that the workflow's own clock could show.
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
    """Perdure's, of trials that recovered."""
    ours = (record for record in records if (record.system, record.scenario) == (SystemName.PERDURE, scenario))
    return [record.seconds for record in ours if record.recovered and record.seconds is not None]


def recoveries(records: Iterable[TrialRecord], scenario: Scenario) -> tuple[bool, ...]:
    """Of each of Perdure's trials, whether it recovered."""
    ours = (record for record in records if (record.system, record.scenario) == (SystemName.PERDURE, scenario))
    return tuple(record.recovered for record in ours)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all do not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


def headline(records: Sequence[TrialRecord], steady: Steady | None) -> Headline:
    ours = [record for record in records if record.system in OURS]
    withheld = [record for record in records if record.system is SystemName.PERDURE_WITHHELD]
    agent = steady.cost_of("agent") if steady else None
    decision = median_of(decision_seconds(records))

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
        agent_cpu_pct=rounded(agent.cpu_percent if agent else None, 2),
        decision_ms_p50=rounded(None if decision is None else decision * 1000, 1),
        a_p95_s=rounded(percentile(seconds_of(records, Scenario.WORKER), 0.95), 3),
        d_recovered=recoveries(records, Scenario.RANK_DURING_REPAIR),
        e_recovered=recoveries(records, Scenario.SLOW_TO_DIE),
    )
