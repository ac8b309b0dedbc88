"""Tests of commands without torchrun: the launcher starts one process per rank, for each world."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from perdure_launcher.warm_start.starts import read_starts
from tests.launcher.nodes import (
    EXITED,
    FINISHED,
    TORCHRUN,
    Node,
    all_ready,
    all_step,
    first_world,
    form_world,
    running,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(400)]

ENV_READY = "/v1/launcher/ready"


@pytest.mark.long("launchers")
async def test_two_nodes_train_survive_a_killed_rank_and_finish() -> None:
    nodes = [Node([sys.executable, "-u", "env_train.py"], nodes="2") for _ in range(2)]
    async with running(*nodes):
        ready = await first_world(nodes, path=ENV_READY)
        assert (ready[0].body["after_generation"], ready[0].body["processes"]) == (0, 1)
        hello = await nodes[0].agent.heard("/v1/launcher/hello")
        assert (hello.body["mode"], hello.body["processes"]) == ("env", 1)
        place = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 NODE_RANK=1"
        assert place in nodes[1].output
        victim = nodes[1].ranks()[1]
        interpreters = [warm_interpreter(node) for node in nodes]
        os.kill(victim, signal.SIGKILL)
        report = await nodes[1].agent.heard(ENV_READY)
        assert report.body["after_generation"] == 1
        killed = next(rank for rank in report.body["ranks"] if rank["pid"] == victim)
        assert (killed["signal"], killed["local_rank"], killed["global_rank"]) == (9, 0, 1)
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)
        # A newer world restarts ranks that are well, and that is no failure.
        nodes[0].agent.posts.clear()
        await form_world(nodes, 3, port=ready[0].body["store_ports"][2])
        await all_step(nodes, 3)
        assert nodes[0].agent.said(ENV_READY) == []
        for node in nodes:
            [start] = read_starts(node.run_directory / "warm", generation=3, processes=1)
            assert (start.warm, start.pid) == (True, next(iter(node.ranks(3).values()))), start
        assert [warm_interpreter(node) for node in nodes] == interpreters
        for node in nodes:
            (node.run_directory / "stop").touch()
        for node in nodes:
            await node.agent.heard(FINISHED, lambda body: body["generation"] == 3)
            exited = await node.agent.heard(EXITED)
            assert (exited.body["exit_code"], exited.body["generation"]) == (0, 3)
            await node.agent.want(exit=True)
        for node in nodes:
            assert await node.left() == 0
            assert node.processes() == []


@pytest.mark.long("launchers")
async def test_a_node_of_an_elastic_job_joins_when_its_interpreter_is_warm() -> None:
    node = Node([sys.executable, "-u", "env_train.py"], nodes="1:2")
    async with running(node):
        pid = node.run_directory / "warm" / "pid"
        await eventually(lambda: pid.exists() and pid.read_text())
        os.kill(warm_interpreter(node), signal.SIGSTOP)
        await node.agent.heard("/v1/launcher/usage")
        assert node.agent.said(ENV_READY) == []
        os.kill(warm_interpreter(node), signal.SIGCONT)
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await all_step([node], 1)
        [start] = read_starts(node.run_directory / "warm", generation=1, processes=1)
        assert start.warm


def warm_interpreter(node: Node) -> int:
    """The process that ranks are forked from: theirs, and it shows the environment that it was started with itself."""
    return int((node.run_directory / "warm" / "pid").read_text())


@pytest.mark.long("launchers")
async def test_what_a_rank_leaves_behind_ends_with_it_and_the_warm_interpreter_stays() -> None:
    leaves = "import subprocess; subprocess.Popen(['sleep', '321'], start_new_session=True)"
    node = Node([sys.executable, "-c", leaves], stop_grace_s=0.2)
    async with running(node):
        for generation in (1, 2):
            ready = await node.agent.heard(ENV_READY)
            await form_world([node], generation, port=ready.body["store_ports"][0])
            exited = await node.agent.heard(EXITED)
            assert (exited.body["exit_code"], exited.body["generation"]) == (0, generation)
            assert node.processes(lambda environment: "RANK" in environment) == []
            assert Path(f"/proc/{warm_interpreter(node)}").exists()
            await node.agent.want(attempt=generation + 1)


async def test_a_rank_that_raises_is_reported_with_its_exception() -> None:
    """What keeps the exception is loaded by the script's own import of torch."""
    node = Node([sys.executable, "fails.py"], warm_starts=False)
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        report = await node.agent.heard(ENV_READY)
        [failed] = report.body["ranks"]
        assert (failed["exit_code"], failed["error"][:27]) == (1, "ValueError: unknown optimiz")
        # An agent that comes back is told again that the node waits, and not again what failed.
        await node.agent.stop()
        node.agent.posts.clear()
        await node.agent.start()
        again = await node.agent.heard(ENV_READY)
        assert (again.body["after_generation"], again.body["ranks"]) == (1, [])


async def test_an_error_that_a_pipe_hides_is_named_in_the_log() -> None:
    # As the uncaught exception of a script with torch does, which takes long to import.
    fails = (
        "import json, os; from perdure_launcher.rank_plugins.error_file import error_content; "
        "content = json.dumps(error_content(ValueError('bad loss'), '')); "
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(content); raise SystemExit(1)"
    )
    node = Node(["sh", "-c", f"{shlex.join([sys.executable, '-c', fails])} 2>&1 | cat"], warm_starts=False)
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 0
        last = exited.body["log_tail"].splitlines()[-1]
        assert last.startswith(
            "perdure: rank 0 has ended with 0, just after a program of it had failed with ValueError: bad"
        )
        assert "set -o pipefail" in last


@pytest.mark.long("launchers")
async def test_a_peer_that_ignores_sigterm_is_killed_after_the_stop_grace() -> None:
    node = Node([sys.executable, "-u", "stubborn.py"], processes=2, stop_grace_s=0.5)
    async with running(node):
        await first_world([node], processes=2, path=ENV_READY)
        killed_at = time.time()
        os.kill(node.ranks()[0], signal.SIGKILL)
        report = await node.agent.heard(ENV_READY)
        assert report.heard_at - killed_at < 30
        assert [rank["local_rank"] for rank in report.body["ranks"]] == [0]


@pytest.mark.long("launchers")
async def test_a_command_that_does_not_exist_is_reported_when_a_world_calls_for_it() -> None:
    node = Node(["no-such-program", "--fast"])
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 127
        assert "command not found: 'no-such-program'" in exited.body["log_tail"]


@pytest.mark.long("launchers")
async def test_a_program_that_starts_torchrun_by_itself_on_several_nodes_is_stopped_and_explained() -> None:
    program = "import subprocess, sys; subprocess.run([*sys.argv[1:], 'alone.py'])"
    node = Node([sys.executable, "-c", program, *TORCHRUN], nodes="2", rendezvous="env")
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        report = await node.agent.heard("/v1/launcher/unmanaged")
        assert "Set the role's `rendezvous` to `torchrun`" in report.body["detail"]
        assert "rendezvous" in (await node.agent.heard(EXITED)).body["log_tail"]
        assert node.processes(lambda environment: "TORCHELASTIC_RUN_ID" in environment) == []


@pytest.mark.long("launchers")
async def test_that_its_node_ends_is_said_before_a_rank_that_saves_leaves_with_0() -> None:
    saves = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up'); signal.pause()"
    node = Node([sys.executable, "-u", "-c", saves])
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await eventually(lambda: "up" in node.output)
        assert node.launcher
        node.launcher.terminate()
        assert (await node.agent.heard(EXITED)).body["exit_code"] == 0
        # So the agent knows what to think of it.
        said = [post.path for post in node.agent.posts]
        assert said.index("/v1/launcher/leaving") < said.index(FINISHED)


@pytest.mark.long("launchers")
async def test_running_no_more_is_running_no_more() -> None:
    node = Node([sys.executable, "-u", "stubborn.py"], termination_grace_s=0.5)
    async with running(node):
        await first_world([node], path=ENV_READY)
        await node.agent.want(run=False)
        exited = await node.agent.heard(EXITED)
        assert exited.body["signal"] == 9
        await eventually(lambda: node.processes(lambda environment: "RANK" in environment) == [])
        assert node.launcher
        assert node.launcher.poll() is None
