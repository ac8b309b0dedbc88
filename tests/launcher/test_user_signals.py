"""Tests of signals that mean what scripts make of them: they reach ranks once, and nothing ends by their default."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from perdure_launcher.system.user_signals import REQUESTS, TOGETHER, USER_SIGNALS, Passing
from tests.launcher.nodes import TORCHRUN, Node, all_ready, form_world, running
from tests.launcher.test_env_mode import ENV_READY
from tests.support.waiting import eventually

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("received", "passed"),
    [
        ([REQUESTS[USR1]], [USR1]),
        ([USR1], [USR1]),
        ([USR1, REQUESTS[USR1]], []),
        ([REQUESTS[USR1], USR1, REQUESTS[USR1]], []),
        ([REQUESTS[USR1], USR2, USR2], [USR1, USR2]),
        ([signal.SIGTERM], []),
    ],
    ids=["requested", "to-the-launcher-alone", "to-all", "to-all-in-another-order", "two-kinds", "an-end"],
)
def test_ranks_get_a_signal_once_and_not_if_they_had_it_with_all_processes_of_a_step(
    received: list[int], passed: list[signal.Signals]
) -> None:
    got: list[signal.Signals] = []
    passing = Passing(got.append)
    assert {passing.take(number, now=1.0) for number in received} == {received != [signal.SIGTERM]}
    passing.advance(now=1.0)
    assert not got
    passing.advance(now=1.0 + TOGETHER)
    assert got == passed
    assert passing.next_step is None
    passing.advance(now=9.0)
    assert got == passed


@pytest.mark.long("launchers")
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("launcher", [TORCHRUN, [sys.executable]], ids=["torchrun", "env"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
async def test_ranks_below_the_launcher_get_what_schedulers_send(launcher: list[str], warm: bool) -> None:
    node = Node([*launcher, "handles_signals.py"], warm_starts=warm)
    async with running(node):
        [ready] = await (all_ready(node) if launcher is TORCHRUN else all_ready(node, path=ENV_READY))
        await form_world([node], 1, port=ready.body["store_ports"][0])
        found = await eventually(lambda: re.search(r"ready as (\d+)", node.output))
        assert "handlers before: []" in node.output
        assert node.launcher
        for number in USER_SIGNALS:
            os.kill(node.launcher.pid, REQUESTS[number])
            await eventually(lambda number=number: f"rank got {number.name}" in node.output)
        # As Slurm does: to each process of the step.
        everyone = [pid for pid in node.processes() if Path(f"/proc/{pid}").exists()]
        for pid in everyone:
            os.kill(pid, USR2)
        os.kill(node.launcher.pid, REQUESTS[USR2])
        await eventually(lambda: node.output.count("rank got SIGUSR2") >= 2)
        os.kill(node.launcher.pid, REQUESTS[signal.SIGXCPU])
        await eventually(lambda: node.output.count("rank got SIGXCPU") == 2)
        assert "helper got" not in node.output
        assert Path(f"/proc/{found[1]}").exists()
        assert {pid for pid in everyone if not Path(f"/proc/{pid}").exists()} == set()
        (node.run_directory / "stop").touch()
