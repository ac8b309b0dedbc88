"""Tests of processes that a command leaves behind, and of those that do not end when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from perdure_launcher import old_ranks
from perdure_launcher.supervisor import process_tree
from perdure_launcher.supervisor.process_tree import ProcessTree, explain_leftovers
from perdure_launcher.system import processes, program_signals
from perdure_launcher.system.program_signals import ends_with_input

BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execvp(sys.argv[1], sys.argv[1:])
"""
SLEEPS = "import time; print('started', flush=True); time.sleep(60)"


def leftovers(monkeypatch: pytest.MonkeyPatch, *command_lines: bytes) -> list[str]:
    """Describes children with these command lines."""
    children = [
        processes.Process(pid=pid, parent=1, group=1, state="S", cpu_ticks=0, start_ticks=0)
        for pid in range(len(command_lines))
    ]
    monkeypatch.setattr(processes, "descendants", lambda: children)
    monkeypatch.setattr(processes, "read_file", lambda pid, name: command_lines[pid])
    # Real processes have these PIDs, too.
    monkeypatch.setattr(process_tree, "ends_with_input", lambda pid, number: False)
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


def test_a_shell_that_was_just_forked_to_read_output_ends_with_it() -> None:
    # As between the fork of `> >(filter)` and the moment in which the shell makes the pipe its input.
    reads, writes = os.pipe()
    with subprocess.Popen(
        ["bash", "-c", "echo started; while :; do sleep 60; done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=[reads],
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        try:
            assert ends_with_input(shell.pid, signal.SIGTERM)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            os.close(reads)
            os.close(writes)


READS = """
exec 7<&0 < /dev/null
trap 'exec 0<&7 7<&-; echo moved' USR1
echo started
while :; do read -r -u 8 line; done
"""
"""A shell that makes a pipe its input when it is told to."""


def test_a_shell_that_makes_the_pipe_its_input_meanwhile_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    never, open_ = os.pipe()
    listed = program_signals._descriptors
    with subprocess.Popen(
        ["bash", "-c", f"exec 8<&{never}\n{READS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[never],
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"started\n"

        def moves(pid: int) -> list[str]:
            names = [name for name in listed(pid) if name == "7"]
            assert names
            shell.send_signal(signal.SIGUSR1)
            assert shell.stdout is not None
            assert shell.stdout.readline() == b"moved\n"
            return names

        monkeypatch.setattr(program_signals, "_descriptors", moves)
        try:
            assert ends_with_input(shell.pid, signal.SIGTERM)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            os.close(never)
            os.close(open_)


def test_a_shell_that_blocks_the_signal_while_it_forks_ends_with_its_input() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, "bash", "-c", "echo started; while read -r line; do :; done"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        try:
            assert ends_with_input(shell.pid, signal.SIGTERM)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.parametrize("program", ["writes", "is no shell"])
def test_what_only_holds_a_pipe_does_not_end_with_input(program: str) -> None:
    reads, writes = os.pipe()
    end = writes if program == "writes" else reads
    command = (
        ["bash", "-c", "echo started; while :; do sleep 60; done"]
        if program == "writes"
        else [sys.executable, "-c", SLEEPS]
    )
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[end], start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert not ends_with_input(process.pid, signal.SIGTERM)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            os.close(reads)
            os.close(writes)


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a command whom signals do not reach, as one that waits in the kernel."""

    def send(pids: Iterable[int], number: signal.Signals) -> None: ...

    with subprocess.Popen(["sleep", "1000"]) as process:
        found = processes.read_process(process.pid)
        monkeypatch.setattr(processes, "send", send)
        monkeypatch.setattr(processes, "descendants", lambda: [found])
        yield process
        process.kill()


def test_a_process_that_survives_sigkill_is_known_until_it_has_ended(
    unkillable: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ProcessTree()
    monkeypatch.setattr(process_tree, "_UNKILLABLE", timedelta(0))
    monkeypatch.setattr(tree, "_empty", False)
    tree.kill()
    tree.advance()
    assert tree.empty, "the command's end is reported, and a launcher that leaves does not wait for it"
    assert tree.stuck == [unkillable.pid]
    assert not tree.vacant, "nothing is started beside it"
    assert tree.next_step is not None
    unkillable.kill()
    unkillable.wait()
    assert tree.vacant
    assert tree.next_step is None


def test_a_process_whose_main_thread_has_ended_has_not_ended() -> None:
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); print(); "
    exits = "import sys; sys.stdout.flush(); ctypes.CDLL(None).syscall(60, 0)"
    with subprocess.Popen([sys.executable, "-c", code + exits], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while (found := processes.read_process(process.pid)) is not None and found.state != "Z":
            os.sched_yield()
        assert found is not None
        assert (found.zombie, found.threads) == (False, 2)
        process.kill()


def test_the_next_ranks_wait_for_those_that_survive_sigkill(
    tmp_path: Path,
    unkillable: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(old_ranks, "_UNKILLABLE", 0.0)
    monkeypatch.setattr(old_ranks, "_LOOK_AGAIN_LATER", 0.01)
    looks: list[int] = []

    def look(generation: int, **_: object) -> list[processes.Process]:
        looks.append(generation)
        if len(looks) == 5:
            unkillable.kill()
            unkillable.wait()
        found = processes.read_process(unkillable.pid)
        return [found] if found is not None else []

    monkeypatch.setattr(old_ranks, "of_generations_up_to", look)
    assert old_ranks.end(3, run_directory=tmp_path, launcher=1, killed=(), grace=timedelta(0)) == []
    assert len(looks) == 5
    assert caplog.text.count(f"processes [{unkillable.pid}] of earlier ranks survive SIGKILL") == 1
