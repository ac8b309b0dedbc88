"""Tests of the command `perdure` where another module has that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_START = "from perdure_launcher.entry_points import perdure; perdure()"


def started(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-c", _START, "--version"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


@pytest.mark.parametrize(("file", "named"), [("perdure.py", "perdure.py"), ("perdure/__init__.py", "perdure")])
def test_a_module_that_hides_the_package_is_named_and_not_run(tmp_path: Path, file: str, named: str):
    hiding = tmp_path / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise SystemExit('it was run')")
    ended = started(tmp_path)
    assert ended.returncode == 2
    assert f"{tmp_path / named} hides Perdure's own package" in ended.stderr
    assert f"take {tmp_path} out of PYTHONPATH" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_folder_without_python_hides_nothing(tmp_path: Path):
    (tmp_path / "perdure").mkdir()
    ended = started(tmp_path)
    assert (ended.returncode, ended.stdout.split()[:1]) == (0, ["perdure"]), ended.stderr
