"""Tests that Perdure's packages never meet a user's own of the same names, neither in a checkout nor as a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.allocation import REPOSITORY
from tests.support.wheels import built_wheel

TAKEN = ("workflows", "activities", "agent", "spec", "tests", "contract", "base")
"""Names of folders that a user's repository may have."""

CLIENT_AND_SERVERS = """
import perdure; perdure.Client, perdure.load_spec
import perdure.worker, perdure.gateway.serve, perdure.operator.serve, perdure.join.machine
"""


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A user's repository whose packages end whatever imports them."""
    for name in TAKEN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported the package of a user')\n")
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "perdure.cli.main", "--version"],
        ["-m", "perdure.cli.main", "list", "--address", "127.0.0.1:1"],
        ["-m", "perdure.agent"],
        ["-c", CLIENT_AND_SERVERS],
    ],
    ids=["version", "list", "agent", "client and servers"],
)
def test_a_users_packages_of_the_same_names_are_never_imported(users_folder: Path, program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program],
        cwd=users_folder,
        env={**os.environ, "PYTHONPATH": str(users_folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "imported the package of a user" not in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


def test_a_wheel_has_three_typed_packages(tmp_path: Path) -> None:
    wheel = built_wheel(REPOSITORY, tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"perdure", "perdure_launcher", "perdure_training"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    for part, module in (("workflows", "training_job"), ("activities", "signals"), ("agent", "process")):
        assert f"perdure/{part}/{module}.py" in names
