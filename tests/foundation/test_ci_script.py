"""What CI does about tests that fail: few of the cluster and of the long groups run a second time, alone; all other
failures end the run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"

MAKE = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
  {target}) cat {output}; exit {code} ;;
  test-failed) exit {again} ;;
esac
"""
"""Stands in for `make`: one target fails with an output, and the second run of its failed tests ends as given."""


def run(folder: Path, *, target: str, output: str, again: int) -> tuple[int, list[str]]:
    """Returns the script's exit code and the targets that it made, in order."""
    calls, printed, make, temporary = (folder / name for name in ("calls", "output", "make", "temporary"))
    temporary.mkdir(exist_ok=True)
    printed.write_text(output)
    make.write_text(MAKE.format(calls=calls, target=target, output=printed, code=2, again=again))
    make.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "TMPDIR": str(temporary)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert not list(temporary.iterdir())
    return ended.returncode, [call.split()[0] for call in calls.read_text().splitlines()]


def failures(count: int, *, target: str = "test-cluster", code: int = 1) -> str:
    lines = [f"FAILED tests/x.py::test_{number} - AssertionError" for number in range(count)]
    return "\n".join([*lines, f"make: *** [Makefile:44: {target}] Error {code}", ""])


@pytest.mark.parametrize("target", ["test-cluster", "test-long"])
def test_few_failed_tests_run_again_and_decide(tmp_path: Path, target: str):
    order = ["test", "check-api", "test-cluster", "test-long"]
    before = order[: order.index(target) + 1]
    after = order[order.index(target) + 1 :]
    output = failures(10, target=target)
    assert run(tmp_path, target=target, output=output, again=0) == (0, [*before, "test-failed", *after])
    (tmp_path / "calls").unlink()
    assert run(tmp_path, target=target, output=output, again=2) == (2, [*before, "test-failed"])


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(failures(11), id="many failed"),
        pytest.param(failures(1, code=2), id="pytest was interrupted"),
        pytest.param(failures(0, code=3), id="pytest crashed"),
        pytest.param(failures(0, target="setup"), id="set-up failed"),
        pytest.param("make: *** [Makefile:44: test-cluster] Error 1\n", id="no failed test is named"),
        pytest.param("", id="nothing was printed"),
    ],
)
def test_other_failures_end_the_run(tmp_path: Path, output: str):
    code, targets = run(tmp_path, target="test-cluster", output=output, again=0)
    assert code != 0
    assert targets == ["test", "check-api", "test-cluster"]


def test_a_test_of_the_usual_ones_is_never_tried_again(tmp_path: Path):
    code, targets = run(tmp_path, target="test", output=failures(1, target="test"), again=0)
    assert code != 0
    assert targets == ["test"]


@pytest.mark.parametrize("target", ["test", "test-cluster", "test-long"])
def test_only_ci_runs_tests_in_a_random_order(target: str):
    def would_run(*variables: str) -> str:
        command = ["make", "--dry-run", target, *variables]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "pytest -p pytest_randomly" in would_run("CI=true")
    assert "randomly" not in would_run("CI=")
