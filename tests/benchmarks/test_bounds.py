"""Runs benchmarks, and bounds what they measure by other systems or phases of the same run.

No bound is a time: machines differ, and one that is busy slows down both sides.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.records import OURS, ResultFile, Scenario, SystemName, TrialRecord
from benchmarks.recovery.summary import Steady, median_composition, summarize
from perdure.spec.timing import LeaseTiming

pytestmark = [pytest.mark.long("benchmarks"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


async def run(module: str, *arguments: str) -> dict[str, Any]:
    """Runs a benchmark; returns its last line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed = (await process.communicate())[0].decode()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    print(printed)
    assert process.returncode == 0, printed
    return json.loads(printed.splitlines()[-1])


async def test_a_job_at_rest_adds_nothing_to_histories_and_continuing_as_new_loses_nothing():
    """`make bench-history`, with one continuation of the group whose leases are counted."""
    measured = await run("benchmarks.history", "--seconds", "30", "--signals", "10000", "--times", "1")
    assert (measured["job_events_per_minute"], measured["events_per_node_hour"]) == (0, 0)
    assert measured["signals_lost"] == 0
    assert measured["leases_reheld_s"] < LeaseTiming().timeout.total_seconds(), (
        "leases are held again before one lapses"
    )


@pytest.mark.usefixtures("ranks")
async def test_a_kill_costs_less_than_a_start_and_a_job_at_rest_writes_little(tmp_path: Path):
    """`make bench-recovery --quick` without the other systems, some of whose trials only end by a timeout."""
    await run("benchmarks.recovery", "--quick", "--system", SystemName.PERDURE, "--out", str(tmp_path))
    records = ResultFile(tmp_path / "results.jsonl").read()
    assert not [record for record in records if record.system in OURS and not record.recovered]
    bare = {
        scenario: seconds(records, SystemName.FLOOR, scenario) for scenario in (Scenario.WORKER, Scenario.NODE_LOST)
    }
    for scenario, start in bare.items():
        assert seconds(records, SystemName.PERDURE, scenario) < start / 2, "ranks start warm"
    replaced = seconds(records, SystemName.PERDURE, Scenario.NODE_REPLACED)
    assert replaced < 1.5 * seconds(records, SystemName.PERDURE_COLD, Scenario.NODE_REPLACED)
    check_lease_only(records, replaced)
    steady = Steady.model_validate_json((tmp_path / "steady.json").read_text())
    assert steady.job_events_per_minute <= 0.1 * steady.job_events_before


def check_lease_only(records: list[TrialRecord], replaced: float) -> None:
    """A node whose loss only leases and peers show: the decision takes 5 s longer, which are the time to take a command
    and the peers' grace, and no second one follows them. A start takes about as long."""
    withheld = [record for record in records if record.system is SystemName.PERDURE_WITHHELD]
    phases = median_composition(withheld)
    assert phases.noticed is not None
    assert phases.decided is not None
    assert phases.stepped is not None
    to_decide, to_step = phases.decided - phases.noticed, phases.stepped - phases.decided
    assert to_decide < 1.6 * to_step
    assert seconds(records, SystemName.PERDURE_WITHHELD, Scenario.NODE_REPLACED) < 3 * replaced


def seconds(records: list[TrialRecord], system: SystemName, scenario: Scenario) -> float:
    cell = summarize(records, system, scenario)
    assert cell is not None
    assert cell.median_seconds is not None, f"{system} in {scenario.title}: {cell.errors}"
    return cell.median_seconds
