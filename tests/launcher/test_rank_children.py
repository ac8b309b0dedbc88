"""Tests of the processes that ranks start, which inherit all variables of a rank: only the rank itself is one.

A stub stands for torch: it loads the plugin at its import, and has hooks of optimizers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure_launcher.environment import inject
from perdure_launcher.probes import stacks
from perdure_launcher.rank_exits import with_error
from perdure_launcher.rank_plugins.error_file import WRITER
from perdure_launcher.rank_plugins.stacks import StackFile
from perdure_launcher.system.processes import read_process
from perdure_training.node_api.bodies import RankExit
from perdure_training.node_api.layout import PROGRESS, STACKS
from perdure_training.node_api.number_file import number_path
from perdure_training.node_api.progress_file import progress_path, read_progress
from tests.launcher.warmth import STUB_TORCH
from tests.support.waiting import DEADLINE

RANK = 5
BEGIN = """
import json, math, multiprocessing, os, subprocess, sys
variables = dict(os.environ)
class Optimizer: pass
def trains(steps=1, optimizer=Optimizer()):
    import torch
    from torch.optim.optimizer import _global_hooks
    for _ in range(steps):
        for hook in _global_hooks: hook(optimizer, (), {})
def starts(*calls, **options):
    program = sys.argv[1] + "\\n" + "\\n".join(calls)
    return subprocess.run([sys.executable, "-c", program, sys.argv[1]], stderr=subprocess.DEVNULL, **options).returncode
def fails(): raise RuntimeError("of a child")
"""


class Node:
    """The run directory of a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = folder / "error.json"
        (folder / STACKS).mkdir()
        (folder / PROGRESS).mkdir()

    def environment(self, **changes: str) -> dict[str, str]:
        path = os.pathsep.join(map(str, (inject(self.folder), STUB_TORCH)))
        place = {"RANK": str(RANK), "WORLD_SIZE": "1", "PERDURE_RUN_ID": "abc", "TORCHELASTIC_RUN_ID": "abc"}
        rank = {"PERDURE_GENERATION": "2", "PERDURE_PROGRESS_DIR": str(self.folder / PROGRESS)}
        return {
            **os.environ,
            "PYTHONPATH": path,
            "TORCHELASTIC_ERROR_FILE": str(self.errors),
            **place,
            **rank,
            **changes,
        }

    def run(self, *lines: str) -> subprocess.CompletedProcess[str]:
        """Runs a rank with these lines."""
        return subprocess.run(
            [sys.executable, "-c", "\n".join([BEGIN, *lines]), BEGIN],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    @property
    def step(self) -> int | None:
        progress = read_progress(progress_path(self.folder / PROGRESS, RANK))
        return None if progress is None else progress.step

    @property
    def error(self) -> str:
        return json.loads(self.errors.read_text())["message"]["message"] if self.errors.exists() else ""

    @property
    def answering(self) -> int:
        return len(os.listdir(self.folder / STACKS))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_child_that_steps_reports_and_fails_says_nothing_of_its_rank(node: Node):
    ended = node.run(
        "trains(7)",
        "assert starts('trains(); fails()') == 1",
        "assert starts('from perdure_training import report', 'report(step=1, loss=math.nan)') == 0",
    )
    assert ended.returncode == 0, ended.stderr
    assert (node.step, node.error, node.answering) == (7, "", 1)
    assert not number_path(node.folder / PROGRESS, RANK).exists()


def test_a_child_of_a_rank_that_has_not_stepped_yet_gives_way_to_it(node: Node):
    ended = node.run("import torch", "assert starts('trains(9); fails()') == 1", "trains(3)", "raise KeyError('own')")
    assert ended.returncode == 1
    assert (node.step, node.error) == (3, "KeyError: 'own'")


def test_a_child_that_was_given_variables_of_before_is_known_by_its_ancestors(node: Node):
    ended = node.run("trains(7)", "assert starts('trains(); fails()', env=variables) == 1")
    assert ended.returncode == 0, ended.stderr
    assert (node.step, node.error, node.answering) == (7, "", 1)


def test_workers_that_begin_before_their_rank_imports_torch_are_no_ranks(node: Node, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"{BEGIN}\ndef work(queue):\n    import torch\n    queue.put(os.listdir({str(node.folder / STACKS)!r}))\n"
        "if __name__ == '__main__':\n    context = multiprocessing.get_context('spawn')\n    queue = context.Queue()\n"
        "    worker = context.Process(target=work, args=(queue,)); worker.start(); print(queue.get()); worker.join()\n"
        "    trains(2)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], env=node.environment(), capture_output=True, text=True, timeout=DEADLINE
    )
    assert ended.stdout == "[]\n", ended.stderr
    assert (node.step, node.answering) == (2, 1)


def test_what_a_wrapper_starts_trains_in_its_place(node: Node):
    """As a launcher in Python does, which imports torch and waits for the program."""
    ended = node.run(
        "import torch",
        "subprocess.CalledProcessError",
        "if starts('trains(9); fails()'): raise subprocess.CalledProcessError(1, 'train')",
    )
    assert ended.returncode == 1
    assert (node.step, node.error) == (9, "RuntimeError: of a child")


def test_a_program_that_a_rank_forks_trains_in_its_place(node: Node):
    """As NVIDIA's resiliency extension forks it: the parent waits, and starts it again."""
    ended = node.run(
        "import torch; pid = os.fork()", "if not pid: trains(9); fails()", "sys.exit(os.waitpid(pid, 0)[1] >> 8)"
    )
    assert ended.returncode == 1, ended.stderr
    assert (node.step, node.error, node.answering) == (9, "RuntimeError: of a child", 2)


def test_what_a_rank_forks_while_it_trains_says_nothing_of_it(node: Node):
    ended = node.run("trains(7); pid = os.fork()", "if not pid: trains(9); fails()", "os.waitpid(pid, 0)")
    assert ended.returncode == 0, ended.stderr
    assert (node.step, node.error, node.answering) == (7, "", 1)


def test_stages_of_a_shell_script_are_the_rank_one_after_another(node: Node):
    for lines, error in ((("trains(4)", "fails()"), "RuntimeError: of a child"), (("trains(2)",), "")):
        node.run(*lines)
        assert (node.step, node.error) == (4 if error else 2, error)


def test_only_the_process_that_trains_answers_for_its_rank(node: Node):
    script = (
        "import torch; child = subprocess.Popen([sys.executable, '-c', sys.argv[1] + '\\n'"
        " + 'trains(); print(os.getpid(), flush=True); sys.stdin.read()'], stdin=subprocess.PIPE); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{BEGIN}\n{script}", BEGIN],
        env=node.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as wrapper:
        assert wrapper.stdout is not None
        child = int(wrapper.stdout.readline())
        own = read_process(wrapper.pid)
        assert own is not None
        assert (node.folder / STACKS / StackFile(2, RANK, own.pid, own.start_ticks).name).exists()
        told = stacks.collect(node.folder)
        assert [(one.global_rank, one.pid) for one in told] == [(RANK, child)]


@pytest.mark.parametrize(
    ("writer", "exit_code", "ago", "counts"),
    [(7, 1, 3600, True), (8, 1, 1, True), (8, 1, 3600, False), (8, None, 1, False)],
    ids=["own", "of-what-it-wraps", "handled-long-ago", "killed-later"],
)
def test_the_error_of_a_process_below_a_rank_counts_if_it_ended_the_rank(
    node: Node, writer: int, exit_code: int | None, ago: float, counts: bool
):
    extra: dict[str, Any] = {"py_callstack": "", "perdure_time": time.time() - ago, WRITER: writer}
    node.errors.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    signal = 9 if exit_code is None else None
    ended = with_error(RankExit(local_rank=0, pid=7, exit_code=exit_code, signal=signal), node.errors)
    assert ended.error == ("ValueError: x" if counts else RankExit(local_rank=0).error)
