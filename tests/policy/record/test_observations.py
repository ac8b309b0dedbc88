"""Golden tables of pauses that pass by themselves, as `perdure explain` prints them."""

from __future__ import annotations

from perdure.cli.explain import explanation
from perdure.cli.text import incident_line
from perdure.contract.transitions import NodeReachable, NodeStalled, NodeStallEnded, NodeUnreachable
from perdure.workflows.policy.record.projections import status_of
from tests.policy.scenario import Scenario

SILENT = "no heartbeat for 6s"


def silent(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodeUnreachable, detail=SILENT)
    return job


def back(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodeReachable)
    return job


def stalled(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodeStalled, generation=job.generation)
    return job


def step_again(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodeStallEnded, generation=job.generation)
    return job


def told(job: Scenario) -> dict[str, list[str]]:
    """Returns the output of `perdure explain` for the only entry, by label, without the times of day."""
    [entry] = job.state.incidents
    lines: dict[str, list[str]] = {"TITLE": [entry.title]}
    label = ""
    for line in explanation(entry, job="job", flag="").plain.splitlines()[1:]:
        label = line[:6].strip() or label
        lines.setdefault(label, []).append(line[6:].split(" ", 1)[1] if label == "SAW" else line[6:])
    return lines


def test_a_partition_that_heals():
    job = stalled(silent(Scenario("3").running(), 1).wait(5), 0, 2).wait(105)
    step_again(back(job, 1), 0, 2)
    assert told(job) == {
        "TITLE": ["training stalled for 1m50s and continued by itself; node 1 could not be reached"],
        "SAW": [
            "node 1 could not be reached: no heartbeat for 6s (lease of node 1)",
            "node 0 made its last step before the pause (agent of node 0)",
            "node 2 made its last step before the pause (agent of node 2)",
            "node 1 was reachable again (lease of node 1)",
            "node 0 stepped again (agent of node 0)",
            "node 2 stepped again (agent of node 2)",
        ],
        "MEANS": [
            (
                "no rank failed, and nothing was interrupted; ranks that wait for others over an interrupted network"
                " step again when it is back"
            )
        ],
        "DID": ["nothing: it ended by itself"],
        "NOT": [
            "replace the node: a node that cannot be reached may train: nothing reported that its ranks had failed",
            "restart the ranks: a long evaluation or a slow disk looks the same from outside",
        ],
        "YOU": ["nothing to do; perdure status job"],
    }
    assert incident_line(job.state.incidents[0]).endswith("node 1 could not be reached: nothing was done")


def test_an_agent_that_is_cut_off_while_training_continues():
    job = back(silent(Scenario("3").running(), 1).wait(30), 1)
    assert told(job)["TITLE"] == ["node 1 could not be reached, for 30s; no node reported that training stalled"]
    assert told(job)["MEANS"] == ["no rank failed, and nothing was interrupted"]
    assert "cost" not in explanation(job.state.incidents[0], job="job", flag="").plain


def test_an_absence_of_the_control_plane_is_one_entry_with_that_title():
    job = back(silent(Scenario("3").running(), 0, 1, 2).wait(60), 2, 0, 1)
    [title] = told(job)["TITLE"]
    assert title.startswith("no node could be reached, so the control plane or its network was away, for 1m; ")


def test_a_stall_of_one_node_that_ends():
    job = step_again(stalled(Scenario("2").running(), 1).wait(90), 1)
    assert told(job)["TITLE"] == ["training stalled for 1m30s and continued by itself"]
    assert told(job)["NOT"] == ["restart the ranks: a long evaluation or a slow disk looks the same from outside"]


def test_a_short_silence_leaves_no_trace():
    assert not back(silent(Scenario("2").running(), 1).wait(9), 1).state.incidents


def test_what_an_incident_tells_is_not_told_twice():
    job = silent(Scenario("1:2").running(), 1).wait(20).lost(1).steps()
    assert [one.observation for one in job.state.incidents] == [None]
    job = stalled(Scenario("2").running(), 1).wait(60).rank_killed(0).steps()
    assert [one.observation for one in step_again(job, 1).state.incidents] == [None]


def test_pauses_of_different_times_are_entries_of_their_own_and_only_the_newest_are_kept():
    job = Scenario("2").running().rank_killed(0).steps()
    for _ in range(30):
        step_again(stalled(job.wait(60), 1).wait(60), 1)
    observed = [one.number for one in job.state.incidents if one.observation]
    assert observed == list(range(22, 32))
    assert job.state.incidents[0].number == 1, "incidents are not pushed out"


def test_an_observation_is_not_the_last_incident():
    job = Scenario("2").running().rank_killed(0).runs()
    step_again(stalled(job.wait(1), 1).wait(60), 1)
    known = status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    assert known.last_incident is not None
    assert known.last_incident.number == 1
    job.steps()
    assert job.state.incidents[0].stepping_at == job.now, "a first step that comes late is noted there"
