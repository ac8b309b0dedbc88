"""Tests that trainings of all kinds start warm, lose a rank, and continue warm."""

from __future__ import annotations

import os
import signal

import pytest

from perdure_launcher.warm_start.starts import read_starts
from tests.launcher.nodes import READY, TORCHRUN, Node, all_step, first_world, form_world, running

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300), pytest.mark.long("frameworks")]

PROCESSES = 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "compiled", "threads", "collectives"])
async def test_it_goes_on_after_a_killed_rank(kind: str) -> None:
    node = Node([*TORCHRUN, f"kinds/{kind}.py"], processes=PROCESSES)
    async with running(node):
        ready = await first_world([node], processes=PROCESSES)
        os.kill(node.ranks()[1], signal.SIGKILL)
        [culprit] = (await node.agent.heard(READY)).body["ranks"]
        assert culprit["signal"] == signal.SIGKILL
        await form_world([node], 2, port=ready[0].body["store_ports"][1], processes=PROCESSES)
        await all_step([node], 2, processes=PROCESSES)
        starts = read_starts(node.run_directory / "warm", generation=2, processes=PROCESSES)
        assert [start.warm for start in starts] == [True] * PROCESSES, starts
