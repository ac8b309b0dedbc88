"""Tests of every way to start ranks: the job controls the rendezvous, or the command is stopped with an explanation."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from perdure_training.node_api.progress_file import is_without_process_group
from tests.launcher.nodes import (
    EXITED,
    READY,
    SCRIPTS,
    TORCHRUN,
    Node,
    all_step,
    first_world,
    form_world,
    running,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300), pytest.mark.long("launchers")]

HELLO = "/v1/rendezvous/hello"
ENV_READY = "/v1/launcher/ready"
UNMANAGED = "/v1/launcher/unmanaged"

BIN = Path(sys.executable).parent
PYTHON = [sys.executable, "-u"]
LAUNCH = [sys.executable, "-m", "torch.distributed.launch"]
ACCELERATE = [str(BIN / "accelerate"), "launch"]
ELSEWHERE = ["--master-addr=192.0.2.1", "--master-port=29500"]
"""An address that no machine has."""


def pair(*command: str, other: Sequence[str] = (), **config: object) -> list[Node]:
    """Two nodes of a job of two, with the same command or each with one of its own."""
    return [Node(one, run_id="pair", **{"nodes": "2", **config}) for one in (command, other or command)]


def in_shell(*command: str) -> list[str]:
    return ["bash", "-c", f"set -e\nexport GREETING=hello\n{shlex.join(command)}"]


async def one_training(nodes: list[Node], *, processes: int = 1, path: str = READY) -> None:
    """Both nodes step together, and again after each has lost a rank; every step is an all-reduce."""
    ready = await first_world(nodes, processes=processes, path=path)
    for node, rank in zip(nodes, (0, processes), strict=True):
        os.kill(node.ranks()[rank], signal.SIGKILL)
    for node in nodes:
        await node.agent.heard(path, lambda body: bool(body["ranks"]))
    await form_world(nodes, 2, port=ready[0].body["store_ports"][1], processes=processes)
    await all_step(nodes, 2, processes=processes)


@pytest.mark.parametrize(
    ("command", "other"),
    [
        (
            [*TORCHRUN, "--standalone", "train.py"],
            [*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:29400", "--rdzv-id=mine", "train.py"],
        ),
        (
            [*TORCHRUN, "--rdzv-backend=etcd-v2", "--rdzv-endpoint=192.0.2.1:2379", "train.py"],
            [*TORCHRUN, "--rdzv_backend", "static", "--node-rank=1", *ELSEWHERE, "train.py"],
        ),
        (
            in_shell(*TORCHRUN, "--rdzv-backend=static", "--node-rank=0", *ELSEWHERE, "train.py"),
            [*LAUNCH, "--use-env", "--nnodes=2", "--node-rank=0", *ELSEWHERE, "train.py"],
        ),
        (in_shell(*LAUNCH, "train.py"), [str(BIN / "fabric"), "run", "--accelerator=cpu", "train.py"]),
    ],
    ids=["standalone-c10d", "etcd-static", "static-in-shell-launch", "launch-in-shell-fabric"],
)
async def test_whatever_rendezvous_torchrun_is_told_two_nodes_are_one_training(
    command: list[str], other: list[str]
) -> None:
    """Each node is told another, so that every kind is held in half as many trainings."""
    nodes = pair(*command, other=other)
    async with running(*nodes):
        await one_training(nodes)


@pytest.mark.parametrize("script", ["run.sh", "background.sh"])
async def test_a_clusters_shell_script_is_one_training(script: str) -> None:
    nodes = pair("bash", script, env={"PATH": f"{BIN}:{os.environ['PATH']}"})
    async with running(*nodes):
        await one_training(nodes)


async def test_a_torchrun_that_lost_the_plugin_is_stopped_on_a_single_node_too() -> None:
    node = Node(["env", "-u", "PYTHONPATH", *TORCHRUN, "--standalone", "alone.py"])
    async with running(node):
        report = await node.agent.heard(UNMANAGED)
        assert "so nothing would start it again after a failure" in report.body["detail"]
        assert "add to PYTHONPATH instead of replacing it" in report.body["detail"]
        await node.agent.heard(EXITED)
        assert node.processes(lambda environment: "LOCAL_RANK" in environment) == []


async def test_a_fixed_number_of_nodes_does_not_keep_an_elastic_job_from_other_sizes() -> None:
    nodes = pair(*TORCHRUN, "--nnodes=4", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1", "train.py", nodes="1:4")
    async with running(*nodes):
        hello = await nodes[0].agent.heard(HELLO)
        assert (hello.body["min_nodes"], hello.body["max_nodes"]) == (4, 4), "the agent compares it with the job"
        ready = await first_world(nodes)
        await form_world(nodes[:1], 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes[:1], 2)


RANKS = ["--multi_gpu", "--num_processes=2"]
MACHINES = ["--num_machines=2", "--machine_rank=0", "--main_process_ip=192.0.2.1", "--main_process_port=29501"]
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 4
machine_rank: 0
main_process_ip: 192.0.2.1
main_process_port: 29502
same_network: true
rdzv_backend: static
mixed_precision: 'no'
use_cpu: false
"""


@pytest.mark.parametrize(
    ("options", "other", "processes"),
    [
        (RANKS, ["--config_file=accelerate.yaml"], 2),
        ([*RANKS, *MACHINES], [*RANKS, "--rdzv_backend=c10d", *MACHINES], 1),
    ],
    ids=["static-config", "machines-c10d"],
)
async def test_accelerate_launch_is_one_training_where_it_uses_torchrun(
    options: list[str], other: list[str], processes: int, tmp_path: Path
) -> None:
    (tmp_path / "accelerate.yaml").write_text(CONFIG)
    script = Path(__file__).parent / "scripts" / "kinds" / "accelerate_ddp.py"
    # Both nodes share a folder, and the user's own configuration of accelerate is none of the test's.
    env = {"TEST_STEPS_DIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    command, second = ([*ACCELERATE, *of_node, str(script)] for of_node in (options, other))
    nodes = pair(*command, other=second, workdir=str(tmp_path), env=env)
    async with running(*nodes):
        await one_training(nodes, processes=processes)


async def test_accelerate_launch_runs_one_process_per_rank_where_the_launcher_places_ranks(tmp_path: Path) -> None:
    shared = {"TEST_STEPS_DIR": str(tmp_path)}
    nodes = pair(*ACCELERATE, "--cpu", "kinds/accelerate_ddp.py", rendezvous="env", env=shared)
    async with running(*nodes):
        await one_training(nodes, path=ENV_READY)


@pytest.mark.parametrize(
    ("command", "nodes", "consequence"),
    [
        ([*ACCELERATE, "--cpu", "kinds/accelerate_ddp.py"], "2", "each node would train alone beside the others"),
        (in_shell(*PYTHON, "saves.py", "torchrun"), "2", "each node would train alone beside the others"),
        ([*ACCELERATE, "--cpu", "kinds/accelerate_ddp.py"], "1", "nothing would start it again after a failure"),
    ],
    ids=["accelerate", "shell", "one-node"],
)
async def test_a_process_that_trains_without_a_place_is_stopped_at_its_first_step(
    command: list[str], nodes: str, consequence: str
) -> None:
    node = Node(command, nodes=nodes)
    async with running(node):
        report = await node.agent.heard(UNMANAGED)
        assert consequence in report.body["detail"]
        assert "set the role's `rendezvous` to `env`" in report.body["detail"]
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 1
        assert (
            "UnmanagedTrainingError: this process trains although it has no rank in a world" in exited.body["log_tail"]
        )


async def test_a_process_that_is_meant_to_train_beside_the_job_may() -> None:
    beside = "env -u PERDURE_TORCHRUN python step_once.py && torchrun train.py"
    node = Node(["bash", "-c", beside], env={"PATH": f"{BIN}:{os.environ['PATH']}"})
    script = Path(node.run_directory) / "step_once.py"
    script.write_text(
        "import torch\nweight = torch.nn.Parameter(torch.zeros(1))\nweight.grad = torch.ones(1)\n"
        "torch.optim.SGD([weight], lr=0.1).step()\nprint('prepared')\n"
    )
    for name in ("train.py", "descent.py"):
        shutil.copy(SCRIPTS / name, node.run_directory)
    node.config["workdir"] = str(node.run_directory)
    async with running(node):
        await first_world([node])
        await eventually(lambda: "prepared" in node.output)


@pytest.mark.parametrize("shell", [False, True])
async def test_deepspeeds_launcher_is_stopped_and_torchrun_written_instead(shell: bool) -> None:
    command = [str(BIN / "deepspeed"), "--num_gpus=2", "--master_port=29512", "train.py", "--epochs", "3"]
    node = Node(in_shell(*command) if shell else command)
    async with running(node):
        report = await node.agent.heard(UNMANAGED)
        assert report.body["detail"].endswith("write instead: torchrun --nproc-per-node=2 train.py --epochs 3")
        exited = await node.agent.heard(EXITED)
        assert "the deepspeed launcher starts ranks by itself" in exited.body["log_tail"]
        assert node.processes(lambda environment: "LOCAL_RANK" in environment) == []


@pytest.mark.parametrize("shell", [False, True])
async def test_a_torchrun_in_a_container_that_the_command_starts_is_stopped_by_its_client(shell: bool) -> None:
    node = Node(["./docker", "run", "--rm", "image", "torchrun", "train.py"], nodes="2")
    # Like the real one, it passes SIGTERM on, and what it has started outlives its own SIGKILL. It is a shell, whose
    # first argument is a script, and not Python, which would get the signal before it can handle it.
    shutil.copy(shutil.which("bash") or "/bin/bash", node.run_directory / "docker")
    (node.run_directory / "run").write_text("trap 'echo the container ends; exit 143' TERM\nsleep 60 &\nwait\n")
    node.config["workdir"] = str(node.run_directory)
    if shell:
        node.config["command"] = in_shell(*node.config["command"])
    async with running(node):
        report = await node.agent.heard(UNMANAGED)
        assert report.body["detail"].startswith("docker starts torchrun where Perdure's environment does not reach it")
        exited = await node.agent.heard(EXITED)
        assert "the container ends" in exited.body["log_tail"]


@pytest.mark.parametrize(("launcher", "path"), [(TORCHRUN, READY), (PYTHON, ENV_READY)], ids=["torchrun", "python"])
async def test_a_script_that_names_its_own_master_meets_at_the_jobs_store(launcher: list[str], path: str) -> None:
    nodes = pair(*launcher, "own_master.py", "env", other=[*launcher, "own_master.py", "tcp"])
    async with running(*nodes):
        await one_training(nodes, path=path)
        text = "the script names localhost:29511 for its process group; the job's own 127.0.0.1:"
        await eventually(lambda: all(text in node.output for node in nodes))


async def test_a_script_that_makes_a_world_of_its_own_on_each_of_several_nodes_is_stopped() -> None:
    nodes = pair(*PYTHON, "own_master.py", "alone")
    async with running(*nodes):
        ready = [await node.agent.heard(ENV_READY) for node in nodes]
        await form_world(nodes, 1, port=ready[0].body["store_ports"][0])
        for node in nodes:
            report = await node.agent.heard(UNMANAGED)
            assert "requests a process group of 1 at localhost:29511" in report.body["detail"]
            assert "Leave MASTER_ADDR, MASTER_PORT, the rank and the world size out" in report.body["detail"]
            await eventually(lambda node=node: "UnmanagedTrainingError" in node.output)
            assert node.ranks() == {}, "it has made no step"


async def test_ranks_that_train_without_a_process_group_are_told_from_those_that_have_one() -> None:
    apart, together = (Node([*PYTHON, script], processes=2) for script in ("saves.py", "env_train.py"))
    async with running(apart, together):
        for node in (apart, together):
            await first_world([node], processes=2, path=ENV_READY)
            await node.stepped(0, 1, steps=15)
        await eventually(lambda: is_without_process_group(apart.run_directory / "progress", generation=1))
        assert not is_without_process_group(together.run_directory / "progress", generation=1)
