"""Tests of the machines that new nodes avoid."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import LossCause
from perdure.contract.transitions import NodeJoined, NodeLost, NodeUnreachable
from perdure.workflows.policy.capacity.node_avoidance import suspects
from perdure.workflows.policy.state.node import MachineLoss
from tests.policy.scenario import START, Scenario

WINDOW = timedelta(hours=1)
MACHINE, UNKNOWN = LossCause.MACHINE, LossCause.UNKNOWN


def pods(nodes: str = "1:2") -> Scenario:
    return Scenario(nodes, backend="kubernetes").running()


def lost(job: Scenario, rank: int, cause: LossCause, *, host: str = "gpu-17") -> Scenario:
    return job.transition(rank, NodeLost, detail="gone", cause=cause, host=host)


@pytest.mark.parametrize(
    ("causes", "suspect"),
    [
        ([MACHINE], True),
        ([UNKNOWN], False),
        ([UNKNOWN, UNKNOWN], True),
        ([LossCause.WANTED] * 3, False),
        ([LossCause.JOB] * 3, False),
        ([UNKNOWN, LossCause.JOB, LossCause.WANTED], False),
    ],
)
def test_a_machine_is_suspect_by_its_own_failure_or_by_two_losses_that_nothing_explains(
    causes: list[LossCause], suspect: bool
):
    job = pods()
    for cause in causes:
        assert job.node(1).avoids == ()
        lost(job, 1, cause).ready(1).steps()
    assert job.node(1).avoids == (("gpu-17",) if suspect else ())
    assert job.state.incidents[-1].avoided == (("gpu-17",) if suspect else ())


def test_two_nodes_of_one_machine_speak_against_it_as_two_losses_of_one_do():
    job = lost(lost(pods("1:3"), 1, UNKNOWN), 2, UNKNOWN)
    assert (job.node(1).avoids, job.node(2).avoids) == ((), ("gpu-17",))


def test_losses_count_for_as_long_as_restarts_do():
    job = lost(pods(), 1, UNKNOWN).ready(1).steps().wait(timedelta(minutes=61))
    assert lost(job, 1, UNKNOWN).node(1).avoids == ()


def test_a_node_that_does_not_take_commands_is_its_machine_s_failure():
    job = pods().transition(1, NodeUnreachable, detail="lease lapsed").peer_failed(0).wait(6.5)
    assert job.incarnations[1] == 2
    assert job.node(1).avoids == ("host-1",)


def test_only_where_the_backend_chooses_machines():
    job = Scenario("1:2").running()
    assert lost(job, 1, MACHINE).node(1).avoids == ()


def test_who_kills_processes_everywhere_is_no_machine_s_fault():
    job = pods("2:2")
    for rank in (0, 1, 0, 1):
        host = f"gpu-{rank}"
        lost(job, rank, UNKNOWN, host=host).transition(rank, NodeJoined, address="10.0.0.9", host=host).wait(60)
        job.ready(rank, after=job.generation).steps()
    assert job.node(0).avoids == job.node(1).avoids == ()
    # Of many machines two may well be bad.
    known = [MachineLoss(host=host, time=START, cause=UNKNOWN) for host in ("gpu-0", "gpu-1", "gpu-0", "gpu-1")]
    of_eight = [f"gpu-{number}" for number in range(8)]
    assert suspects(known, now=START, window=WINDOW, machines=of_eight) == ("gpu-0", "gpu-1")
    assert suspects(known, now=START, window=WINDOW, machines=of_eight[:2]) == ()


losses = st.builds(
    MachineLoss,
    host=st.sampled_from([f"gpu-{number}" for number in range(12)]),
    time=st.integers(0, 120).map(lambda minutes: START + timedelta(minutes=minutes)),
    cause=st.sampled_from([MACHINE, UNKNOWN]),
)


@given(st.lists(losses, max_size=40), st.randoms())
def test_suspects_are_the_newest_few_in_whatever_order_their_losses_are_told(known, random):
    now = START + timedelta(minutes=120)
    found = suspects(known, now=now, window=WINDOW)
    recent = [loss for loss in known if now - loss.time < WINDOW]
    assert suspects(random.sample(known, len(known)), now=now, window=WINDOW) == found
    assert suspects(recent, now=now, window=WINDOW) == found == tuple(sorted(set(found)))
    guilty = {
        loss.host for loss in recent if loss.cause is MACHINE or [other.host for other in recent].count(loss.host) > 1
    }
    assert len(found) == min(len(guilty), 8)
    assert guilty.issuperset(found)
    last = {host: max(loss.time for loss in recent if loss.host == host) for host in guilty}
    assert all(last[here] <= last[there] for here in guilty - set(found) for there in found)
