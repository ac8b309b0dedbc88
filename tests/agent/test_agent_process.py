"""Tests of a real agent process with a real server: its promises about crashes, pauses and outages."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from perdure.contract import StopRequest
from perdure.spec.timing import LeaseTiming
from perdure_training.node_api.progress_file import REPORTED, ProgressFile, progress_path
from tests.agent.harness import QUICK, RunningAgent, Workflows, rank_exit, recording, running_agent, start_agent, utc
from tests.agent.recorder import Recorder
from tests.support.temporal_server import DevServer, dev_server
from tests.support.waiting import DEADLINE, eventually

OUTAGE_S = 2
"""As long as several heartbeats are apart."""
SHORT_LEASE = LeaseTiming(heartbeat=timedelta(seconds=0.5), timeout=timedelta(seconds=3))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: sockets live in it."""
    return tmp_path_factory.mktemp("n")


@pytest.fixture
async def agent(temporal_server: DevServer, workflows: Workflows, folder: Path) -> AsyncIterator[RunningAgent]:
    async with running_agent(temporal_server, workflows, folder) as running:
        yield running


def write_step(agent: RunningAgent, *, generation: int, step: int, rank: int = 0) -> None:
    path = progress_path(agent.run_dir / "progress", rank)
    writer = ProgressFile(path, generation=generation, pid=4712, source=REPORTED)
    writer.write(step, time=time.time(), total=1000, loss=0.5)


async def test_a_node_goes_through_its_first_world(agent: RunningAgent, workflows: Workflows) -> None:
    [joined] = await workflows.expect(workflows.group, "joined")
    assert joined["address"] == "127.0.0.1"
    assert joined["generation"] == 0
    assert joined["sender"]["token"] == agent.node.token

    await agent.launcher_hello()
    desired = await agent.get("/v1/launcher/desired?version=0&wait=0")
    assert (desired["run"], desired["attempt"], desired["stop_generation"]) == (True, 1, 0)
    assert desired["world"] is None

    await agent.handler_hello()
    await agent.ready(0)
    [ready] = await workflows.expect(workflows.group, "ready")
    assert ready["store_ports"] == [29501, 29502]
    await agent.start_lease(1)
    await workflows.beats(2)
    # A look for ports may have come between the handler's hello and its report.
    told = await workflows.seen(workflows.group, "ports_changed")
    assert [one.body["store_ports"] for one in told] in ([], [ready["store_ports"]])
    assert ready["command_nodes"] is None
    waiting = asyncio.create_task(agent.get("/v1/rendezvous/world?after=0&wait=25"))
    answer = await agent.desire(world=agent.world(1))
    assert answer["accepted"]
    assert (answer["generation"], answer["entered"], answer["preparing"]) == (1, 0, False)
    world = (await asyncio.wait_for(waiting, DEADLINE))["world"]
    assert (world["generation"], world["world_size"], world["store_port"]) == (1, 1, 29501)

    await agent.enter(1)
    write_step(agent, generation=1, step=40)
    [stepping] = await workflows.expect(workflows.group, "stepping")
    assert stepping["generation"] == 1
    assert stepping["entered_at"]
    [changed] = await workflows.expect(workflows.group, "ports_changed")
    assert changed["store_ports"] == [29502]


async def test_a_failed_rank_is_told_at_once_and_once(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    await agent.desire(world=agent.world(1))
    failed = rank_exit()
    await agent.ready(1, [failed])
    await agent.ready(1, [failed])
    [failure] = await workflows.expect(workflows.job, "failure")
    assert failure["kind"] == "RANKS"
    assert failure["generation"] == 1
    assert failure["message"] == "rank 0 was ended by SIGKILL"
    assert failure["ranks"][0]["pid"] == 4712
    await agent.ready(1, [rank_exit(pid=9)])
    failures = await workflows.expect(workflows.job, "failure", count=2)
    assert len(failures) == 2
    assert failures[0]["sequence"] < failures[1]["sequence"]


async def test_commands_for_others_and_from_the_past_are_refused(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    assert (await agent.desire(world=agent.world(3)))["accepted"]
    forged = agent.node.model_copy(update={"token": "guessed"})
    newer = agent.node.model_copy(update={"incarnation": 2})
    stop = StopRequest(grace=timedelta(0), reason="old")
    for desired, what in (
        ({"node": forged, "world": agent.world(4)}, "token"),
        ({"node": newer, "world": agent.world(4)}, "worker-0/2"),
        ({"node": newer, "stop": stop}, "worker-0/2"),
        ({"node": forged, "stop": None, "complete_generation": 3}, "token"),
        ({"world": agent.world(2)}, "generation 2 is over"),
        ({"world": agent.world(3, group_rank=1)}, "another content"),
    ):
        answer = await agent.desire(**desired)
        assert not answer["accepted"]
        assert what in answer["detail"]
        assert answer["generation"] == (0 if "node" in desired else 3)
    assert (await agent.desire(world=agent.world(3)))["accepted"]


async def test_the_end_of_a_command_restarts_it_when_the_job_requests_it(
    agent: RunningAgent, workflows: Workflows
) -> None:
    await agent.launcher_hello()
    await agent.desire(world=agent.world(1))
    ended = {"attempt": 1, "generation": 1, "exit_code": None, "signal": 9, "time": time.time(), "log_tail": "oh no"}
    await agent.post("/v1/launcher/exited", **ended)
    await agent.post("/v1/launcher/exited", **ended)
    [failure] = await workflows.expect(workflows.job, "failure")
    assert (failure["kind"], failure["signal"], failure["log_tail"]) == ("COMMAND", 9, "oh no")
    before = await agent.get("/v1/launcher/desired?version=0&wait=0")
    assert before["attempt"] == 1
    waiting = asyncio.create_task(agent.get(f"/v1/launcher/desired?version={before['version']}&wait=25"))
    await agent.desire(world=agent.world(2))
    after = await asyncio.wait_for(waiting, DEADLINE)
    assert (after["attempt"], after["stop_generation"], after["world"]["generation"]) == (2, 1, 2)
    # A new torchrun begins at 0, and gets the world that it was started for.
    await agent.handler_hello(pid=99)
    assert (await agent.get("/v1/rendezvous/world?after=0&wait=5"))["world"]["generation"] == 2


async def test_finished_holds_per_generation(agent: RunningAgent, workflows: Workflows) -> None:
    await agent.launcher_hello()
    await agent.desire(world=agent.world(1))
    await agent.enter(1)
    await agent.post("/v1/rendezvous/finished", generation=1, time=time.time())
    await agent.post("/v1/rendezvous/finished", generation=1, time=time.time())
    [first] = await workflows.expect(workflows.job, "finished")
    assert first["generation"] == 1
    # A peer died in its last save: the barrier is left with the reserved code, and the command runs again.
    await agent.desire(world=agent.world(2))
    await agent.post("/v1/launcher/exited", attempt=1, generation=1, exit_code=87, superseded=True, time=time.time())
    assert (await agent.get("/v1/launcher/desired?version=0&wait=0"))["attempt"] == 2
    await agent.enter(2)
    await agent.post("/v1/rendezvous/finished", generation=2, time=time.time())
    waiting = asyncio.create_task(agent.get("/v1/rendezvous/world?after=2&wait=25&complete=0"))
    await agent.desire(complete_generation=2)
    assert (await asyncio.wait_for(waiting, DEADLINE))["complete"] == 2
    await agent.post("/v1/launcher/exited", attempt=2, generation=2, exit_code=0, time=time.time())
    # The ranks of each generation, and then the command.
    finished = await workflows.expect(workflows.job, "finished", count=3)
    assert [(one["generation"], one["command_runs"]) for one in finished] == [(1, True), (2, True), (2, False)]
    assert not await workflows.seen(workflows.job, "failure")


async def test_an_agent_killed_and_restarted_continues(agent: RunningAgent, workflows: Workflows) -> None:
    await agent.launcher_hello()
    await agent.handler_hello()
    await agent.ready(0)
    await agent.desire(world=agent.world(1))
    await agent.enter(1)
    before = await agent.get("/v1/launcher/desired?version=0&wait=0")
    await workflows.expect(workflows.group, "ready")
    await agent.kill()
    await agent.start()
    joined = await workflows.expect(workflows.group, "joined", count=2)
    assert joined[1]["generation"] == 1
    assert joined[1]["sequence"] > joined[0]["sequence"]
    # The launcher's open question is answered at once, and asks for nothing new.
    after = await asyncio.wait_for(agent.get(f"/v1/launcher/desired?version={before['version']}&wait=25"), DEADLINE)
    assert (after["run"], after["attempt"], after["stop_generation"]) == (True, 1, 0)
    assert not (await agent.desire(world=agent.world(1, group_rank=5)))["accepted"]
    write_step(agent, generation=1, step=1)
    await workflows.expect(workflows.group, "stepping")


async def test_a_lease_is_held_over_and_released(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    first = await agent.start_lease(1)
    [taken] = await workflows.expect(workflows.group, "lease_taken")
    assert taken["epoch"] == 1
    # A newer lease ends the older one at once.
    second = await agent.start_lease(2)
    assert await asyncio.wait_for(first, DEADLINE) == "returned"
    await workflows.expect(workflows.group, "lease_taken", where=lambda body: body["epoch"] == 2)
    assert (await eventually(workflows.report))["epoch"] == 2
    # A stale one is not held at all.
    third = await agent.start_lease(1)
    assert await asyncio.wait_for(third, DEADLINE) == "returned"
    second.cancel()


async def test_a_stopped_agent_comes_back(agent: RunningAgent, workflows: Workflows) -> None:
    agent.config = agent.config.model_copy(update={"timing": QUICK.model_copy(update={"lease": SHORT_LEASE})})
    await workflows.expect(workflows.group, "joined")
    await agent.launcher_hello()
    await agent.desire(world=agent.world(1))
    first = await agent.start_lease(1)
    await workflows.expect(workflows.group, "lease_taken")
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        assert await asyncio.wait_for(first, DEADLINE) == "TimeoutError"
        leases = [await agent.start_lease(2)]
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    # The server may give a lease to the poll that the stopped agent had left: a job starts the next one, too.
    taken = asyncio.create_task(workflows.expect(workflows.group, "lease_taken", where=lambda body: body["epoch"] > 1))
    while (await asyncio.wait((taken, leases[-1]), return_when=asyncio.FIRST_COMPLETED)) and not taken.done():
        leases.append(await agent.start_lease(2 + len(leases)))
    leases[-1].cancel()
    await taken
    desired = await agent.get("/v1/launcher/desired?version=0&wait=0")
    assert (desired["run"], desired["attempt"], desired["exit"]) == (True, 1, False)


async def test_a_closed_job_ends_training_and_a_missing_one_does_not(
    temporal_server: DevServer, workflows: Workflows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    owned, orphan = tmp_path_factory.mktemp("n"), tmp_path_factory.mktemp("n")
    async with (
        running_agent(temporal_server, workflows, owned) as agent,
        running_agent(temporal_server, workflows, orphan, job_id="job/tests/never-was") as stranger,
    ):
        await agent.launcher_hello()
        await stranger.launcher_hello()
        await eventually(lambda: "NOT_FOUND" in stranger.log())
        # Before the end, which changes the version: a long poll for a later change would wait in vain.
        version = (await agent.get("/v1/launcher/desired?version=0&wait=0"))["version"]
        await workflows.job.terminate("by the test")
        desired = await asyncio.wait_for(agent.get(f"/v1/launcher/desired?version={version}&wait=60"), DEADLINE)
        assert desired["exit"]
        assert desired["reason"] == "the job has closed"
        await agent.post("/v1/launcher/exited", attempt=1, generation=0, signal=15, time=time.time())
        assert not (await stranger.get("/v1/launcher/desired?version=0&wait=0"))["exit"]


async def test_an_orphan_grace_ends_training_of_a_missing_job(
    temporal_server: DevServer, workflows: Workflows, folder: Path
) -> None:
    timing = QUICK.model_copy(
        update={"processes": QUICK.processes.model_copy(update={"orphan_grace": timedelta(seconds=2)})}
    )
    async with running_agent(temporal_server, workflows, folder, job_id="job/tests/gone", timing=timing) as agent:
        await agent.launcher_hello()
        desired = await eventually(lambda: agent.get("/v1/launcher/desired?version=0&wait=0"))
        assert not desired["exit"]
        desired = await asyncio.wait_for(
            agent.get(f"/v1/launcher/desired?version={desired['version']}&wait=25"), DEADLINE
        )
        assert "orphan_grace" in desired["reason"]


async def test_a_name_used_again_is_not_our_job(temporal_server: DevServer, workflows: Workflows, folder: Path) -> None:
    """Another job has the name: ours, which the server still knows, has closed."""
    await workflows.job.terminate("by the test")
    await workflows.client.start_workflow(Recorder.run, id=workflows.job.id, task_queue="unserved")
    async with running_agent(temporal_server, workflows, folder) as agent:
        await agent.launcher_hello()

        async def leaves() -> bool:
            return (await agent.get("/v1/launcher/desired?version=0&wait=0"))["exit"]

        await eventually(leaves)


async def test_a_stopped_node_leaves_after_its_launcher(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    launcher = await asyncio.create_subprocess_exec(
        "sleep", "600", env={**os.environ, **agent.environment}, start_new_session=True
    )
    try:
        await agent.launcher_hello(pid=launcher.pid)
        stop = StopRequest(grace=timedelta(seconds=1), reason="scaled down")
        assert (await agent.desire(stop=stop))["accepted"]
        assert (await agent.get("/v1/launcher/desired?version=0&wait=0"))["reason"] == "scaled down"
        assert not (await agent.desire(world=agent.world(1)))["accepted"]
        assert agent.process is not None
        assert agent.process.returncode is None
    finally:
        launcher.kill()
        await launcher.wait()
    assert await asyncio.wait_for(agent.process.wait(), DEADLINE) == 0
    assert not await workflows.seen(workflows.job, "failure")


async def test_sigterm_ends_the_agent_cleanly(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    assert agent.process is not None
    agent.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(agent.process.wait(), DEADLINE) == 0


async def test_only_one_agent_serves_a_node(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    second = await start_agent(agent.process_environment)
    assert await asyncio.wait_for(second.wait(), DEADLINE) == 75
    assert agent.process is not None
    assert agent.process.returncode is None


async def test_a_full_disk_costs_nothing_but_memory_of_it(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    # Every write of a byte fails from here on.
    _, hard = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (0, hard))
    await agent.launcher_hello()
    await agent.handler_hello()
    await agent.ready(0)
    await workflows.expect(workflows.group, "ready")
    assert (await agent.desire(world=agent.world(1)))["accepted"]
    await agent.enter(1)
    await agent.ready(1, [rank_exit()])
    await workflows.expect(workflows.job, "failure")
    state = agent.run_dir / "agent-state.json"
    assert b'"generation":1' not in state.read_bytes()
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (hard, hard))
    await eventually(lambda: b'"generation":1' in state.read_bytes())


async def test_wrong_requests_are_refused_with_what_was_expected(agent: RunningAgent) -> None:
    for method, path, body, expected in (
        ("POST", "/v1/rendezvous/entered", {"generation": "x", "time": 1}, "generation"),
        ("POST", "/v1/launcher/hello", {}, "pid"),
        ("GET", "/v1/rendezvous/world?after=x", None, "after is 'x'; expected a whole number"),
        ("GET", "/v1/launcher/desired?version=0&wait=soon", None, "wait is 'soon'"),
    ):
        status, answer = await agent.request(method, path, body)
        assert status == 400
        assert expected in answer["error"]
    status, answer = await agent.request("GET", "/v2/anything")
    assert status == 404
    assert "/v2/anything" in answer["error"]
    assert (agent.run_dir / "agent.sock").stat().st_mode & 0o777 == 0o666


async def test_ranks_whose_steps_cannot_be_seen_count_as_running(agent: RunningAgent, workflows: Workflows) -> None:
    await agent.launcher_hello(mode="env")
    await agent.desire(world=agent.world(1))
    began = time.time()
    await agent.enter(1)
    [stepping] = await workflows.expect(workflows.group, "stepping")
    assert stepping["generation"] == 1
    assert utc(stepping["time"]).timestamp() - began > 5


async def test_usage_rides_along(agent: RunningAgent, workflows: Workflows) -> None:
    await agent.launcher_hello()
    await agent.start_lease(1)
    await agent.post(
        "/v1/launcher/usage", cpu_cores=1.5, memory_bytes=10, memory_limit_bytes=None, devices=[{"index": 0}]
    )

    async def metrics_of_the_lease() -> dict | None:
        return (await workflows.report() or {}).get("metrics")

    metrics = await eventually(metrics_of_the_lease)
    assert (metrics["cpu_cores"], metrics["memory_bytes"], metrics["devices"][0]["index"]) == (1.5, 10, 0)


async def test_the_log_is_copied_where_the_job_says(
    temporal_server: DevServer, workflows: Workflows, folder: Path, tmp_path: Path
) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "output.log").write_text("hello from rank 0\n")
    async with running_agent(temporal_server, workflows, folder, outputs_logs=f"file://{tmp_path}/out"):
        part = tmp_path / "out" / "worker-0" / "1" / "part-000001.log"
        await eventually(lambda: part.exists() and part.read_text() == "hello from rank 0\n")


async def test_the_last_events_of_the_agent_are_in_the_archive(
    temporal_server: DevServer, workflows: Workflows, folder: Path, tmp_path: Path
) -> None:
    async with running_agent(temporal_server, workflows, folder, archived_events=f"file://{tmp_path}/kept") as agent:
        await eventually((folder / "events" / "agent.jsonl").exists)
        assert agent.process is not None
        agent.process.terminate()
        assert await agent.process.wait() == 0
    kept = tmp_path / "kept" / "worker-0" / "1"
    events = [json.loads(line) for line in (kept / "agent" / "part-000001.jsonl").read_text().splitlines()]
    assert [event["name"] for event in events][-1] == "exit"
    assert (kept / "complete").exists()


async def test_a_wrong_configuration_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    for value, expected in (
        (None, "PERDURE_AGENT_CONFIG is not set"),
        ("/no/such/file", "'/no/such/file', which cannot be read"),
        (__file__, "not an agent configuration"),
    ):
        environment = {name: text for name, text in os.environ.items() if name != "PERDURE_AGENT_CONFIG"}
        process = await start_agent(environment | ({"PERDURE_AGENT_CONFIG": value} if value else {}))
        assert await process.wait() == 2
        assert expected in capfd.readouterr().err


@pytest.mark.long("commands")
def test_the_agent_is_a_module_that_a_new_interpreter_runs() -> None:
    """Agents of this folder are forked from an interpreter that has imported it; those of whole jobs are not."""
    environment = {name: text for name, text in os.environ.items() if name != "PERDURE_AGENT_CONFIG"}
    command = [sys.executable, "-P", "-m", "perdure.agent"]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "PERDURE_AGENT_CONFIG is not set" in done.stderr) == (2, True)


async def test_an_outage_delays_and_loses_nothing(folder: Path) -> None:
    async with (
        dev_server() as server,
        recording(server) as workflows,
        running_agent(server, workflows, folder) as agent,
    ):
        await workflows.expect(workflows.group, "joined")
        await agent.launcher_hello()
        await agent.desire(world=agent.world(1))
        await agent.enter(1)
        server.kill()
        happened = time.time()
        await agent.ready(1, [rank_exit(time=happened)])
        await agent.post("/v1/rendezvous/finished", generation=1, time=happened)
        # An agent that dies in the middle of it changes nothing about that.
        await agent.kill()
        await agent.start()
        await agent.post("/v1/launcher/exited", attempt=1, generation=1, signal=11, time=time.time())
        await asyncio.sleep(OUTAGE_S)
        assert (await agent.get("/v1/launcher/desired?version=0&wait=0"))["run"]
        await server.start()
        failures = await workflows.expect(workflows.job, "failure", count=2)
        assert [(one["kind"], one["generation"]) for one in failures] == [("RANKS", 1), ("COMMAND", 1)]
        assert abs(utc(failures[0]["time"]).timestamp() - happened) < 0.01
        await workflows.expect(workflows.job, "finished")
        seen = await workflows.seen(workflows.job)
        assert [one.signal for one in seen] == ["failure", "failure", "finished"]
        sequences = [one.body["sequence"] for one in seen]
        assert sequences == sorted(set(sequences))
        joined = await workflows.expect(workflows.group, "joined", count=2)
        assert len(joined) == 2


async def test_an_agent_that_starts_before_its_server_waits_for_it(folder: Path) -> None:
    async with dev_server() as server, recording(server) as workflows:
        server.kill()
        async with running_agent(server, workflows, folder) as agent:
            await agent.launcher_hello()
            await server.start()
            await workflows.expect(workflows.group, "joined")


async def test_it_rests_between_heartbeats(agent: RunningAgent, workflows: Workflows) -> None:
    await workflows.expect(workflows.group, "joined")
    lease = await agent.start_lease(1)
    await agent.launcher_hello()
    await agent.desire(world=agent.world(1))
    await agent.enter(1)
    write_step(agent, generation=1, step=1)
    await workflows.expect(workflows.group, "stepping")
    process = psutil.Process(agent.pid)
    before = sum(process.cpu_times()[:2])
    began = time.monotonic()
    await workflows.beats(5)
    cpu = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    print(f"agent: {100 * cpu:.2f} % of a core with a lease beat of 0.5 s")
    # A loop that never rests uses far more; how much a rest costs depends on what else the machine does.
    assert cpu < 0.25
    lease.cancel()
