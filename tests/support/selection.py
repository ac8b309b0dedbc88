"""Which tests run, in what order, and in which of several processes: by the fixtures and marks of each test."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import programs, session

LONG = (
    "launchers",
    "frameworks",
    "warm-starts",
    "joining",
    "survival",
    "exactness",
    "cluster-faults",
    "storage",
    "workflows",
    "commands",
    "metrics",
    "silent-faults",
    "roles",
    "tensorflow",
    "ray",
    "history",
    "page",
    "pythons",
    "benchmarks",
)
"""Groups of tests that are too long for each run. `.ci/run` adds one by turn."""

_LONGEST = ("tests/workflows/", "tests/cli/", "tests/agent/", "tests/security/", "tests/policy/")
"""The longest of the tests without ranks: they start first, so that no process has one of them left at the end."""

_CORES_PER_RANKS = 2
"""Processes with ranks beside each other: one for so many cores, since ranks import torch with a core each."""

_CLUSTER, _RANKS, _REST = "cluster", "ranks", ""


def add_options(parser: pytest.Parser) -> None:
    """Adds `--long` and `--cluster`."""
    parser.addoption(
        "--long",
        default="with",
        choices=("with", "without", "only", "by-commit", *LONG),
        help="long tests: with them, without them, only them, or only one group of them; by-commit: one by turn",
    )
    parser.addoption(
        "--cluster",
        default="with",
        choices=("with", "without", "only"),
        help="tests that ask for programs that the package registry lacks: a cluster, a browser, others that are built",
    )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the options leave out, and puts first what takes a process for longest."""
    kept = [item for item in items if _is_chosen_length(config, item) and _is_chosen_place(config, item)]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    order = (_CLUSTER, _RANKS, _REST)
    items[:] = sorted(kept, key=lambda item: (order.index(_need(item)), not item.nodeid.startswith(_LONGEST)))


def _is_chosen_length(config: pytest.Config, item: pytest.Item) -> bool:
    group = _long_group(item)
    match config.getoption("--long"):
        case "with":
            return True
        case "without":
            return group is None
        case "only":
            return group is not None
        case "by-commit":
            return group == group_by_turn(config)
        case chosen:
            return group == chosen


def _is_chosen_place(config: pytest.Config, item: pytest.Item) -> bool:
    chosen = config.getoption("--cluster")
    return chosen == "with" or (chosen == "only") == bool(programs.asked(item))


def _long_group(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("long")
    if marker is None:
        return None
    [group] = marker.args
    assert group in LONG, f"{item.nodeid}: {group} is not a group of long tests; tests/support/selection.py names them"
    return group


_BY_TURN = pytest.StashKey[str]()


def group_by_turn(config: pytest.Config) -> str:
    """Returns another group for nearly every commit."""
    if (known := config.stash.get(_BY_TURN, None)) is None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        known = config.stash[_BY_TURN] = LONG[int(commit or "0", 16) % len(LONG)]
    return known


def _need(item: pytest.Item) -> str:
    if "cluster_programs" in (fixtures := getattr(item, "fixturenames", ())):
        return _CLUSTER
    return _RANKS if "ranks" in fixtures else _REST


class ByNeed(LoadScopeScheduling):
    """Shares files out among processes; tests that need the cluster, or ranks, go to one process each, in a row.

    The process that runs the scheduler collects no tests: one of the others writes down what each test needs.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._needs: Mapping[str, str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._needs is None:
            self._needs = json.loads(_needs_file().read_text())
        file = nodeid.partition("::")[0]
        match self._needs.get(nodeid, _REST):
            case "ranks":
                return f"ranks {zlib.crc32(file.encode()) % max((os.cpu_count() or 1) // _CORES_PER_RANKS, 1)}"
            case "cluster":
                return "cluster"
            case _:
                return file


def write_needs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tells the scheduler what the collected tests need; every process that runs tests knows the same."""
    if session.worker_name(config) == "gw0":
        content = json.dumps({item.nodeid: need for item in items if (need := _need(item)) != _REST})
        file = _needs_file()
        (new := file.with_suffix(".new")).write_text(content)
        new.replace(file)


def _needs_file() -> Path:
    return session.folder() / "needs.json"
