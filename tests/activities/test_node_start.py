"""Tests of what a node on a machine of a scheduler waits for before its launcher and its agent start, and of what it
leaves there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.activities.nodes.ray.task import NodeTask
from perdure.client.workdir import pack_workdir
from perdure.spec.data import Workdir, WorkdirArchive
from tests.activities.local_nodes import NOWHERE, run_at_once
from tests.activities.test_ray_backend import request
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually

LOADED = "import json, sys, perdure.activities.nodes.ray.node; print(json.dumps(sorted(sys.modules)))"


def test_a_node_of_ray_starts_without_the_clients_of_temporal_and_http():
    printed = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    slow = {"temporalio.client", "aiohttp", "cryptography", "torch"}
    assert not slow & set(json.loads(printed))


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_node_of_ray_leaves_no_code_on_its_machine(tmp_path: Path, damaged: bool):
    code, parts, seen, state = (tmp_path / name for name in ("code", "parts", "seen", "state"))
    for folder in (code, parts):
        folder.mkdir()
    (code / "train.py").write_text("pass")
    packed = pack_workdir(code)
    (parts / "0000").write_bytes(packed.content[:10] if damaged else packed.content)
    node = request(worker=run_at_once("sh", "-c", f"ls > {seen}"))
    archive = WorkdirArchive(name=f"perdure-workdir-{0:016x}", parts=1, digest=packed.digest)
    spec = node.spec.model_copy(update={"workdir": Workdir(path="/", archive=archive)})
    task = NodeTask(request=node.model_copy(update={"spec": spec}), environment=NOWHERE)
    written = task.model_dump(mode="json", exclude_defaults=True)
    written["machine"] = {"address": "127.0.0.1", "parts": str(parts)}
    reading, writing = os.pipe()
    command = [sys.executable, "-P", "-m", "perdure.activities.nodes.ray.node", str(writing)]
    variables = os.environ | {"PERDURE_STATE": str(state), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(writing,), env=variables) as process:
        os.close(writing)
        assert process.stdin is not None
        process.stdin.write(json.dumps(written).encode() + b"\n")
        process.stdin.flush()
        if not damaged:
            await eventually(lambda: seen.exists() and seen.read_text(), what="the command's end")
        # Whatever ends an actor closes it.
        process.stdin.close()
        with os.fdopen(reading) as ending:
            said = json.loads(ending.read())
    (folder,) = (state / "nodes").iterdir()
    assert ("damaged" in said["reason"] or "unpacked" in said["reason"]) is damaged
    assert damaged or seen.read_text() == "train.py\n"
    assert not parts.exists()
    assert not (folder / "workdir").exists()
