"""How the benchmark of scaling judges real jobs, and plays traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import trace
from benchmarks.scaling.real_jobs import Law, Line, judge, summary
from benchmarks.scaling.rules import DLRoverRM, Perdure, Pollux, overtaking, static
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


def test_a_workload_of_pollux_is_read(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("name,time,application,num_replicas,batch_size\nbert-0,60,bert,12,384\nncf-1,70,ncf,1,32768\n")
    bert, ncf = trace.read(path, nodes=64, gpus_of_a_node=1)
    assert (bert.submitted, bert.asked, ncf.asked, ncf.exchange) == (60, 12, 1, 0)
    # With one GPU, three hours of one; with twelve, at an efficiency of 0.65.
    assert bert.duration * bert.step(1) == pytest.approx(3 * 3600)
    assert bert.duration == pytest.approx(3 * 3600 / (12 * 0.65))


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


@pytest.mark.parametrize("rule", [Perdure(), static, overtaking, DLRoverRM(8), Pollux()])
def test_each_rule_ends_all_jobs_of_a_trace(rule: Rule) -> None:
    made = trace.make(nodes=8, jobs=12, load=1.0, seed=1)
    found = simulate(made, 8, rule)
    assert len(found.completions) == 12
    assert 0 < found.utilisation <= 1
    least = {job.name: job.duration * job.step(min(4 * job.asked, 8)) for job in made}
    assert all(found.completions[name] >= seconds for name, seconds in least.items())


@pytest.mark.parametrize("seed", range(1, 6))
def test_jobs_of_a_shared_cluster_are_done_sooner_and_none_takes_much_longer(seed: int) -> None:
    made = trace.make(nodes=8, jobs=48, load=1.0, seed=seed)
    before, found = simulate(made, 8, static), simulate(made, 8, Perdure())
    assert found.mean < 0.75 * before.mean
    assert all(time < 1.5 * before.completions[name] for name, time in found.completions.items())
