"""Tests of what ranks answer when they are asked where they are: real processes that sleep, hang, stop and end."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure_launcher.probes import stacks
from perdure_launcher.rank_plugins.stacks import STACKS_SIGNAL, StackFile
from perdure_launcher.system.processes import descendants, read_process
from perdure_training.node_api.bodies import RankStacks
from perdure_training.node_api.codec import LONGEST_TEXT
from perdure_training.node_api.layout import STACKS
from tests.support.waiting import DEADLINE, wait_for

pytestmark = pytest.mark.usefixtures("patient_probe")

BEGIN = """
import re, sys, threading, time
from perdure_launcher.rank_plugins.stacks import answer_with_stacks
answer_with_stacks()
def say(): print("here", flush=True)
"""
SLEEPS = """
def waits_in_python():
    say(); time.sleep(120)
waits_in_python()
"""
HOLDS_THE_LOCK = """
def holds_the_lock():
    say(); re.match('(a+)+$', 'a' * 99 + 'b')
threading.Thread(target=time.sleep, args=(120,), daemon=True).start()
holds_the_lock()
"""
COMPUTES = """
def computes():
    say()
    while True: pass
computes()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / STACKS).mkdir()
    return tmp_path


@contextmanager
def rank(
    folder: Path, script: str, *, number: int = 0, generation: int = 1, before: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """A process that was started as a rank, and has come to where its script says so."""
    environment = {
        **os.environ,
        "RANK": str(number),
        "PERDURE_GENERATION": str(generation),
        "PERDURE_PROGRESS_DIR": str(folder / "progress"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", before + BEGIN + script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.wait()


def only(found: tuple[RankStacks, ...]) -> RankStacks:
    (one,) = found
    return one


def test_a_rank_tells_its_calls_and_goes_on(folder: Path):
    with rank(folder, SLEEPS, number=5) as process:
        for _ in range(2):
            told = only(stacks.collect(folder))
            assert (told.global_rank, told.pid, told.generation, told.problem) == (5, process.pid, 1, "")
            assert told.text.count("in waits_in_python") == 1
            assert told.state == "S"
            assert min(told.cpu_seconds or 0, told.switches or 0, told.transferred_bytes or 0) > 0
        assert process.poll() is None


def test_a_rank_that_never_gives_up_the_interpreters_lock_answers_with_the_main_thread_first(folder: Path):
    with rank(folder, HOLDS_THE_LOCK):
        told = only(stacks.collect(folder))
    main, *others = told.text.split("\n\n")
    assert "in holds_the_lock" in main
    assert len(others) == 1


def test_a_rank_that_computes_uses_a_processor_and_one_that_sleeps_none(folder: Path):
    with rank(folder, COMPUTES, number=0), rank(folder, SLEEPS, number=1):
        computing, sleeping = stacks.collect(folder)
    assert (computing.cpu_percent or 0) > (sleeping.cpu_percent or 0)
    assert "in computes" in computing.text


def uses(now: tuple[RankStacks, ...], before: tuple[RankStacks, ...], *, number: int) -> tuple[RankStacks, ...]:
    """The present answers if a rank and its children have used a processor since the earlier ones."""
    return now if (now[number].cpu_seconds or 0.0) - (before[number].cpu_seconds or 0.0) > 0.1 else ()


def test_a_look_shows_whether_the_main_thread_ran_and_what_children_used(folder: Path):
    waits = "lock = threading.Lock(); lock.acquire(); say(); lock.acquire()"
    works = "import subprocess; subprocess.Popen([sys.executable, '-c', 'while True: pass']); say(); time.sleep(120)"
    with rank(folder, waits, number=0), rank(folder, works, number=1) as parent:
        before = stacks.collect(folder)
        after = wait_for(lambda: uses(stacks.collect(folder), before, number=1))
        again = stacks.collect(folder)
        for child_process in descendants(parent.pid):
            os.kill(child_process.pid, signal.SIGKILL)
    assert not uses(after, before, number=0)
    assert (again[0].switches or 0) - (after[0].switches or 0) <= 3


def test_a_stopped_rank_is_told_as_stopped_and_does_not_hide_the_others(folder: Path):
    lengths: list[int] = []

    def monotonic() -> float:
        """The time is over once the other one has answered."""
        lengths.append(max(path.stat().st_size for path in (folder / STACKS).iterdir()))
        return DEADLINE if lengths[-1] and lengths.count(lengths[-1]) > 2 else 0.0

    with rank(folder, SLEEPS, number=0) as stopped, rank(folder, SLEEPS, number=1):
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        first, second = stacks.collect(folder, monotonic=monotonic)
    assert (first.state, first.text) == ("T", "")
    assert first.problem.startswith("it is stopped")
    assert "in waits_in_python" in second.text


def test_the_kernels_account_needs_no_signal(folder: Path):
    with rank(folder, SLEEPS, number=0) as process:
        asked = only(stacks.collect(folder))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        told = only(stacks.collect(folder, by_signal=False))
        pending = Path(f"/proc/{process.pid}/status").read_text().partition("ShdPnd:")[2].split()[0]
    assert (told.state, told.text, told.problem) == ("T", "", "it was not asked")
    assert asked.text
    assert int(pending, 16) >> (STACKS_SIGNAL - 1) & 1 == 0


def test_only_ranks_of_the_newest_generation_are_asked(folder: Path):
    with rank(folder, SLEEPS, number=0, generation=3), rank(folder, SLEEPS, number=0, generation=4):
        assert only(stacks.collect(folder)).generation == 4


def test_a_process_without_a_handler_is_never_signalled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Training code can name any process: the signal would end it."""
    monkeypatch.setattr(stacks, "ANSWER_WITHIN", 0.2)
    with subprocess.Popen(["sleep", "60"]) as process:
        started = read_process(process.pid)
        assert started is not None
        (folder / STACKS / StackFile(1, 0, process.pid, started.start_ticks).name).touch()
        told = only(stacks.collect(folder))
        assert process.poll() is None
        assert told.problem == "it has not answered within 0.2 s"
        process.kill()


@pytest.mark.parametrize("where", ["in the rank", "in a child of it"])
def test_a_rank_with_a_handler_of_its_own_for_the_signal_is_not_signalled(folder: Path, where: str):
    # Some programs handle whatever signal there is: to clean up and end, or to reset what a child has inherited.
    script = """
import os, signal
def all_signals():
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda number, frame: sys.exit(f"ends by {number}"))
if "child" not in where:
    all_signals()
elif (child := os.fork()) == 0:
    all_signals()
    os._exit(0)
else:
    os.waitpid(child, 0)
say()
for line in sys.stdin:
    print("still here", flush=True)
"""
    with rank(folder, f"where = {where!r}" + script) as process:
        answer = only(stacks.collect(folder))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("?\n")
        process.stdin.flush()
        assert process.stdout.readline() == "still here\n"
        if where == "in the rank":
            assert (answer.text, answer.problem) == (
                "",
                f"its script has a handler of its own for signal {STACKS_SIGNAL:d}, by which ranks are asked",
            )
        else:
            assert "in <module>" in answer.text


@pytest.mark.parametrize(
    "made",
    [
        lambda pid, ticks: StackFile(1, 0, pid, ticks + 1).name,
        lambda pid, ticks: StackFile(1, 0, 2**22 - 1, 1).name,
        lambda pid, ticks: StackFile(1, 0, os.getppid(), 1).name,
    ],
)
def test_files_of_processes_that_have_ended_or_are_no_ranks_of_this_node_are_deleted(
    folder: Path, made: Callable[[int, int], str]
):
    own = read_process(os.getpid())
    assert own is not None
    (folder / STACKS / made(own.pid, own.start_ticks)).touch()
    (folder / STACKS / "no.stacks").touch()
    assert stacks.collect(folder) == ()
    assert [path.name for path in (folder / STACKS).iterdir()] == ["no.stacks"]


def test_what_training_code_puts_in_place_of_an_answer_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stacks, "ANSWER_WITHIN", 0.2)
    with rank(folder, SLEEPS):
        (path,) = (folder / STACKS).iterdir()
        path.unlink()
        path.symlink_to("/proc/self/environ")
        told = only(stacks.collect(folder))
    assert told.text == ""


def test_a_report_keeps_the_oldest_threads_that_it_can_hold():
    threads = [
        f'Thread {number} (most recent call first):\n  File "a.py", line 1 in f{number}' for number in range(900)
    ]
    text = stacks.main_thread_first("\n\n".join(threads))
    assert text.startswith("Thread 899 ")
    assert LONGEST_TEXT - 100 < len(text) <= LONGEST_TEXT
    assert stacks.main_thread_first("") == ""


def test_the_signal_is_one_that_nothing_else_uses():
    assert signal.SIGRTMIN + 2 < STACKS_SIGNAL < signal.SIGRTMAX - 2


FOLLOWS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
seized = libc.ptrace(0x4206, int(sys.argv[1]), None, None)
print("attached" if seized == 0 else f"refused: {ctypes.get_errno()}", flush=True)
sys.stdin.read()
"""
"""A debugger that lets the process run (PTRACE_SEIZE)."""


def test_a_rank_that_a_debugger_lets_run_is_told_as_such_and_not_signalled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with rank(folder, SLEEPS) as process:
        command = [sys.executable, "-c", FOLLOWS, str(process.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as debugger:
            assert debugger.stdout is not None
            if (answer := debugger.stdout.readline().strip()) != "attached":
                debugger.kill()
                pytest.skip(f"ptrace is {answer}")
            with monkeypatch.context() as during:
                during.setattr(stacks, "ANSWER_WITHIN", 0.2)
                told = only(stacks.collect(folder))
            debugger.communicate()
        assert (told.state, told.text, told.problem) == (
            "t",
            "",
            "a debugger is attached to it, so it is left alone",
        )
        again = only(stacks.collect(folder))
        assert (again.state, again.text.count("in waits_in_python")) == ("S", 1)


WITHOUT_PTRACE = """
import ctypes, pathlib, subprocess, sys
from perdure_launcher.probes import stacks
from tests.launcher.test_rank_stacks import FOLLOWS, SLEEPS, only, rank
folder = pathlib.Path(sys.argv[1])
hidden = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\\n"
with rank(folder, SLEEPS, before=hidden) as process:
    command = [sys.executable, "-c", FOLLOWS, str(process.pid)]
    attached = subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=True).stdout
    told = only(stacks.collect(folder))
    print(attached.strip(), told.state, "in waits_in_python" in told.text, told.transferred_bytes)
"""
"""A rank whose memory no other process may read: PR_SET_DUMPABLE is 0."""


def test_a_rank_tells_its_calls_where_ptrace_is_forbidden(folder: Path):
    dropped = ["setpriv", "--bounding-set=-sys_ptrace,-dac_override,-dac_read_search", "--inh-caps=-sys_ptrace"]
    if os.geteuid() != 0:
        dropped = []
    elif shutil.which("setpriv") is None:
        pytest.skip("setpriv is missing")
    done = subprocess.run(
        [*dropped, sys.executable, "-c", WITHOUT_PTRACE, str(folder)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.split()[:4] == ["refused:", str(errno.EPERM), "S", "True"]
