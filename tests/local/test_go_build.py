"""Tests of progress messages while building with Go. The toolchain is a fake that waits until its message was read."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.local.go_build import GoFailed, run_go


def toolchain(folder: Path, text: str) -> str:
    go = folder / "go"
    go.write_text(f"#!/bin/sh\n{text}\n")
    go.chmod(0o755)
    return str(go)


def test_a_build_says_how_long_it_runs_and_what_it_has_compiled(tmp_path: Path):
    os.mkfifo(tmp_path / "heard")
    go = toolchain(tmp_path, "echo first >&2; echo net/http >&2; read line < heard; echo answer")
    told: list[str] = []
    heard: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if "2 packages" in line and not heard:
            heard.append(line)
            (tmp_path / "heard").write_text("go on\n")

    answer = run_go(go, "build", "./cmd", folder=tmp_path, report=hear, interval=timedelta(milliseconds=50))
    assert answer == "answer\n"
    assert told[-1] == "  0:00 min: 2 packages compiled, the last net/http"


def test_a_download_names_the_module(tmp_path: Path):
    os.mkfifo(tmp_path / "heard")
    go = toolchain(tmp_path, "echo go: downloading example.org/a v1.2.3 >&2; read line < heard")
    told: list[str] = []
    heard: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if "example.org" in line and not heard:
            heard.append(line)
            (tmp_path / "heard").write_text("go on\n")

    run_go(go, "get", "example.org/a", folder=tmp_path, report=hear, interval=timedelta(milliseconds=50))
    assert told[-1] == "  0:00 min: 1 modules fetched, the last example.org/a v1.2.3"


def test_a_quick_command_says_nothing(tmp_path: Path):
    told: list[str] = []
    assert run_go(toolchain(tmp_path, "echo {}"), "mod", "edit", folder=tmp_path, report=told.append) == "{}\n"
    assert told == []


def test_a_failure_has_the_last_lines(tmp_path: Path):
    go = toolchain(tmp_path, "echo early >&2; echo a >&2; echo b >&2; echo undefined: x >&2; exit 1")
    with pytest.raises(GoFailed, match=r"^`go build` failed: a b undefined: x$"):
        run_go(go, "build", folder=tmp_path, report=lambda _: None)
