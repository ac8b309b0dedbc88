"""Tests of what reaches a job's nodes on this machine without their agents."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.activities.nodes.local.folders import FolderOwner, NodeFolder
from perdure.activities.nodes.local.spawn import boot_id, started_ticks
from perdure.cli.start import passing_on
from perdure.client.local_nodes import pass_on
from perdure_launcher.system.user_signals import REQUESTS
from tests.activities.local_nodes import LocalJob

LAUNCHER = """
import signal
asked = {int(signal.SIGRTMIN) + 6 + index for index in range(5)}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
print("up", flush=True)
while True: print(int(signal.sigwait(asked)), flush=True)
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-S", "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


async def test_signals_to_the_command_that_follows_a_job_reach_its_nodes_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: subprocess.Popen[str]
) -> None:
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path))
    job = LocalJob(tmp_path)
    folder = NodeFolder(tmp_path / "nodes" / job.name())
    folder.make()
    folder.write("node.json", FolderOwner.of(job.request()).model_dump_json())
    identity = f'{{"pid": {launcher.pid}, "started": {started_ticks(launcher.pid)}, "boot": "{boot_id()}"}}'
    folder.write("launcher.pid", identity)
    assert launcher.stdout is not None
    pass_on(signal.SIGUSR2, namespace=job.spec.namespace, name="another")
    with passing_on(job.spec.namespace, job.spec.name):
        os.kill(os.getpid(), signal.SIGUSR1)
        line = await asyncio.to_thread(launcher.stdout.readline)
    assert line == f"{int(REQUESTS[signal.SIGUSR1])}\n", "and nothing of the other job before"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
