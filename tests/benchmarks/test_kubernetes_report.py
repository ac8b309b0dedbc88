"""Tests of the published figures that are computed from trials on a cluster."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks.kubernetes.faults import longest_pause
from benchmarks.kubernetes.records import FaultName, FaultTrial, Held, Posted, Relaunched, Thousand
from benchmarks.kubernetes.report import headline, markdown, print_report
from benchmarks.recovery.steps import Step

DELETED, KUBELET = FaultName.POD_DELETED, FaultName.KUBELET_STOPPED

TRIALS = [
    FaultTrial(fault=DELETED, number=1, ok=True, noticed=0.4, decided=0.4, stepping=8.0, action="replace node 1"),
    FaultTrial(fault=DELETED, number=2, ok=True, noticed=0.6, decided=0.6, stepping=6.0, action="replace node 1"),
    FaultTrial(fault=KUBELET, number=1, ok=True, stepping=0.2, action="nothing: training continued"),
    FaultTrial(fault=KUBELET, number=2, ok=False, error="not stepping again within 120 s"),
]


def thousand(*, requested: float, running: float, lost: int) -> Thousand:
    return Thousand(
        bare=Posted(nodes=1000, requested=2.0, running=10.0),
        job=Posted(nodes=1000, requested=requested, running=running),
        relaunched=Relaunched(nodes=30, of=1000, requested=1.5, whole=9.0),
        held=Held(
            leases=1000,
            seconds=600,
            lost=lost,
            late=0,
            unreachable=0,
            worker_cpu_percent=12.0,
            worker_rss_mb=300.0,
            server_cpu_percent=60.0,
            server_rss_mb=400.0,
        ),
    )


def test_a_fault_counts_as_survived_only_if_every_trial_was(capsys: pytest.CaptureFixture[str]):
    results = (TRIALS, [thousand(requested=8.0, running=12.0, lost=0), thousand(requested=6.0, running=11.0, lost=2)])
    print_report(Console(width=200), *results)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {
        "faults": [
            {"name": DELETED.value, "noticed_s": 0.5, "stepping_s": 7.0, "ok": True},
            {"name": KUBELET.value, "noticed_s": None, "stepping_s": 0.2, "ok": False},
        ],
        "post_1000_s": 7.0,
        "post_1000_ratio": 1.15,
        "relaunch_30_s": 1.5,
        "lease_1000_lost": 2,
        "worker_cpu_pct": 12.0,
        "worker_rss_mb": 300.0,
    }
    assert "| job / bare loop, until all run | 1.15 | <= 1.3 |" in markdown(*results)


def test_what_was_not_measured_is_nothing():
    assert headline([], []).post_1000_s is None
    assert "played by KWOK" not in markdown(TRIALS, [])


def test_the_longest_pause_counts_each_rank_and_both_ends():
    steps = [Step(time, 1, rank, 2, 7) for time, rank in ((1.0, 0), (2.0, 0), (3.0, 0), (4.0, 0), (1.0, 1), (3.5, 1))]
    assert longest_pause(steps, since=0.5, until=4.5) == 2.5
    assert longest_pause(steps, since=0.5, until=9.0) == 5.5
    assert longest_pause([], since=0.5, until=4.5) == 4.0
