"""Tests of the process that talks to Ray, without Ray: one that hangs, differs or dies, and what it gets to know."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.ray import connection
from perdure.activities.nodes.ray.connection import RayConnection, RayUnavailable
from perdure.activities.nodes.ray.settings import RaySettings
from tests.support.waiting import DEADLINE, eventually


async def test_the_bridge_gets_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEMPORAL_API_KEY", "secret")
    monkeypatch.setenv("PERDURE_RAY_GATEWAY_KEYRING", "/keys")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/ca")
    answers = (said(id=0, result=""), "read call", said(id=1, result=[]), "read end")
    played = bridge(tmp_path, f"env > {tmp_path}/seen", *answers)
    assert await played.call("names") == []
    seen = (tmp_path / "seen").read_text()
    assert "TEMPORAL_" not in seen
    assert "PERDURE_" not in seen
    assert "AWS_" not in seen
    # Ray's own it needs.
    assert "RAY_TLS_CA_CERT=/ca" in seen
    await played.close()


def test_the_bridge_runs_as_a_user_that_exists_and_that_the_worker_may_become(monkeypatch: pytest.MonkeyPatch):
    def settings(user: str) -> RaySettings:
        variables = {"PERDURE_RAY_ADDRESS": "head:6379", "PERDURE_RAY_USER": user}
        return RaySettings.from_environment(variables, connection={})

    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert settings("").user == ""
    assert settings("nobody").user == "nobody"
    with pytest.raises(ValueError, match="PERDURE_RAY_USER is 'no-one', and this machine has no such user; create it"):
        settings("no-one")
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    with pytest.raises(ValueError, match="only a worker of root starts a process of another user; unset it"):
        settings("nobody")


def bridge(folder: Path, *lines: str, user: str = "") -> RayConnection:
    """A connection to a bridge that is played by lines of a shell's script."""
    python = folder / "python"
    python.write_text("\n".join(("#!/bin/sh", *lines, "")))
    python.chmod(0o755)
    return RayConnection(address="head:6379", namespace="perdure", python=str(python), user=user)


def said(**answer: Any) -> str:
    return f"echo '{json.dumps(answer)}'"


async def test_a_cluster_of_another_version_is_refused_with_both(tmp_path: Path):
    words = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1\nThis: Ray: 2.60.0"
    played = bridge(tmp_path, said(id=0, kind="RuntimeError", error=words).replace("\\n", "\\\\n"), "exit 1")
    with pytest.raises(NodeRefused, match=r"Ray: 2\.9\.0 Python: 3\.9\.1 This: Ray: 2\.60\.0; set PERDURE_RAY_PYTHON"):
        await played.call("names")


async def test_a_connection_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_CONNECTS", 0.3)
    played = bridge(tmp_path, "exec sleep 60")
    with pytest.raises(RayUnavailable, match="head:6379 did not answer"):
        await played.call("names")
    await played.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user")
async def test_a_bridge_of_another_user_reads_nothing_of_the_worker_and_cannot_end_it():
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        folder, tried = Path(home), Path(home) / "tried"
        folder.chmod(0o755)
        tried.mkdir()
        shutil.chown(tried, "nobody")
        (folder / "keys").write_text("of the gateway")
        (folder / "keys").chmod(0o600)
        attempts = {"keys": f"cat {folder}/keys", "variables": "cat /proc/$PPID/environ", "end": "kill -0 $PPID"}
        lines = [f"{attempt} > /dev/null 2>&1; echo $? > {tried}/{name}" for name, attempt in attempts.items()]
        answers = (said(id=0, result=""), "read call", said(id=1, result=[]), "read end")
        played = bridge(folder, f"id -u > {tried}/user", *lines, *answers, user="nobody")
        assert await played.call("names") == []
        assert (tried / "user").read_text().strip() == str(pwd.getpwnam("nobody").pw_uid)
        assert [name for name in attempts if (tried / name).read_text().strip() == "0"] == []
        await played.close()


async def test_a_connection_whose_call_is_cancelled_is_ended(tmp_path: Path):
    played = bridge(tmp_path, f"echo $$ > {tmp_path}/pid", "exec sleep 60")
    call = asyncio.create_task(played.call("names"))
    pid = await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), what="its process")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: not psutil.pid_exists(int(pid)), what="its end")


HANGS = """
import pathlib, sys, time
from unittest.mock import MagicMock
parts = (
    "_private.client_mode_hook cloudpickle core.generated.common_pb2 exceptions experimental util.placement_group "
    "util.scheduling_strategies"
)
sys.modules |= {f"ray.{part}": MagicMock() for part in parts.split()}
def init(**_):
    pathlib.Path(PATH).touch()
    time.sleep(60)
"""
"""A Ray whose cluster never answers."""


async def test_a_bridge_that_connects_ends_with_its_worker(tmp_path: Path):
    connects = tmp_path / "connects"
    (tmp_path / "ray.py").write_text(HANGS.replace("PATH", repr(str(connects))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(connection.__file__).with_name("bridge.py")), "head:6379", "perdure"),
        # A worker that has ended, however it did, has closed it.
        stdin=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    try:
        await eventually(connects.exists, what="its connecting")
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(DEADLINE):
            await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_calls_that_wait_for_one_connection_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_CONNECTS", 0.5)
    played = bridge(tmp_path, f"echo $$ >> {tmp_path}/pids", "exec sleep 60")
    found = await asyncio.gather(*(played.call("names") for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [RayUnavailable] * 5
    assert len((tmp_path / "pids").read_text().split()) == 1
    await played.close()


async def test_a_connection_closes_though_code_in_its_process_keeps_the_pipes_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "_CLOSES", 0.5)
    kept = f"setsid sh -c 'echo $$ > {tmp_path}/kept; exec sleep 60' &"
    played = bridge(tmp_path, kept, said(id=0, result=""), "read call", said(id=1, result=[]), "read end")
    assert await played.call("names") == []
    pid = await eventually(lambda: (tmp_path / "kept").exists() and (tmp_path / "kept").read_text(), what="it")
    try:
        await played.close()
        os.kill(int(pid), 0)  # What holds the pipes open is still there.
    finally:
        os.kill(int(pid), 9)


async def test_what_code_in_the_process_has_started_ends_with_it(tmp_path: Path):
    lines = (f"sleep 60 & echo $! > {tmp_path}/started", said(id=0, result=""), "read call", said(id=1, result=[]))
    played = bridge(tmp_path, *lines, "read end")
    assert await played.call("names") == []
    pid = int((tmp_path / "started").read_text())
    await played.close()
    await eventually(lambda: not _runs(pid), what="its end")


def _runs(pid: int) -> bool:
    """Whether a process has not ended; who has taken it over may not have asked for its exit code."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_call_that_hangs_is_ended_and_the_next_one_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "_CALL", 0.3)
    played = bridge(tmp_path, f"echo $$ >> {tmp_path}/pids", said(id=0, result="2.60.0"), "exec sleep 60")
    for _ in range(2):
        with pytest.raises(RayUnavailable, match="did not answer"):
            await played.call("names")
    assert len((tmp_path / "pids").read_text().split()) == 2
    await played.close()


@pytest.mark.parametrize("written", ["no JSON", "[1]", '{"result": 1}', "3"])
async def test_a_bridge_that_writes_no_answer_is_ended_and_the_next_call_connects_again(tmp_path: Path, written: str):
    lines = (f"echo $$ >> {tmp_path}/pids", said(id=0, result="2.60.0"), "read call", f"echo '{written}'")
    played = bridge(tmp_path, *lines, "echo forged >&2", "exec sleep 60")
    for _ in range(2):
        with pytest.raises(RayUnavailable, match="the connection has ended"):
            await played.call("names")
    assert len((tmp_path / "pids").read_text().split()) == 2
    await played.close()


async def test_an_interpreter_without_ray_or_that_does_not_exist_is_refused_with_the_variable(tmp_path: Path):
    played = bridge(tmp_path, "echo \"ModuleNotFoundError: No module named 'ray'\" >&2", "exit 1")
    with pytest.raises(NodeRefused, match=r"python has no Ray; install Ray .* or set PERDURE_RAY_PYTHON"):
        await played.call("names")
    missing = RayConnection(address="head:6379", namespace="perdure", python=str(tmp_path / "missing"))
    with pytest.raises(NodeRefused, match=r"No such file or directory: .*missing'; set PERDURE_RAY_PYTHON"):
        await missing.call("names")


async def test_a_bridge_that_dies_says_its_last_words(tmp_path: Path):
    played = bridge(tmp_path, said(id=0, result="2.60.0"), "read call", "echo lost the cluster >&2")
    with pytest.raises(RayUnavailable, match="the connection has ended: lost the cluster"):
        await played.call("names")


@pytest.mark.parametrize(
    ("kind", "error", "remedy"),
    [
        ("ForeignActor", NodeRefused, "give the job another name"),
        ("WrongEnvironment", NodeRefused, "Ray takes no such ray.runtime_env: no room"),
        ("NotYet", NodeNotYet, "no room"),
    ],
)
async def test_a_refusal_of_the_bridge_is_one_of_the_backend(
    tmp_path: Path, kind: str, error: type[Exception], remedy: str
):
    played = bridge(tmp_path, said(id=0, result=""), "read call", said(id=1, kind=kind, error="no room"), "read end")
    with pytest.raises(error, match=remedy):
        await played.call("create")
    await played.close()
