"""Tests of recognizing commands that are Python programs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from perdure_launcher.supervisor.python_commands import python_command

PATH = os.path.dirname(sys.executable)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py"],
        ["python", "-u", "train.py", "-c", "config.yaml"],
        ["python3", "-m", "package.train", "--steps", "5"],
        [sys.executable, "-B", "-c", "print(1)"],
    ],
    ids=" ".join,
)
def test_a_python_program_is_read(command: list[str]) -> None:
    found = python_command(command, path=PATH, workdir=Path("/"))
    assert found is not None
    assert found.arguments == tuple(command[1:])
    assert found.python == os.path.join(PATH, os.path.basename(command[0]))


@pytest.mark.parametrize(
    "command",
    [
        ["python"],
        ["python", "-m"],
        ["python", "-I", "train.py"],
        ["python", "-E", "train.py"],
        ["python", "-S", "train.py"],
        ["python", "-W", "error", "train.py"],
        ["python", "-"],
        ["python-no-such", "train.py"],
        ["uv", "run", "train.py"],
        ["./train.py"],
    ],
    ids=" ".join,
)
def test_what_would_start_otherwise_is_not(command: list[str]) -> None:
    assert python_command(command, path=PATH, workdir=Path("/")) is None


def test_a_wrapper_in_pythons_place_is_not(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec env -u PYTHONPATH {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    assert python_command(["python", "train.py"], path=str(tmp_path), workdir=Path("/")) is None


def test_a_relative_interpreter_is_looked_for_where_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    found = python_command(["bin/python", "train.py"], path=PATH, workdir=tmp_path)
    assert found is not None
    assert found.python == str(tmp_path / "bin" / "python")
    assert python_command(["bin/python", "train.py"], path=PATH, workdir=Path("/")) is None
