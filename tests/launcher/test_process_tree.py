"""Tests of what the launcher calls the processes that a command leaves behind."""

from __future__ import annotations

import pytest

from perdure_launcher.supervisor.process_tree import ProcessTree, explain_leftovers
from perdure_launcher.system import processes


def leftovers(monkeypatch: pytest.MonkeyPatch, *command_lines: bytes) -> list[str]:
    """Describes children with these command lines."""
    children = [
        processes.Process(pid=pid, parent=1, group=1, state="S", cpu_ticks=0, start_ticks=0)
        for pid in range(len(command_lines))
    ]
    monkeypatch.setattr(processes, "descendants", lambda: children)
    monkeypatch.setattr(processes, "read_file", lambda pid, name: command_lines[pid])
    return ProcessTree().leftovers()


def test_a_process_is_named_by_its_program_and_script_without_further_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = leftovers(
        monkeypatch,
        b"/usr/bin/aws\0s3\0cp\0--token\0secret\0",
        b"python\0upload.py\0--password=secret\0",
        b"bash\0-c\0curl secret\0",
    )
    assert found == ["aws s3 (0)", "python upload.py (1)", "bash (2)"]


def test_helpers_and_processes_that_are_ending_by_themselves_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = b"python\0-c\0from multiprocessing.resource_tracker import main; main(7)\0"
    assert leftovers(monkeypatch, b"", tracker, b"python\0-m\0perdure_launcher.warm_start\0") == []


def test_many_processes_are_not_all_named() -> None:
    text = explain_leftovers([f"sleep ({pid})" for pid in range(7)])
    assert "sleep (4) and others. If" in text
    assert "sleep (5)" not in text
