"""Tests that a job leaves the events of all its parts on disk."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.local.control_plane import JOB_EVENTS, LocalControlPlane
from tests.support.command_line import CommandLine
from tests.support.waiting import wait_for
from tests.training.events.collected import lines

SCRIPT = """
if [ ! -e tried ]; then touch tried; kill -9 $$; fi
exec python -c 'from perdure_training.events import TrainerEvents; TrainerEvents().finish(loss=0.5)'
"""

SETS_ASIDE = """
from perdure_training.shards import ShardingClient
shards = ShardingClient("train", size=30, shard_size=10, epochs=1)
for shard in shards:
    shards.report(shard, error="OSError: bad header" if shard.first == 10 else None)
"""


@pytest.mark.long("commands")
def test_worker_agent_and_rank_tell_of_a_failure_and_of_the_end(
    command_line: CommandLine, control_plane: LocalControlPlane, job_name: str
) -> None:
    done = command_line.run("run", "--name", job_name, "--", "sh", "-c", SCRIPT)
    assert done.code == 0, done
    path = control_plane.state.worker / JOB_EVENTS

    def of_job() -> list[dict[str, Any]]:
        return [event for event in lines(path) if event["attributes"].get("job") == f"default/{job_name}"]

    wait_for(lambda: any(event["name"] == "outcome" for event in of_job()))
    job = of_job()
    assert {event["target"] for event in job} == {"job"}
    named = [(event["name"], event["type"]) for event in job]
    assert named.count(("incident", "begin")) == named.count(("incident", "end")) == 1
    assert [event["attributes"]["phase"] for event in job if event["name"] == "outcome"] == ["SUCCEEDED"]
    assert [event["generation"] for event in job if event["name"] == "world"] == [1, 2]
    spans = [event for event in job if event["name"] == "rendezvous"]
    assert [(event["attributes"]["world_generation"], event["attributes"].get("success")) for event in spans] == [
        (1, None),
        # The rank died before the job knew that it ran.
        (1, False),
        (2, None),
        (2, True),
    ]
    assert spans[0]["id"] == spans[1]["id"] != spans[2]["id"] == spans[3]["id"]
    assert all(spans[end]["time"] >= spans[end - 1]["time"] for end in (1, 3))
    [abort] = [event["attributes"] for event in job if event["name"] == "abort"]
    assert (abort["world_generation"], abort["incident"]) == (1, 1)
    [folder] = (control_plane.state.path / "nodes").glob(f"{job_name}-*")
    agent = lines(folder / "run" / "events" / "agent.jsonl")
    [exited] = [event for event in agent if event["name"] == "rank_exited"]
    assert (exited["attributes"]["signal"], exited["generation"], exited["rank"]) == (9, 1, 0)
    entered = [(event["type"], event["generation"]) for event in agent if event["name"] == "rendezvous"]
    assert entered == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]
    [finish] = lines(folder / "run" / "events" / "local-rank-0.jsonl")
    assert (finish["target"], finish["name"], finish["attributes"]) == ("trainer", "finish", {"loss": 0.5})
    assert (finish["rank"], finish["generation"]) == (0, 2)


@pytest.mark.long("commands")
def test_shards_that_were_set_aside_are_an_event_of_the_job(
    command_line: CommandLine, control_plane: LocalControlPlane, job_name: str
) -> None:
    done = command_line.run("run", "--name", job_name, "--", "python", "-c", SETS_ASIDE)
    assert done.code == 0, done
    path = control_plane.state.worker / JOB_EVENTS

    def told() -> list[dict[str, Any]]:
        own = (event for event in lines(path) if event["attributes"].get("job") == f"default/{job_name}")
        return [event["attributes"] for event in own if event["name"] == "shards_set_aside"]

    wait_for(lambda: bool(told()))
    [event] = told()
    assert (event["dataset"], event["samples"]) == ("train", 10)
    assert event["shards"] == ["epoch 0, 10 to 19 (OSError: bad header)"]
