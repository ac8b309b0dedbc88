"""Tests that ranks recover with the oldest supported PyTorch: `make test-torch-floor` runs them."""

from __future__ import annotations

import os
import signal

import pytest

from perdure_launcher.warm_start.starts import read_starts
from scripts.torch_floor import VARIABLE, oldest_torch
from tests.launcher.nodes import EXITED, FINISHED, READY, Node, all_step, first_world, form_world, running
from tests.launcher.test_torchrun_worlds import HELLO, finish

FLOOR = os.environ.get(VARIABLE, "")

pytestmark = [
    pytest.mark.usefixtures("ranks"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FLOOR, reason="needs another PyTorch: make test-torch-floor"),
]


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
async def test_two_nodes_lose_a_rank_then_rank_0s_node_and_finish(warm: bool) -> None:
    command = [FLOOR, "-m", "torch.distributed.run", "train.py"]
    nodes = lost, survivor = [Node(command, nodes="1:2", run_id="pair", warm_starts=warm) for _ in range(2)]
    async with running(*nodes):
        ready = await first_world(nodes)
        hello = await survivor.agent.heard(HELLO)
        assert hello.body["torch"].startswith(oldest_torch())
        os.kill(survivor.ranks()[1], signal.SIGKILL)
        [culprit] = (await survivor.agent.heard(READY)).body["ranks"]
        assert (culprit["signal"], culprit["global_rank"]) == (signal.SIGKILL, 1)
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)
        starts = read_starts(survivor.run_directory / "warm", generation=2, processes=1)
        assert [start.warm for start in starts] == ([True] if warm else [])

        assert lost.launcher
        lost.launcher.kill()
        await form_world([survivor], 3, port=ready[1].body["store_ports"][0])
        await all_step([survivor], 3)
        finish(survivor)
        await survivor.agent.heard(FINISHED)
        await survivor.agent.complete_generation(3)
        exited = await survivor.agent.heard(EXITED)
        assert (exited.body["exit_code"], exited.body["generation"]) == (0, 3)
