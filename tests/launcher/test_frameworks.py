"""Trainings of the frameworks that people use lose a rank, and resume from what they saved, however they are
started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launcher.nodes import READY, TORCHRUN, Node, all_ready, all_step, first_world, form_world, running
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(400), pytest.mark.long("frameworks")]

ENV_READY = "/v1/launcher/ready"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

PYTHON = [sys.executable, "-u"]
ACCELERATE = [str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes=2"]
PROCESSES = 2


@pytest.mark.parametrize(
    ("launcher", "kind", "path"),
    [
        (TORCHRUN, "accelerate_ddp", READY),
        (ACCELERATE, "accelerate_ddp", READY),
        (TORCHRUN, "hf_trainer", READY),
        (PYTHON, "hf_trainer", ENV_READY),
        (TORCHRUN, "lightning_fit", READY),
        (PYTHON, "lightning_fit", ENV_READY),
        (TORCHRUN, "deepspeed_zero", READY),
    ],
    ids=[
        *("accelerate", "accelerate-launch", "hf-trainer", "hf-trainer-python", "lightning", "lightning-python"),
        "deepspeed",
    ],
)
async def test_it_goes_on_after_a_killed_rank(launcher: list[str], kind: str, path: str, tmp_path: Path) -> None:
    node = Node([*launcher, f"kinds/{kind}.py"], processes=PROCESSES, env={**OFFLINE, "HF_HOME": str(tmp_path)})
    async with running(node):
        ready = await first_world([node], processes=PROCESSES, path=path)
        os.kill(node.ranks()[1], signal.SIGKILL)
        report = await node.agent.heard(path, lambda body: bool(body["ranks"]))
        assert any(rank["signal"] == signal.SIGKILL for rank in report.body["ranks"])
        await form_world([node], 2, port=ready[0].body["store_ports"][1], processes=PROCESSES)
        await all_step([node], 2, processes=PROCESSES)
        await eventually(lambda: "resumes from what was saved" in node.output)


async def test_two_nodes_of_a_lightning_script_that_is_started_by_plain_python_are_one_training() -> None:
    nodes = [Node([*PYTHON, "kinds/lightning_fit.py"], nodes="2", run_id="pair") for _ in range(2)]
    async with running(*nodes):
        await first_world(nodes, path=ENV_READY)


async def test_a_lightning_script_that_wants_more_devices_than_the_node_has_ranks_fails_with_lightnings_reason() -> (
    None
):
    node = Node([*PYTHON, "kinds/lightning_fit.py", "2"], processes=1)
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        report = await node.agent.heard(ENV_READY, lambda body: bool(body["ranks"]))
        assert "does not match the world size (1)" in report.body["ranks"][0]["error"]
