"""How the benchmark of scaling judges real jobs, and plays traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import trace
from benchmarks.scaling.real_jobs import Law, Line, judge, summary
from benchmarks.scaling.rules import DLRoverRM, Pollux, overtaking, perdure, static
from benchmarks.scaling.simulation import Rule, simulate
from benchmarks.scaling.trace import TraceJob

TRACE = """submit_s,gpus,duration_s,exchange
0,8,1000,0
0,16,500,0.2
100,9,300,0.5
"""


@pytest.fixture
def jobs(tmp_path: Path) -> list[TraceJob]:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return trace.read(path, nodes=2)


def test_a_job_that_was_changed_is_judged_by_its_steps() -> None:
    law = Law(compute=1.0, exchange=0.0)
    times = [(1, 0.5, 2, 1), (2, 1.0, 2, 1), (3, 4.0, 1, 2), (3, 5.0, 1, 2), (4, 8.0, 2, 3)]
    lines = [Line(time, step, nodes, generation) for step, time, nodes, generation in times]
    found = judge(law, lines, steps=5)
    assert found.sizes == (2, 1, 2)
    assert found.changes == pytest.approx((2.0, 2.5))
    # One step was made twice, and the last one is missing.
    assert found.lost == 2
    assert found.regret == pytest.approx(8.0 / (5 * law.step(law.best)) - 1)
    assert found.oscillations == 0
    assert judge(law, [*lines, Line(9, 5, 1, 4)], steps=5).oscillations == 1
    assert summary([found])["lost_steps"] == 2


def test_each_job_has_what_it_asked_for_in_the_order_of_submission(jobs: list[TraceJob]) -> None:
    found = simulate(jobs, 2, static)
    # The second waits for both nodes, the third for the second.
    assert found.completions == pytest.approx({"000000": 1030, "000001": 1560, "000002": 1790})
    overtaken = simulate(jobs[:1] + jobs[1:2] + [TraceJob("small", 100, 1, 300, 0)], 2, overtaking)
    assert overtaken.completions["small"] == pytest.approx(330)


@pytest.mark.parametrize("rule", [perdure, static, overtaking, DLRoverRM(), Pollux()])
def test_each_rule_ends_all_jobs_of_a_trace(rule: Rule) -> None:
    made = trace.make(nodes=8, jobs=12, load=1.0, seed=1)
    found = simulate(made, 8, rule)
    assert len(found.completions) == 12
    assert 0 < found.utilisation <= 1
    least = {job.name: job.duration * job.step(min(4 * job.asked, 8)) for job in made}
    assert all(found.completions[name] >= seconds for name, seconds in least.items())


def test_jobs_of_a_shared_cluster_are_done_sooner() -> None:
    made = trace.make(nodes=8, jobs=24, load=1.0, seed=2)
    assert simulate(made, 8, perdure).mean < 0.6 * simulate(made, 8, static).mean
