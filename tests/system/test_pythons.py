"""Tests of the wheel, without the checkout, under the Pythons of newer releases of Debian."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.pythons import PYTHONS, debian_root, run_in
from scripts.setup import CACHE, LOCK, ROOT, find_uv
from tests.support.wheels import built_wheel

pytestmark = [
    pytest.mark.long("pythons"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root unpacks Debian's releases"),
]

COPIED = (
    *("pyproject.toml", "README.md", "docs", "examples", "deploy", "scripts"),
    *("tests/conftest.py", "tests/support", "tests/policy", "tests/importers", "tests/workflows"),
)
"""What the tests of values read beside themselves."""

RUNS_A_JOB = """
import subprocess, sys
from pathlib import Path

perdure = Path(sys.executable).with_name("perdure")
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "killed_once.py"]
subprocess.run([perdure, "run", "--nodes", "2", "--name", "killed", "--", *torchrun], check=True)
for command in ("status", "explain"):
    with Path(command).open("w") as answer:
        subprocess.run([perdure, command, "killed", "-o", "json"], check=True, stdout=answer)
"""
"""Runs a job and writes what commands answer about it into files of their names."""

TEST_PACKAGES = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment of a release of Debian."""

    root: Path
    environment: Path
    work: Path
    """A folder that is empty before each run, as its path in the root."""

    def run(self, *command: str, timeout: float = 1500.0, **variables: str) -> str:
        """Runs a program of the environment."""
        program = str(self.environment / "bin" / command[0])
        state = {"PERDURE_STATE": f"{self.work}/state", "PYTHONDEVMODE": "", **variables}
        enter = ["/usr/bin/env", "-C", str(self.work), program, *command[1:]]
        return run_in(self.root, enter, timeout=timeout, variables=state)

    def inside(self, path: Path) -> Path:
        """Returns a path of the root as this machine has it."""
        return self.root / path.relative_to("/")


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel of this checkout, and what its tests need, in each release; the versions are those of the lock."""
    suite = str(request.param)
    root = debian_root(suite, print)
    work = Path("/root/perdure")
    found = Installed(root, CACHE / "debian" / f"{suite}-environment", work)
    shutil.rmtree(found.inside(work), ignore_errors=True)
    found.inside(work).mkdir(parents=True)
    uv = find_uv()
    wheel = built_wheel(ROOT, tmp_path_factory.mktemp("wheel"))
    for file in (wheel, LOCK):
        shutil.copy(file, found.inside(work))
    # uv's cache is on the same mount as the environment, so that it has no copies of its files.
    uv_cache = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    variables = {"UV_CACHE_DIR": uv_cache if Path(uv_cache).is_relative_to(CACHE.parent) else str(CACHE / "uv-cache")}
    python = found.environment / "bin" / "python"
    words = ["pip", "install", "--quiet", "--python", str(python), "--constraint", f"{work}/{LOCK.name}"]
    private_uv = CACHE / "debian" / "uv"
    shutil.copy(Path(uv).resolve(), private_uv)
    run_in(
        root,
        [str(private_uv), "venv", "--quiet", "--clear", "--python", "/usr/bin/python3", str(found.environment)],
        timeout=120,
        variables=variables,
    )
    run_in(
        root,
        [str(private_uv), *words, f"{work}/{wheel.name}[local,torch]", *TEST_PACKAGES],
        timeout=1200,
        variables=variables,
    )
    yield found
    shutil.rmtree(found.environment)
    shutil.rmtree(found.inside(work))


def test_the_python_is_the_releases_own(installed: Installed) -> None:
    shown = installed.run("python", "-c", "import perdure, sys; print(perdure.__file__, sys.version)")
    assert str(installed.environment) in shown
    assert f" {PYTHONS[installed.root.name]}." in shown


def test_a_job_of_two_nodes_succeeds_though_a_rank_is_killed(installed: Installed) -> None:
    shutil.copy(Path(__file__).with_name("killed_once.py"), installed.inside(installed.work))
    answers = installed.inside(installed.work)
    # One command, as the server and the worker end with it.
    shown = installed.run("python", "-c", RUNS_A_JOB)
    status, incidents = (json.loads((answers / name).read_text()) for name in ("status", "explain"))
    assert status["phase"] == "SUCCEEDED", shown
    assert [(incident["failure"], incident["culprit"]) for incident in incidents] == [("KILLED", 1)], shown


def test_values_are_the_same(installed: Installed) -> None:
    for name in COPIED:
        source, copy = ROOT / name, installed.inside(installed.work) / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "out"))
        else:
            shutil.copy(source, copy)
    tests = ["tests/importers", "tests/policy"]
    installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, timeout=3000)
