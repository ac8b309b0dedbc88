"""The benchmark of checkpoints: it measures every way, and tells why DLRover's is not where it does not run."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.checkpoint import flash
from benchmarks.checkpoint.__main__ import MEMORY, report, save, values
from benchmarks.checkpoint.flash_rank import await_step
from benchmarks.recovery.dlrover_environment import NotAvailable
from benchmarks.recovery.processes import pid_namespaces_work


def test_a_run_of_dlrover_that_fails_is_reported_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not asyncio.run(pid_namespaces_work()):
        pytest.skip("no PID namespaces here")
    if tmp_path.is_relative_to("/dev/shm"):
        pytest.skip("the launcher gets a /dev/shm of its own, without this folder")
    (tmp_path / "python").symlink_to(sys.executable)
    launcher = tmp_path / "dlrover-run"
    launcher.write_text('#!/bin/sh\necho "arguments: $*"\necho "TypeError: numa_options" >&2\nexit 3\n')
    launcher.chmod(0o755)

    async def programs() -> Path:
        return tmp_path

    monkeypatch.setattr(flash, "_programs", programs)
    lines: list[str] = []
    with pytest.raises(NotAvailable, match=r"(?s)ended with 3; .*TypeError: numa_options"):
        lines.extend(flash.save(["folder", "--saves", "1"]))
    assert lines[0].endswith("flash_rank.py folder --saves 1\n")


def test_a_stored_step_is_awaited_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tracker = tmp_path / "dlrover_latest.txt"
    tracker.write_text("12")
    await_step(tracker, 12)
    monkeypatch.setattr("benchmarks.checkpoint.flash_rank.DURABLE_WITHIN", 0.01)
    with pytest.raises(TimeoutError, match="has not stored step 13"):
        await_step(tracker, 13)


@pytest.mark.long("storage")
def test_two_ranks_save_in_every_way_and_the_figures_are_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        arguments = [str(tmp_path), "--gigabytes", "0.01", "--saves", "1", "--steps", "1"]
        found: dict[str, Any] = dict(values(save(arguments, memory=memory)))
    found["restore"] = {"process": 0.2, "node": 0.3, "disk": 0.8, "cached": 0.4}
    report(found, Console())
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["memory_restore_vs_disk"] == 0.25
    assert figures["overhead_auto_pct"] == round(found["overhead auto"], 2)
    assert min(figures[name] for name in ("stall_vs_memcpy", "stall_vs_torch_save", "durable_s")) > 0
