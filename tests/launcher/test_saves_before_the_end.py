"""Tests of the grace period: a rank alone gets the signal, and its children serve it until it has saved."""

from __future__ import annotations

import shlex
import sys
import time

import pytest

from perdure_launcher.warm_start.names import PID
from perdure_launcher.warm_start.starts import read_starts
from tests.launcher.nodes import READY, TORCHRUN, Node, all_ready, all_step, form_world, running
from tests.launcher.test_env_mode import ENV_READY
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300)]

LONG = pytest.mark.long("launchers")

SCRIPT = "saves_with_children.py"
SHELL = ["bash", "-c", f"{shlex.quote(sys.executable)} -u {SCRIPT}; exit $?"]
"""A rank whose script is a shell's: the shell ends by the signal without passing it on."""
WRAPPER = [sys.executable, "wraps.py", SCRIPT]
"""The same with a program that does not handle the signal."""
WITHIN = ["bash", "-c", f"timeout 1000 {shlex.join([*TORCHRUN, SCRIPT])} 2>&1 | tee /dev/null; exit 0"]
"""torchrun where many scripts have it: `timeout` passes a signal on to it, and signals its own group, too."""
ENV = [sys.executable, "-u", SCRIPT]


@pytest.mark.parametrize(
    ("command", "ready", "warm"),
    [
        pytest.param([*TORCHRUN, SCRIPT], READY, True, id="torchrun-warm", marks=LONG),
        pytest.param([*TORCHRUN, SCRIPT], READY, False, id="torchrun-cold", marks=LONG),
        pytest.param([*TORCHRUN, "--no-python", *SHELL], READY, False, id="torchrun-shell", marks=LONG),
        pytest.param([*TORCHRUN, "wraps.py", SCRIPT], READY, False, id="torchrun-wrapper-cold", marks=LONG),
        pytest.param(WITHIN, READY, False, id="torchrun-within-a-script", marks=LONG),
        pytest.param(ENV, ENV_READY, True, id="env-warm", marks=LONG),
        pytest.param(ENV, ENV_READY, False, id="env-cold", marks=LONG),
        pytest.param([*ENV, "--without-torch"], ENV_READY, False, id="env-without-torch"),
        pytest.param(SHELL, ENV_READY, False, id="env-shell", marks=LONG),
        pytest.param(WRAPPER, ENV_READY, False, id="env-wrapper", marks=LONG),
    ],
)
async def test_children_of_ranks_serve_them_until_they_have_saved_and_end_with_them(
    command: list[str], ready: str, *, warm: bool
) -> None:
    node = Node(command, processes=2, warm_starts=warm, stop_grace_s=0.3, termination_grace_s=100)
    async with running(node):
        asked = await all_ready(node, path=ready)
        if warm:
            await eventually((node.run_directory / "warm" / PID).exists, what="the warm interpreter serves")
        await form_world([node], 1, port=asked[0].body["store_ports"][0], processes=2)
        await all_step([node], 1, processes=2)
        starts = read_starts(node.run_directory / "warm", generation=1, processes=2)
        assert [start.warm for start in starts] == ([True, True] if warm else [])
        asked_at = time.monotonic()
        await node.agent.want(exit=True, reason="the job was cancelled")
        assert await node.left() == 0
        assert time.monotonic() - asked_at < 100, "children were waited for until the grace was over"
        for rank in (0, 1):
            assert (node.run_directory / f"saved-{rank}").read_text() == "42 still there after 1 signal"
        assert node.processes() == []
