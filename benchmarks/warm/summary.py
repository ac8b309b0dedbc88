"""Computes the published figures from the trials."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from benchmarks.recovery.records import OURS, Scenario, SystemName, TrialRecord
from benchmarks.recovery.summary import median_of, ratio_to_better_peer, summarize

from .scripts import ScriptTrial
from .steady import StepTimes


class Headline(BaseModel):
    """The last line of the output."""

    warm_ratio_peer: float | None
    """Perdure's median divided by the better peer's for a killed rank, at the number of nodes where it is worst."""
    warm_ratio_floor: float | None
    """The same, divided by the median of bare processes from start to first step."""
    recovered: int
    runs: int
    step_ratio: float | None
    zygote_mb: float | None


class ScriptRow(BaseModel):
    """All trials of one kind of script."""

    script: str
    runs: int
    recovered: int
    warm: int
    learned: int
    median_seconds: float | None
    slowest_seconds: float | None
    median_start_seconds: float | None


def script_rows(trials: Sequence[ScriptTrial]) -> list[ScriptRow]:
    """Returns one row per kind, in order of name."""
    rows: list[ScriptRow] = []
    for script in sorted({trial.script for trial in trials}):
        found = [trial for trial in trials if trial.script == script]
        seconds = [trial.seconds for trial in found if trial.seconds is not None]
        rows.append(
            ScriptRow(
                script=script,
                runs=len(found),
                recovered=sum(trial.recovered for trial in found),
                warm=sum(trial.warm for trial in found),
                learned=sum(trial.learned for trial in found),
                median_seconds=median_of(seconds),
                slowest_seconds=max(seconds, default=None),
                median_start_seconds=median_of(trial.start_seconds for trial in found),
            )
        )
    return rows


def ratio_to_floor(records: Sequence[TrialRecord]) -> float | None:
    """Returns Perdure's median for a killed rank, started warm, divided by that of bare processes."""
    ours = summarize(records, SystemName.PERDURE, Scenario.WORKER)
    floor = summarize(records, SystemName.FLOOR, Scenario.WORKER)
    if not (ours and floor and ours.median_seconds and floor.median_seconds):
        return None
    return ours.median_seconds / floor.median_seconds


def headline(
    records: Sequence[TrialRecord], script_trials: Sequence[ScriptTrial], step_times: StepTimes | None
) -> Headline:
    """Returns the figures of all trials."""
    by_size = [[record for record in records if record.size == size] for size in sorted({r.size for r in records})]
    peer = [ratio for group in by_size if (ratio := ratio_to_better_peer(group, Scenario.WORKER)) is not None]
    floor = [ratio for group in by_size if (ratio := ratio_to_floor(group)) is not None]
    ours = [record.recovered for record in records if record.system in OURS]
    ours += [trial.recovered for trial in script_trials]
    return Headline(
        warm_ratio_peer=round(max(peer), 3) if peer else None,
        warm_ratio_floor=round(max(floor), 3) if floor else None,
        recovered=sum(ours),
        runs=len(ours),
        step_ratio=round(step_times.ratio, 4) if step_times else None,
        zygote_mb=round(step_times.interpreter_mb) if step_times else None,
    )
