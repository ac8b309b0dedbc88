"""Tests of the memory that nodes request after theirs has run out."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.contract import Considered, LossCause, Progress, RaiseMemory, ReplaceNodes
from perdure.contract.transitions import NodeLost
from perdure.spec.errors import SpecError
from perdure.spec.quantities import bytes_of, quantity_of_bytes
from perdure.spec.validate import parse_spec
from perdure.workflows.policy.capacity.memory_requests import is_leak, memory_after_oom
from perdure.workflows.policy.state.host_memory import MemoryKill
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import Scenario

GI = 2**30


def kill(had: float, steps: int | None = None, generation: int = 1) -> MemoryKill:
    return MemoryKill(generation=generation, had=int(had * GI), steps=steps)


def pods(nodes: str = "2", memory: str | None = "16Gi", memory_max: str | None = "64Gi", **role: Any) -> Scenario:
    fields: dict[str, Any] = {"nodes": nodes, "command": ["torchrun", "train.py"], "image": "x", **role}
    if memory is not None:
        fields["resources"] = {"memory": memory}
    if memory_max is not None:
        fields["scaling"] = {"memory_max": memory_max}
    return Scenario(backend="kubernetes", roles={"worker": fields})


def gone(job: Scenario, rank: int = 0) -> Scenario:
    """The pod of a node is gone since its memory ran out."""
    return job.transition(
        rank, NodeLost, detail="it ran out of memory; its limit is 16Gi", cause=LossCause.JOB, out_of_memory=True
    )


def raises(job: Scenario) -> list[RaiseMemory]:
    return [action for action in job.incident.actions if isinstance(action, RaiseMemory)]


@pytest.mark.parametrize(
    ("had", "most", "after"),
    [
        ("16Gi", "64Gi", "24Gi"),
        ("24Gi", "64Gi", "36Gi"),
        ("50Gi", "64Gi", "64Gi"),
        ("63Gi", "64Gi", "64Gi"),
        ("1Gi", "64Gi", "1536Mi"),
        ("100Mi", "64Gi", "256Mi"),
        ("1", "64Gi", "256Mi"),
        ("1", "2", "2"),
        ("1000000000", "64Gi", "1536Mi"),
        ("1Ei", "2Ei", "1536Pi"),
    ],
)
def test_a_node_whose_memory_ran_out_gets_half_as_much_again_within_the_limit(had: str, most: str, after: str):
    one = MemoryKill(generation=1, had=bytes_of(had))
    assert memory_after_oom(one, most=bytes_of(most)).memory == bytes_of(after)


def test_memory_is_never_raised_beyond_the_limit():
    for had in ("64Gi", "65Gi"):
        found = memory_after_oom(MemoryKill(generation=1, had=bytes_of(had)), most=bytes_of("64Gi"))
        assert found.memory is None
        assert found.why_not == f"it had {had}, and scaling.memory_max is 64Gi"


def test_without_a_limit_and_without_a_request_nothing_is_guessed():
    assert memory_after_oom(kill(16), most=None).memory is None
    found = memory_after_oom(kill(0), most=64 * GI)
    assert (found.memory, found.why_not) == (None, "how much memory it had is not known: set resources.memory")


def test_a_node_without_a_limit_of_its_own_is_judged_by_what_it_used():
    assert memory_after_oom(kill(16), most=64 * GI, peak=30 * GI).memory == 45 * GI
    assert memory_after_oom(kill(0), most=64 * GI, peak=30 * GI).memory == 45 * GI


def test_an_absurd_peak_raises_it_no_further_than_to_the_limit():
    assert memory_after_oom(kill(16), most=64 * GI, peak=2**62).memory == 64 * GI


@pytest.mark.parametrize(
    ("steps", "leaks"),
    [
        ((100, 200, 300), True),
        ((100, 200), False),
        ((100, 300, 200), False),
        ((100, 100, 100), False),
        ((0, 200, 300), False),
        ((None, 200, 300), False),
        ((900, 100, 200, 300), True),
    ],
)
def test_a_leak_is_memory_that_two_raises_have_only_delayed(steps: tuple[int | None, ...], leaks: bool):
    assert is_leak([kill(16 * 1.5**number, one) for number, one in enumerate(steps)]) is leaks


def test_the_text_of_a_leak_has_its_figures():
    found = memory_after_oom(kill(36, 3_000), most=64 * GI, earlier=(kill(16, 1_000), kill(24, 2_000)))
    assert found.memory is None
    assert found.why_not == (
        "its use grows as the training goes on, which more memory only delays: 16Gi for 1,000 steps, 24Gi for 2,000 "
        "steps, 36Gi for 3,000 steps"
    )


@pytest.mark.parametrize("text", ["64Gi", "1536Mi", "1Ti", "3", "1Ki"])
def test_a_number_of_bytes_is_written_as_a_user_would(text: str):
    assert quantity_of_bytes(bytes_of(text)) == text


def test_the_successor_of_a_pod_whose_memory_ran_out_requests_more():
    job = gone(pods().running())
    assert [(one.nodes, one.before, one.memory) for one in raises(job)] == [((0,), 16 * GI, 24 * GI)]
    assert job.node(0).memory == 24 * GI
    assert job.node(1).memory is None, "it runs with what it has"
    [desire] = desires_of(job.state).values()
    assert {rank: node.memory for rank, node in desire.nodes.items()} == {0: 24 * GI, 1: None}
    assert job.incident.action.endswith("new nodes request 24Gi of memory instead of 16Gi")


def test_a_second_kill_counts_from_what_the_node_had():
    job = gone(gone(pods().running()).ready(0, 1, after=1).steps())
    assert job.node(0).memory == 36 * GI


def test_reports_of_other_nodes_raise_it_no_further():
    job = gone(pods("3").running())
    job.rank_killed(1).rank_killed(2)
    assert [one.memory for one in raises(job)] == [24 * GI]
    assert job.state.host_memory.requested == 24 * GI
    assert len(job.state.host_memory.kills) == 1


def test_a_node_that_is_alive_and_whose_machine_has_no_more_is_replaced():
    job = pods().running()
    job.rank_killed(1, out_of_memory=True)
    assert job.incident.rule.startswith("out-of-memory/1")
    assert [action.nodes for action in job.incident.actions if isinstance(action, ReplaceNodes)] == [(1,)]
    assert (job.node(1).incarnation, job.node(1).memory) == (2, 24 * GI)
    assert job.node(0).incarnation == 1


def test_a_job_whose_memory_cannot_be_raised_stops_with_the_figures():
    job = gone(pods(memory_max="20Gi").ready(0, 1))
    assert job.node(0).memory == 20 * GI
    gone(job.ready(0, 1, after=1))
    assert job.state.outcome is not None
    assert "more memory is not requested: it had 20Gi, and scaling.memory_max is 20Gi" in job.state.outcome.reason
    assert job.incident.rule.startswith("out-of-memory/2")


def test_a_job_that_gains_steps_goes_on_with_the_memory_that_it_has():
    job = gone(pods(memory_max="16Gi").running())
    assert job.state.outcome is None
    assert job.node(0).memory is None
    assert ("request more memory", "it had 16Gi, and scaling.memory_max is 16Gi") in [
        (one.option, one.why_not) for one in job.incident.considered
    ]


def test_memory_that_grows_with_the_steps_is_raised_twice_only():
    job = pods(memory_max="1Ti").running()
    had: list[int | None] = []
    considered: tuple[Considered, ...] = ()
    for steps in (1_000, 2_000, 3_000):
        progress = Progress(step=steps, generation=job.generation, generation_steps=steps)
        job.rank_killed(0, out_of_memory=True, progress=progress)
        had.append(job.state.host_memory.requested)
        considered = job.incident.considered
        job.removed(0).ready(0, 1, after=job.generation).steps()
    assert had == [24 * GI, 36 * GI, 36 * GI]
    assert any("grows as the training goes on" in one.why_not for one in considered)
    assert job.state.outcome is None, "each restart gains steps"


def test_without_a_limit_nothing_is_raised():
    job = gone(pods(memory_max=None).running())
    assert not raises(job)
    assert job.node(0).memory is None


def test_a_limit_below_the_request_is_refused():
    role = {"nodes": 1, "command": ["x"], "resources": {"memory": "16Gi"}, "scaling": {"memory_max": "8Gi"}}
    with pytest.raises(SpecError, match=r"scaling.memory_max is 8Gi, and resources.memory is 16Gi"):
        parse_spec({"name": "job", "roles": {"worker": role}})
