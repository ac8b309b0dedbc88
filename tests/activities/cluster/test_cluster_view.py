"""What is made of machines and jobs: sums, room, gains, and what fits into a view."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from perdure.activities.cluster.view import MOST_MACHINES, summary_of, view_of, with_machines
from perdure.activities.nodes.machines import Labels, Machines, MachineSeen, Owner, Use
from perdure.cli.cluster import amounts, within
from perdure.contract import ClusterJob, ClusterRef, JobPhase, Pace

NOW = datetime(2026, 11, 27, 8, tzinfo=UTC)
GPUS = {"nvidia.com/gpu": 8.0, "cpu": 96.0, "memory": 2.0**40, "pods": 110.0}
NODE = {"nvidia.com/gpu": 8.0, "cpu": 90.0, "pods": 1.0}


def job(name: str = "llama", **fields: Any) -> ClusterJob:
    given: dict[str, Any] = {"namespace": "nlp", "job": name, "uid": name, "role": "worker", "phase": JobPhase.RUNNING}
    return ClusterJob(**(given | {"started_at": NOW, "most": 4, "shares": True} | fields))


def use(machine: str, owner: str | None = "llama", reason: str = "", **requests: float) -> Use:
    return Use(machine, requests or NODE, Owner(owner, "worker") if owner else None, reason)


def cluster(count: int) -> Machines:
    found = Machines()
    for number in range(count):
        found.machines[f"gpu-{number:05}"] = MachineSeen(GPUS)
    return found


def test_jobs_have_what_is_on_machines_and_wait_for_the_rest() -> None:
    found = cluster(4)
    found.machines["gpu-00003"].problem = "cordoned"
    found.put("1", use("gpu-00000"))
    found.put("2", use("", reason="0/4 nodes are available"))
    found.put("3", use("gpu-00001", owner=None, cpu=2.0))
    paces = (Pace(nodes=1, step=1.0, generation=1), Pace(nodes=2, step=0.6, generation=2))
    [llama] = with_machines([job(paces=paces, global_batch=True)], found)
    assert (llama.nodes, llama.waiting, llama.waits_for) == (1, 1, "0/4 nodes are available")
    # Two cpus of another pod leave room for the 90 of a node; the cordoned machine has none.
    assert llama.room == 2
    assert llama.gain is not None
    assert round(llama.gain, 2) == 0.67
    view = view_of(ClusterRef(backend="kubernetes"), found, [llama], NOW)
    assert [machine.name for machine in view.machines][:2] == ["gpu-00003", "gpu-00000"]
    [shape] = view.shapes
    assert (shape.machines, shape.free, shape.unusable) == (4, 2, 1)
    assert view.machines[1].free["nvidia.com/gpu"] == 0
    assert (view.machines[1].held[0].job, view.machines[2].others) == ("llama", 1)
    assert summary_of(view, [llama, job("alone", shares=False)]).jobs == (llama,)


def test_a_smaller_node_fits_where_a_machine_has_what_it_would_request() -> None:
    found = cluster(2)
    found.put("1", use("gpu-00000", owner=None, cpu=90.0))
    found.put("2", use("gpu-00001", owner=None, cpu=80.0))
    waiting = use("", reason="Insufficient cpu", cpu=90.0, memory=2.0**30)

    def fits(waiting: Use, **smaller: str) -> bool | None:
        found.put("3", waiting)
        [llama] = with_machines([job(smaller=smaller)], found)
        return llama.fits_smaller

    assert [fits(waiting, cpu=text) for text in ("16", "16500m", "17")] == [True, False, False]
    assert fits(waiting, cpu="16", memory="2Ti") is False
    assert fits(waiting) is None, "it would request no less"
    assert fits(waiting._replace(selector=(("pool", "a"),)), cpu="1") is False
    assert fits(waiting._replace(machine="gpu-00001"), cpu="1") is None, "it waits no more"


def test_taints_and_selectors_leave_only_the_machines_that_a_node_may_have() -> None:
    found = cluster(3)
    found.machines["gpu-00000"].taints = ("dedicated=vision",)
    found.labels = {"gpu-00001": Labels({"zone": "a"})}
    assert found.room(Use("", NODE, None), at_most=9) == 2
    assert found.room(Use("", NODE, None, tolerates=("dedicated",)), at_most=9) == 3
    assert found.room(Use("", NODE, None, tolerates=("dedicated=nlp",)), at_most=9) == 2
    assert found.room(Use("", NODE, None, tolerates=("*",)), at_most=2) == 2
    assert found.room(Use("", NODE, None, selector=(("zone", "a"),)), at_most=9) == 1


def test_a_view_of_ten_thousand_machines_fits_into_a_heartbeat() -> None:
    found = cluster(10_000)
    for number in range(9_000):
        found.put(str(number), use(f"gpu-{number:05}", owner=f"job-{number % 500}"))
    jobs = with_machines([job(f"job-{number}") for number in range(500)], found)
    view = view_of(ClusterRef(backend="kubernetes"), found, jobs, NOW)
    assert (view.machines_total, view.jobs_total, len(view.machines)) == (10_000, 500, MOST_MACHINES)
    assert view.shapes[0].free == 1_000
    assert len(to_json(view)) < 200_000
    assert len(to_json(summary_of(view, jobs))) < 200_000


def test_texts_that_users_and_machines_choose_leave_a_view_small_enough() -> None:
    found = cluster(0)
    for number in range(300):
        seen = MachineSeen(GPUS | {f"acme.example/{name}": 1.0 for name in range(200)}, taints=("t" * 5_000,) * 10)
        found.machines[f"{number}-" + "n" * 10_000] = seen
    selector = tuple((f"label-{number}", "x" * 63) for number in range(2_000))
    for number in range(300):
        found.put(str(number), use("", owner=f"job-{number}", reason="w" * 10_000)._replace(selector=selector))
    jobs = with_machines([job(f"job-{number}") for number in range(300)], found)
    view = view_of(ClusterRef(backend="kubernetes"), found, jobs, NOW)
    assert len(to_json(view)) < 600_000
    assert (view.machines_total, view.jobs_total) == (300, 300)
    assert view.machines
    assert view.jobs
    assert len(to_json(summary_of(view, jobs))) < 600_000
    # Jobs whose selectors differ only where they are cut off have pools of their own.
    found.put("0", use("", owner="job-0")._replace(selector=(*selector[:-1], ("label-1999", "y"))))
    other, same, alike = with_machines([job(f"job-{number}") for number in range(3)], found)
    assert other.pool != same.pool == alike.pool


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["", "gpu-00000", "gpu-00001", "gone"]), st.integers(0, 8)),
        max_size=40,
    )
)
def test_sums_are_those_of_what_is_there_whatever_came_before(changes: list[tuple[int, str, int]]) -> None:
    found, there = cluster(2), dict[str, Use]()
    for key, machine, cpus in changes:
        if cpus == 0:
            found.drop(str(key))
            there.pop(str(key), None)
        else:
            there[str(key)] = use(machine, cpu=float(cpus))
            found.put(str(key), there[str(key)])
    for name in found.machines:
        used = sum(one.requests["cpu"] for one in there.values() if one.machine == name)
        assert found.free(name)["cpu"] == max(96.0 - used, 0)
    waiting = sum(one.requests["cpu"] for one in there.values() if not one.machine)
    assert sum(one.requests["cpu"] for one in found.waiting) == waiting


def test_a_namespace_sees_its_own_jobs_and_counts_what_others_have() -> None:
    found = cluster(1)
    found.put("1", use("gpu-00000", cpu=1.0))
    found.put("2", use("gpu-00000", owner="secret", cpu=1.0))
    jobs = with_machines([job(), job("secret", namespace="vision")], found)
    view = within(view_of(ClusterRef(backend="kubernetes"), found, jobs, NOW), {"nlp"})
    assert "secret" not in view.model_dump_json()
    assert (view.machines[0].others, view.jobs_total) == (1, 1)


def test_amounts_are_written_for_people() -> None:
    assert amounts({"memory": 2.0**40, "cpu": 95.5, "nvidia.com/gpu": 8}) == "8 gpu, 95.5 cpu, 1.0 Ti memory"
