"""Tests that a job trains again, or stops with the reason, within bounded time, whatever is late, repeated or lost.

Hypothesis chooses faults and the network's behavior; then the faults end, and only the job's own timers and the nodes'
spontaneous reports may bring it back.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.workflows.policy.facts.events import RelaunchRequested, RestartRequested, ResumeRequested, SuspendRequested
from tests.policy.simulated_site import TORCH_TIMEOUT, Site

BOUND = TORCH_TIMEOUT + 1800.0
"""Seconds of virtual time: torch's own timeout, where a machine vanished without a trace, and then the job's."""

SPEC = {"retry": {"max_restarts": 1000, "no_progress_limit": 1000}}
"""Budgets that never end a job: it must train again."""

FAULTS = (
    "rank",
    "torchrun",
    "torchruns",
    "slow torchrun",
    "fails at start",
    "hangs at start",
    "crash",
    "silent crash",
    "cut off",
    "cut off for long",
    "restart",
    "relaunch",
    "suspend",
    "refusals",
    "refusals for good",
)

faults = st.lists(
    st.tuples(st.sampled_from([0.1, 1.0, 5.0, 20.0]), st.sampled_from(FAULTS), st.integers(0, 2)), max_size=6
)


def inflict(site: Site, fault: str, which: int) -> None:
    """Does one node, or the job, something."""
    state = site.job.state
    if state.outcome is not None:
        return
    match fault:
        case "restart" if state.world is not None:
            site.take(RestartRequested())
        case "suspend":
            site.take(ResumeRequested() if state.suspended else SuspendRequested())
        case "refusals" | "refusals for good":
            site.refuses_for_good = fault == "refusals for good"
            site.refuses_until = site.clock + site.chance.choice((20.0, 120.0, 3000.0))
        case "torchruns":
            for node in site.members:
                node.end_command(signal=9, dying=site.chance.choice((0.0, 1.0, 10.0)))
        case _ if site.members:
            node = site.members[which % len(site.members)]
            match fault:
                case "rank":
                    node.ranks_fail(victim=False)
                case "torchrun":
                    node.end_command(signal=9)
                case "slow torchrun":
                    node.end_command(signal=9, dying=site.chance.choice((1.0, 10.0)))
                case "fails at start":
                    node.end_command(code=1)
                case "hangs at start":
                    site.hanging.add(node.identity.rank)
                    node.end_command(signal=9)
                case "crash":
                    node.crash(seen_after=site.chance.choice((0.5, 40.0)))
                case "silent crash":
                    # Of the last node only its backend can tell.
                    node.crash(seen_after=None if len(site.members) > 1 else 300.0)
                case "cut off":
                    node.disconnect(3.0)
                case "cut off for long":
                    node.disconnect(600.0)
                case "relaunch" if state.nodes[node.identity.rank].alive:
                    site.take(RelaunchRequested(rank=node.identity.rank))
                case _:
                    pass
        case _:
            pass


@pytest.mark.parametrize("nodes", ["1", "2", "3", "2:3"])
@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1_000_000), story=faults, agents_report=st.booleans())
def test_it_trains_again(nodes: str, seed: int, story: list[tuple[float, str, int]], agents_report: bool) -> None:
    site = Site(nodes, seed, **SPEC)
    site.agents_report_overdue = agents_report
    site.run(60.0, done=lambda: site.trains)
    for pause, fault, which in story:
        site.run(site.clock + pause)
        inflict(site, fault, which)
    if site.job.state.suspended:
        site.take(ResumeRequested())
    site.faulty = False
    site.run(site.clock + BOUND, done=lambda: site.trains or site.job.state.outcome is not None)
    outcome = site.job.state.outcome
    refusals = {"refusals", "refusals for good"}
    if outcome is not None and {"hangs at start", "silent crash", "cut off for long", *refusals} & {
        fault for _, fault, _ in story
    }:
        # A node that was never in a world, and does not come, is waited for as long as the specification says.
        refused_first = not site.job.state.generation and "was refused" in outcome.reason
        assert "_timeout)" in outcome.reason or refused_first
        return
    assert site.trains, site.story()


@pytest.mark.parametrize("for_good", [False, True])
@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1_000_000), lasts=st.sampled_from([5.0, 120.0, 3000.0]), loses=st.integers(1, 2))
def test_what_refuses_nodes_ends_no_job_that_has_enough_of_them(
    seed: int, lasts: float, loses: int, for_good: bool
) -> None:
    site = Site("1:3", seed, **SPEC)
    site.run(60.0, done=lambda: site.trains)
    site.run(site.clock + 60.0)
    site.refuses_until, site.refuses_for_good = site.clock + lasts, for_good
    for node in site.members[-loses:]:
        node.crash(seen_after=site.chance.choice((0.5, 40.0)))
    site.faulty = False
    site.run(site.refuses_until, done=lambda: site.job.state.outcome is not None)
    assert site.job.state.outcome is None, site.story()
    if lasts > 60.0:
        assert site.trains, site.story()
    site.run(site.clock + 400.0, done=lambda: site.trains and len(site.job.group_ranks) == 3)
    assert site.trains, site.story()
    assert len(site.job.group_ranks) == 3, site.story()
