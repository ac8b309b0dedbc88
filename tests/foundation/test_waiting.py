"""Tests that tests wait for events. Only `tests/support/waiting.py` polls, for states without an event."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.source import parse

ROOT = Path(__file__).resolve().parents[2]

SLEEPS = {
    "tests/support/waiting.py": "the one place where it is looked again",
    "tests/support/descriptors.py": "connections that are being closed in threads of others",
    "tests/support/reaper.py": "processes that are being started while others are ended",
    "tests/local/ensure_server.py": "a command that runs until its test ends it",
    "tests/launcher/scripts/": "trainings, whose steps and saves take time",
    "tests/system/train.py": "a training, whose steps take time",
    "tests/gpu/train.py": "a training, whose steps take time",
    "tests/system/dies_once_shared.py": "a rank that waits for what another one writes down",
    "tests/system/observed.py": "a training, whose steps take time",
    "tests/system/bad_losses.py": "a training, whose steps take time",
    "tests/system/trainer_with_nan.py": "a training, whose steps take time",
    "tests/system/scaled.py": "a training, whose steps take time",
    "tests/system/differing_values.py": "a training, whose steps take time",
    "tests/system/keeps_states.py": "a training, whose steps take time",
    "tests/training/test_planned_hold.py": "a training, whose steps take time",
    "tests/training/test_announcements.py": "a training, whose steps take time",
    "tests/page/test_logs_in_progress.py": "a job that writes a line now and then, and a browser that reads slowly",
    "tests/system/slow_rank.py": "a training, whose steps take time",
    "tests/system/wrong_results.py": "a training, whose steps take time",
    "tests/system/saves_itself.py": "a training, whose steps take time",
    "tests/system/two_checkpointers.py": "a training, whose steps take time",
    "tests/system/walk.py": "a training, whose steps take time",
    "tests/system/ray_programs/uses_ray.py": "a training that lasts until its test ends it",
    "tests/system/tensorflow_programs/": "trainings, whose steps take time",
    "tests/system/exact_training.py": "a training, whose steps take time",
    "tests/system/elastic_loss.py": "a training, whose steps take time",
    "tests/system/test_exactness.py": "a killed worker or server is away for a while",
    "tests/kubernetes/role_programs.py": "a program that waits for a test, and one that calls a server again and again",
    "tests/kubernetes/test_pod_warnings.py": "nothing announces that nothing more is read",
    "tests/system/test_roles_without_worker.py": "faults at random times",
    "tests/agent/test_agent_process.py": "an outage lasts for several heartbeats",
    "tests/agent/test_agent_with_training.py": "the pace of a played watch",
    "tests/workflows/test_node_group.py": "an outage lasts until agents rarely ask for the server",
    "tests/workflows/test_no_silent_wait.py": "faults at random times",
    "tests/workflows/adverse_site.py": "faults that end at random times",
    "tests/workflows/training_node.py": "a network's delay",
    "tests/workflows/fleet.py": "the pace of played activities' heartbeats",
    "tests/workflows/played_node.py": "the pace of played activities' heartbeats",
    "tests/workflows/flood.py": "the pace of a played watch's heartbeats",
    "tests/workflows/jobs.py": "nothing announces that a history has stopped growing",
    "tests/workflows/observed_tasks.py": "tasks that follow each other share a query",
    "tests/launcher/test_agent_client.py": "a server that never answers",
}
"""Files, or folders, that may sleep, and what for."""


def sleeps(path: Path) -> Iterator[int]:
    """Lines that sleep for longer than until other tasks had their turn."""
    if "sleep" not in path.read_text(encoding="utf-8"):
        return
    for node in ast.walk(parse(path)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"), args=[seconds]):
                if not (isinstance(seconds, ast.Constant) and seconds.value == 0):
                    yield node.lineno
            case ast.ImportFrom(module="time" | "asyncio", names=names) if any(name.name == "sleep" for name in names):
                yield node.lineno
            case _:
                pass


def test_no_test_sleeps_without_a_reason() -> None:
    found = {
        f"{path.relative_to(ROOT)}": lines
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (lines := list(sleeps(path)))
    }
    without_reason = [f"{file}:{line}" for file, lines in found.items() if not _reason(file) for line in lines]
    assert without_reason == [], "await an event, or use tests/support/waiting.py"
    assert [name for name in SLEEPS if not any(file.startswith(name) for file in found)] == [], "they sleep no more"


def _reason(file: str) -> str:
    return next((reason for name, reason in SLEEPS.items() if file.startswith(name)), "")


def test_a_sleep_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_sleeps.py"
    path.write_text(
        "import asyncio, time\nfrom time import sleep\ntime.sleep(1)\nawait_ = asyncio.sleep(x)\ntime.sleep(0)\n"
    )
    assert sorted(sleeps(path)) == [2, 3, 4]
