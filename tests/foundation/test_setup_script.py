"""Tests of the setup script, the first program that users run, on a small checkout with the real `uv`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "perdure"
version = "0"

[tool.hatch.build.targets.wheel]
packages = ["perdure"]
"""


def lock_entry(package: str) -> str:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = re.search(rf"^{package}==.*?(?=^\S|\Z)", lock, flags=re.MULTILINE | re.DOTALL)
    assert found
    return found[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tmp_path = tmp_path / "a folder"
    (tmp_path / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (tmp_path / "requirements.lock").write_text(lock_entry("iniconfig"), encoding="utf-8")
    local = tmp_path / "perdure" / "local"
    local.mkdir(parents=True)
    (local.parent / "__init__.py").touch()
    (local / "__init__.py").touch()
    (local / "temporal_binary.py").write_text("print('there')\n", encoding="utf-8")
    return tmp_path


def run_setup(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(checkout / "scripts" / "setup.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VIRTUAL_ENV": "", **variables},
    )


def test_sets_up_once_says_so_notices_changes_and_needs_no_network_once_the_caches_have_all(checkout: Path):
    first = run_setup(checkout)
    assert first.returncode == 0, first.stderr
    assert "creating .venv" in first.stdout
    assert "installing 1 locked packages" in first.stdout
    assert re.search(r"done in \d+\.\d s", first.stdout)
    assert "Temporal is there" in first.stdout

    second = run_setup(checkout)
    assert second.returncode == 0, second.stderr
    assert "installing" not in second.stdout
    assert "nothing to do" in second.stdout

    (checkout / "requirements.lock").write_text(lock_entry("packaging"), encoding="utf-8")
    third = run_setup(checkout)
    assert third.returncode == 0, third.stderr
    assert "creating .venv" not in third.stdout
    assert "installing 1 locked packages" in third.stdout
    installed = {path.name.split("-")[0] for path in (checkout / ".venv").rglob("*.dist-info")}
    assert installed == {"packaging", "perdure"}

    shutil.rmtree(checkout / ".venv")
    nowhere = "http://127.0.0.1:9"
    again = run_setup(checkout, HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere, ALL_PROXY=nowhere)
    assert again.returncode == 0, again.stderr
    assert (checkout / ".venv" / "bin" / "python").exists()


def test_a_failed_step_names_the_command_and_the_remedy(checkout: Path):
    (checkout / "requirements.lock").write_text("iniconfig==2.0.0 --hash=sha256:" + "0" * 64 + "\n", encoding="utf-8")
    failed = run_setup(checkout)
    assert failed.returncode == 1
    assert "pip sync" in failed.stderr
    assert "Check the network" in failed.stderr
    again = run_setup(checkout)
    assert again.returncode == 1, "a failed set-up must not count as done"


def test_unknown_arguments_are_a_usage_error(checkout: Path):
    wrong = run_setup(checkout, "everything")
    assert wrong.returncode == 2
    assert "requirements.lock" in wrong.stderr


def test_a_long_step_reports_that_it_continues(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    lines: list[str] = []
    told_twice = threading.Event()

    def say(line: str, **_: object) -> None:
        lines.append(line)
        if len(lines) == 3:
            told_twice.set()

    monkeypatch.setattr(setup, "print", say, raising=False)
    monkeypatch.setattr(setup, "PROGRESS_INTERVAL", 0.01)
    with setup.step("working"):
        assert told_twice.wait(30)
    assert lines[0] == "setup: working ..."
    assert lines[1:3] == ["setup:   0:00 min, still running"] * 2
    assert re.fullmatch(r"setup: done in \d+\.\d s", lines[-1])
