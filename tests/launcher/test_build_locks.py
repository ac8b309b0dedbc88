"""Tests of locks that ranks leave behind which were killed during a build, with torch's own class of such locks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure_launcher.rank_plugins import build_locks
from tests.launcher.test_rank_children import Node
from tests.support.waiting import DEADLINE, eventually

BEGIN = """
import os, sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(os.environ["LOCK"])
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "build").mkdir()
    return tmp_path / "build" / "lock"


def start(node: Node, lock: Path, *lines: str) -> subprocess.Popen[str]:
    """Starts a rank that imports torch, and these lines."""
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(["import torch", BEGIN, *lines])],
        env=node.environment(LOCK=str(lock), PYTHONPATH=node.environment()["PYTHONPATH"].split(os.pathsep)[0]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def build(node: Node, lock: Path) -> subprocess.Popen[str]:
    """A rank in the middle of a build."""
    builder = start(node, lock, "assert baton.try_acquire()", "print('builds', flush=True)", "sys.stdin.read()")
    assert builder.stdout is not None
    assert builder.stdout.readline() == "builds\n"
    return builder


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "node").mkdir()
    return Node(tmp_path / "node")


def test_the_next_rank_builds_what_a_killed_one_has_begun(node: Node, lock: Path) -> None:
    end(build(node, lock))
    assert lock.exists()
    output, errors = start(node, lock, "print(baton.try_acquire()); baton.release()").communicate(timeout=DEADLINE)
    assert output == "True\n"
    assert f"removed {lock}" in errors
    assert not lock.exists()


async def test_ranks_that_wait_for_a_build_wait_no_longer_than_its_process_lives(node: Node, lock: Path) -> None:
    builder = build(node, lock)
    waiting = start(node, lock, "assert not baton.try_acquire(); print('waits', flush=True); baton.wait()")
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "waits\n"
    assert waiting.poll() is None
    end(builder)
    await eventually(lambda: waiting.poll() is not None, what="the rank waits no longer")
    assert not lock.exists()
    waiting.communicate()


def test_a_build_that_goes_on_keeps_its_lock(node: Node, lock: Path) -> None:
    builder = build(node, lock)
    output, _ = start(node, lock, "print(baton.try_acquire())").communicate(timeout=DEADLINE)
    assert output == "False\n"
    assert lock.exists()
    end(builder)


def test_a_lock_of_an_unknown_owner_stays_and_is_described(node: Node, lock: Path) -> None:
    end(build(node, lock))
    lock.unlink()
    lock.touch()
    assert not build_locks.remove_left(str(lock))
    assert lock.exists()
    assert f"waits for {lock}" in build_locks.describe(str(lock))
    assert "remove the file" in build_locks.describe(str(lock))


@pytest.mark.parametrize("kept", ["host", "namespace"])
def test_a_process_of_another_machine_or_container_may_still_build(node: Node, lock: Path, kept: str) -> None:
    end(build(node, lock))
    record = build_locks._record(str(lock))
    record.write_text(json.dumps(json.loads(record.read_text()) | {kept: "another"}))
    assert not build_locks.remove_left(str(lock))
    assert lock.exists()
