"""Tests of `perdure_training.report`, in a real process beside the real step counter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure_launcher.environment import inject
from perdure_training import report
from perdure_training.node_api.progress_file import COUNTED, REPORTED, ProgressFile, progress_path, read_progress
from tests.support.waiting import DEADLINE
from tests.training.warm_torch import run_with_torch

ROOT = Path(__file__).parents[2]

RANK = {"RANK": "3", "PERDURE_RUN_ID": "abc", "TORCHELASTIC_RUN_ID": "abc", "PERDURE_GENERATION": "7"}


def environment_of_a_rank(directory: Path, **changes: str | None) -> dict[str, str]:
    environment = {**os.environ, **RANK, "PERDURE_PROGRESS_DIR": str(directory / "progress"), **changes}
    return {name: value for name, value in environment.items() if value is not None}


def run(script: str, directory: Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment_of_a_rank(directory, **changes),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )


def run_beside_torch(script: str, directory: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    [ended] = run_with_torch(["-c", script], environments=[environment_of_a_rank(directory, **changes)], folder=ROOT)
    ended.check_returncode()
    return ended


def test_reported_progress_is_what_the_agent_reads(tmp_path: Path) -> None:
    run("from perdure_training import report; report(step=41, total=100, loss=2.5, mfu=0.4); report(step=42)", tmp_path)
    progress = read_progress(progress_path(tmp_path / "progress", 3))
    assert progress
    assert (progress.step, progress.total, progress.loss, progress.generation) == (42, 100, 2.5, 7)
    assert progress.mfu == 0.4
    assert progress.reported
    assert progress.time > 0


@pytest.mark.parametrize("missing", ["PERDURE_PROGRESS_DIR", "RANK"])
def test_outside_perdure_nothing_happens(tmp_path: Path, missing: str) -> None:
    run("from perdure_training import report; report(step=1)", tmp_path, **{missing: None})
    assert not (tmp_path / "progress").exists()


def test_ranks_of_a_torchrun_within_a_rank_write_nothing(tmp_path: Path) -> None:
    run("from perdure_training import report; report(step=1)", tmp_path, TORCHELASTIC_RUN_ID="none")
    assert not (tmp_path / "progress").exists()


def test_the_library_imports_neither_torch_nor_the_rest_of_perdure(tmp_path: Path) -> None:
    script = (
        "import sys; from perdure_training import report; report(step=1)\n"
        "heavy = {'torch', 'pydantic', 'temporalio', 'perdure_launcher', 'perdure.spec', 'aiohttp'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    run(script, tmp_path)


@pytest.mark.usefixtures("ranks")
def test_a_tensor_on_a_device_is_ignored_with_one_warning(tmp_path: Path) -> None:
    script = (
        "import torch\nfrom perdure_training import report\n"
        "report(step=1, loss=torch.tensor(0.25, requires_grad=True))\n"
        "for step in (2, 3): report(step=step, loss=torch.empty((), device='meta'))"
    )
    result = run_beside_torch(script, tmp_path)
    progress = read_progress(progress_path(tmp_path / "progress", 3))
    assert progress
    assert (progress.step, progress.loss) == (3, 0.25)
    assert result.stderr.count("loss.item()") == 1


@pytest.mark.usefixtures("ranks")
def test_counting_stops_at_the_first_report(tmp_path: Path) -> None:
    script = (
        "import torch\nfrom perdure_training import report\n"
        "parameter = torch.nn.Parameter(torch.zeros(1)); parameter.grad = torch.ones(1)\n"
        "optimizer = torch.optim.SGD([parameter], lr=0.1)\n"
        "optimizer.step(); optimizer.step()\n"
        "report(step=1000)\n"
        "optimizer.step(); optimizer.step()\n"
    )
    run_beside_torch(script, tmp_path, PYTHONPATH=str(inject(tmp_path)))
    progress = read_progress(progress_path(tmp_path / "progress", 3))
    assert progress
    assert (progress.step, progress.reported) == (1000, True)


def test_a_full_disk_or_a_bad_folder_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("a file where a folder should be")
    result = run("from perdure_training import report; report(step=1); report(step=2); print('on')", tmp_path)
    assert result.stdout == "on\n"
    assert result.stderr.count("progress is not reported") == 1


def test_a_forked_child_reports_under_its_own_name(tmp_path: Path) -> None:
    script = (
        "import os\nfrom perdure_training import report\nreport(step=1)\npid = os.fork()\n"
        "if pid == 0:\n    report(step=2)\n    print(os.getpid(), flush=True)\n    os._exit(0)\nos.waitpid(pid, 0)"
    )
    child = int(run(script, tmp_path).stdout)
    progress = read_progress(progress_path(tmp_path / "progress", 3))
    assert progress
    assert (progress.step, progress.pid) == (2, child)


def test_threads_may_report_together(tmp_path: Path) -> None:
    script = (
        "import threading\nfrom perdure_training import report\n"
        "def work(first):\n    for step in range(first, 20000, 4): report(step=step, loss=step)\n"
        "threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]; report(step=20000, loss=1)"
    )
    run(script, tmp_path)
    progress = read_progress(progress_path(tmp_path / "progress", 3))
    assert progress
    assert (progress.step, progress.loss) == (20000, 1.0)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"step": -1}, ValueError, "step: expected 0 or more, found -1"),
        ({"step": 1.5}, TypeError, "float"),
        ({"step": 1, "total": 0}, ValueError, "total: expected at least 1"),
        ({"step": 1, "loss": "low"}, ValueError, "low"),
        ({"step": 1, "mfu": -0.1}, ValueError, "mfu: expected a share such as 0.4, found -0.1"),
    ],
)
def test_wrong_arguments_are_refused_everywhere(arguments: dict[str, object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        report(**arguments)  # type: ignore[arg-type]


def test_a_report_takes_the_file_over_from_the_count_of_its_process(tmp_path: Path) -> None:
    path = progress_path(tmp_path, 0)
    counted = ProgressFile(path, generation=5, pid=os.getpid(), source=COUNTED)
    counted.write(3, time=1.0)
    reported = ProgressFile(path, generation=5, pid=os.getpid(), source=REPORTED)
    progress = read_progress(path)
    assert progress
    assert (progress.step, progress.time) == (0, 0.0)
    reported.write(9, time=2.0, total=10, loss=0.5, mfu=0.25)
    assert ProgressFile(path, generation=5, pid=os.getpid(), source=COUNTED).source == counted.source == REPORTED
    progress = read_progress(path)
    assert progress
    assert (progress.step, progress.total, progress.loss, progress.pid) == (9, 10, 0.5, os.getpid())
    assert progress.mfu == 0.25
