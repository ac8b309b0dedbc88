"""Tests of progress messages while building with Go. The toolchain is a fake that waits until its message was read."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from perdure.local.go_build import GoFailed, run_go
from tests.support.waiting import eventually


def toolchain(folder: Path, text: str) -> str:
    go = folder / "go"
    go.write_text(f"#!/bin/sh\n{text}\n")
    go.chmod(0o755)
    return str(go)


async def test_a_build_says_how_long_it_runs_and_what_it_has_compiled(tmp_path: Path):
    os.mkfifo(tmp_path / "heard")
    go = toolchain(tmp_path, "echo first >&2; echo net/http >&2; read line < heard; echo answer")
    told: list[str] = []
    heard: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if "2 packages" in line and not heard:
            heard.append(line)
            (tmp_path / "heard").write_text("go on\n")

    answer = await run_go(go, "build", "./cmd", folder=tmp_path, report=hear, interval=timedelta(milliseconds=50))
    assert answer == "answer\n"
    assert told[-1] == "  0:00 min: 2 packages compiled, the last net/http"


async def test_a_download_names_the_module(tmp_path: Path):
    os.mkfifo(tmp_path / "heard")
    go = toolchain(tmp_path, "echo go: downloading example.org/a v1.2.3 >&2; read line < heard")
    told: list[str] = []
    heard: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if "example.org" in line and not heard:
            heard.append(line)
            (tmp_path / "heard").write_text("go on\n")

    await run_go(go, "get", "example.org/a", folder=tmp_path, report=hear, interval=timedelta(milliseconds=50))
    assert told[-1] == "  0:00 min: 1 modules fetched, the last example.org/a v1.2.3"


async def test_a_quick_command_says_nothing(tmp_path: Path):
    told: list[str] = []
    assert await run_go(toolchain(tmp_path, "echo {}"), "mod", "edit", folder=tmp_path, report=told.append) == "{}\n"
    assert told == []


async def test_a_failure_has_the_last_lines(tmp_path: Path):
    go = toolchain(tmp_path, "echo early >&2; echo a >&2; echo b >&2; echo undefined: x >&2; exit 1")
    with pytest.raises(GoFailed, match=r"^`go build` failed: a b undefined: x$"):
        await run_go(go, "build", folder=tmp_path, report=lambda _: None)


async def test_a_cancelled_build_ends_with_all_its_compilers(tmp_path: Path):
    os.mkfifo(tmp_path / "never")
    go = toolchain(tmp_path, f"sh -c 'echo $$ > {tmp_path}/pid; read line < {tmp_path}/never' & wait")
    building = asyncio.create_task(run_go(go, "build", folder=tmp_path, report=lambda _: None))
    compiler = await eventually(lambda: pid_in(tmp_path / "pid"))
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    await eventually(lambda: has_ended(compiler), what="the compiler has ended")


def has_ended(pid: int) -> bool:
    try:
        # Nothing may read the exit code of a process whose parent is gone.
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pid_in(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text else None
