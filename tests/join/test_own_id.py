"""Tests of machines on which `perdure join` runs twice for one job, as where a launcher starts it for each slot."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.activities.nodes.joined.machine import Machine, this_machine
from perdure.base.state_folder import STATE_VARIABLE
from perdure.cli.join import _own_id
from perdure.join.machine import JoinOptions, MachineInJob
from perdure.join.own_id import IdInUse, held

JOB = "default/llama"
HOLD = f"""
import sys
from pathlib import Path
from perdure.join.own_id import held
with held("gpu3", job={JOB!r}, folder=Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_for_as_long_as_the_first_one_lives(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout
        assert first.stdout.readline()
        with (
            pytest.raises(IdInUse, match=f"process {first.pid} of this machine is in the job {JOB} as gpu3") as refused,
            held("gpu3", job=JOB, folder=tmp_path),
        ):
            pass
        assert "--node-id" in refused.value.remedy
        with held("gpu3", job="default/other", folder=tmp_path), held("gpu3-1", job=JOB, folder=tmp_path):
            pass
        first.kill()
        first.wait()
        with held("gpu3", job=JOB, folder=tmp_path):
            pass


async def test_a_process_that_leaves_does_not_keep_its_successor_out(tmp_path: Path):
    with held("gpu3", job=JOB, folder=tmp_path) as leave:
        own = Machine(node_id="gpu3", host="gpu3", address="127.0.0.1")
        options = JoinOptions(job="llama")
        joining = MachineInJob(cast("Any", None), own, options, say=lambda line: None, on_leaving=leave)
        joining._stop(signal.SIGTERM, asyncio.get_running_loop().create_future())
        with held("gpu3", job=JOB, folder=tmp_path):
            pass


def test_an_id_that_the_user_chooses_is_theirs_to_use_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    options = JoinOptions(job="llama")
    derived, chosen = (this_machine("127.0.0.1:1", node_id=node_id, environment={}) for node_id in ("", "a"))
    with _own_id(derived, options), pytest.raises(IdInUse), _own_id(derived, options):
        pass
    with _own_id(chosen, options), _own_id(chosen, options):
        pass


def test_a_folder_that_cannot_be_made_refuses_nothing(tmp_path: Path):
    (tmp_path / "file").touch()
    for _ in range(2):
        with held("gpu3", job=JOB, folder=tmp_path / "file" / "folder"):
            pass
