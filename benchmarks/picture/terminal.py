"""Records a terminal: `perdure run` with two nodes, one of whose ranks is killed, and the explanation of it."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import psutil
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from benchmarks.recovery.perdure_job import node_processes
from perdure.base.errors import PerdureError
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.client.views import overall_progress
from perdure.contract.names import uid_of
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import end_nodes
from tests.support.terminal import Terminal, in_terminal
from tests.support.waiting import eventually

COLUMNS, ROWS = 108, 40
NAME = "llama"
COMMAND = ("run", "--name", NAME, "--nodes", "2", "--", "torchrun", "train.py")
STEPS_BEFORE, STEPS_AFTER = 300, 420

SCRIPT = """
import os, time
from pathlib import Path
import torch.distributed as dist
from perdure_training import report
dist.init_process_group("gloo")
saved = Path("saved")
for step in range(int(saved.read_text()) + 1 if saved.exists() else 1, 2_001):
    time.sleep(0.04)
    loss = 1.8 + 9 / (step + 3) ** 0.5
    report(step=step, loss=loss, total=2_000)
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step}  loss {loss:.3f}", flush=True)
        Path("new").write_text(str(step))
        Path("new").replace(saved)
"""

_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's own picture, without fonts that it would load from elsewhere."""


async def record_terminal(path: Path) -> None:
    """Runs the job in a terminal, and writes what that shows."""
    with tempfile.TemporaryDirectory(prefix="pp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        plane = LocalControlPlane(StateFolder(folder / "state"))
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        try:
            await plane.ensure()
            words = await _session(plane, folder)
        finally:
            plane.kill_worker()
            plane.kill_server()
            end_nodes(plane.state.path)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ perdure {' '.join(COMMAND)}", style="bold"))
    console.print(Text.from_ansi(words))
    console.save_svg(str(path), title="kill -9 of a rank", code_format=_FORMAT)


async def _session(plane: LocalControlPlane, folder: Path) -> str:
    environment = {
        "PERDURE_STATE": str(plane.state.path),
        "TEMPORAL_ADDRESS": "",
        "PYTHONPATH": os.getcwd(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-P", "-m", "perdure.cli.main", *COMMAND]
    endpoint = await plane.ensure()
    os.chdir(folder)
    async with Client(endpoint=endpoint) as client:
        async with in_terminal(command, columns=COLUMNS, rows=ROWS, environment=environment) as terminal:
            await _steps(client, terminal, STEPS_BEFORE)
            await _kill_rank(client)
            await eventually(lambda: terminal.shows("LAST"), within=60, what=lambda: terminal.screen.text)
            await _steps(client, terminal, STEPS_AFTER)
            terminal.press("e")
            await eventually(lambda: terminal.shows("MEANS"), within=20, what=lambda: terminal.screen.text)
            shown = _live_part(terminal)
            terminal.press("q")
            await eventually(lambda: terminal.shows("Detached"), within=20, what=lambda: terminal.screen.text)
        await client.cancel(NAME)
        await client.wait(NAME)
    return shown


def _live_part(terminal: Terminal) -> str:
    """The live view: what the last redraw has written."""
    lines = terminal.screen.lines
    begin = next(number for number, line in enumerate(lines) if "RUNNING" in line)
    return "\n".join(lines[begin:])


async def _steps(client: Client, terminal: Terminal, steps: int) -> None:
    """Waits until both ranks have made a step, and no incident is open."""

    async def made() -> bool:
        try:
            status, nodes = await client.look(NAME)
            is_open = any(incident.over_at is None for incident in await client.incidents(NAME))
        except PerdureError:
            return False  # It has not started yet.
        progress = overall_progress(nodes, status)
        return not is_open and progress is not None and progress.step >= steps

    await eventually(made, within=120, what=lambda: terminal.screen.text)


async def _kill_rank(client: Client) -> None:
    """Kills the rank of the second node: the process that runs the script and has no children."""
    uid = uid_of((await client.describe(NAME)).run_id)
    ranks = [one for one in node_processes(f"{uid}/worker-1/") if _is_rank(one)]
    ranks[-1].send_signal(signal.SIGKILL)


def _is_rank(process: psutil.Process) -> bool:
    words = process.cmdline()
    return any(word.endswith("train.py") for word in words) and "torchrun" not in " ".join(words)
