"""Tests of the plugin that `import torch` loads: real torch in real processes, found through the injected folder
only.

Most processes are forked from one that has imported torch, and load the plugin as the end of its import does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from perdure.workflows.policy.diagnosis.raised_errors import raised_at
from perdure_launcher.environment import inject
from perdure_training.node_api.progress_file import is_without_process_group, progress_path, read_progress
from tests.support.ports import free_port
from tests.training.warm_torch import run_with_torch

pytestmark = pytest.mark.usefixtures("ranks")

SETUP = """
import torch
def optimizer(): return torch.optim.SGD([parameter], lr=0.1)
parameter = torch.nn.Parameter(torch.zeros(1)); parameter.grad = torch.ones(1)
"""


def environment_of_a_rank(tmp_path: Path, **changes: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(inject(tmp_path)),
        "RANK": "5",
        "PERDURE_RUN_ID": "abc",
        "TORCHELASTIC_RUN_ID": "abc",
        "PERDURE_GENERATION": "2",
        "PERDURE_PROGRESS_DIR": str(tmp_path / "progress"),
        **changes,
    }


def run(script: str, tmp_path: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    [ended] = run_with_torch(["-c", script], environments=[environment_of_a_rank(tmp_path, **changes)], folder=tmp_path)
    return ended


def counted(script: str, tmp_path: Path, **changes: str) -> int | None:
    result = run(SETUP + script, tmp_path, **changes)
    assert result.returncode == 0, result.stderr
    progress = read_progress(progress_path(tmp_path / "progress", 5))
    if progress is None:
        return None
    assert (progress.generation, progress.reported) == (2, False)
    return progress.step


CASES = {
    "one": ("a = optimizer()\nfor _ in range(7): a.step()", 7),
    "GAN": ("a, b = optimizer(), optimizer()\nfor _ in range(7): a.step(); b.step()", 7),
    "per layer": (
        "layers = [optimizer() for _ in range(20)]\nfor _ in range(7): [layer.step() for layer in layers]",
        7,
    ),
    "two to one": ("a, b = optimizer(), optimizer()\nfor _ in range(4): a.step(); a.step(); b.step()", 8),
    "made anew": ("for _ in range(3):\n    a = optimizer()\n    for _ in range(10): a.step()", 28),
    "no step": ("optimizer()", None),
}


def test_steps_are_counted_once_however_many_optimizers_there_are(tmp_path: Path) -> None:
    script = "import os\nfrom perdure_launcher.rank_plugins.step_counter import StepCounter\n" + "".join(
        f"os.environ['RANK'] = '{rank}'\ncounter = StepCounter(); counter.install()\n{steps}\ncounter._stop()\n"
        for rank, (steps, _) in enumerate(CASES.values())
    )
    result = run(SETUP + script, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    found = [read_progress(progress_path(tmp_path / "progress", rank)) for rank in range(len(CASES))]
    assert dict(zip(CASES, (progress and progress.step for progress in found), strict=True)) == {
        name: steps for name, (_, steps) in CASES.items()
    }


@pytest.mark.long("frameworks")
def test_an_optimizer_is_saved_and_loaded_as_ever(tmp_path: Path) -> None:
    script = (
        "import copy, pickle\na = optimizer()\na.step()\nassert set(a.state_dict()) == {'state', 'param_groups'}\n"
        "b = pickle.loads(pickle.dumps(a)); c = copy.deepcopy(a)\nb.step(); c.step(); a.step()"
    )
    assert counted(script, tmp_path) == 2


@pytest.mark.long("frameworks")
def test_hooks_that_have_nothing_more_to_do_leave_the_users_own_alone(tmp_path: Path) -> None:
    script = (
        "from torch.optim.optimizer import register_optimizer_step_post_hook\nfrom perdure_training import report\n"
        "seen = []\nregister_optimizer_step_post_hook(lambda *_: seen.append(1))\na = optimizer()\n"
        "for step in range(20):\n    a.step()\n    if step == 5: report(step=step)\nprint(len(seen))"
    )
    place = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "PERDURE_STORE": "127.0.0.1:29700"}
    result = run(SETUP + script, tmp_path, **place)
    assert (result.returncode, result.stdout) == (0, "20\n"), result.stderr
    assert is_without_process_group(tmp_path / "progress", generation=2)
    progress = read_progress(progress_path(tmp_path / "progress", 5))
    assert progress is not None
    assert (progress.reported, progress.step) == (True, 5)


@pytest.mark.long("frameworks")
def test_processes_that_are_no_ranks_of_ours_are_left_alone(tmp_path: Path) -> None:
    assert counted("optimizer().step()", tmp_path, TORCHELASTIC_RUN_ID="nested") is None


@pytest.mark.parametrize("changes", [{"RANK": "x"}, {"PERDURE_PROGRESS_DIR": "/proc/no"}])
def test_nothing_of_ours_fails_the_users_script(changes: dict[str, str], tmp_path: Path) -> None:
    result = run(SETUP + "optimizer().step(); print('on')", tmp_path, **changes)
    assert (result.returncode, result.stdout) == (0, "on\n")


@pytest.mark.long("launchers")
def test_a_compiled_step_is_not_broken_up_by_us(tmp_path: Path) -> None:
    script = (
        "from torch._dynamo.utils import counters\n"
        "a = optimizer()\n"
        "step = torch.compile(lambda: a.step(), backend='eager')\n"
        "for _ in range(3): step()\n"
        "print(round(parameter.item(), 3), sum(counters['graph_break'].values()))"
    )
    ours, plain = run(SETUP + script, tmp_path), run(SETUP + script, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ours.returncode == plain.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert ours.stdout.startswith("-0.3 ")


def test_an_uncaught_exception_is_kept_where_torch_keeps_recorded_ones(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    result = run("import torch\nraise RuntimeError('lost the peer')", tmp_path, TORCHELASTIC_ERROR_FILE=str(path))
    assert result.returncode == 1
    assert "RuntimeError: lost the peer" in result.stderr, "the user sees the traceback as ever"
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "RuntimeError: lost the peer"
    assert 'File "<string>", line 2' in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0


HOOKS = {
    "ends at once": "import traceback\ndef hook(*error): traceback.print_exception(*error); os._exit(1)\n",
    "calls no other": "def hook(kind, error, trace): print('only', error)\n",
}
PLACES = {
    "before its process group": "sys.excepthook = hook\ndist.init_process_group('gloo')\n",
    "before its steps": "dist.init_process_group('gloo')\nsys.excepthook = hook\noptimizer().step()\n",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_is_kept_whatever_hook_the_script_has_set(hook: str, place: str, tmp_path: Path) -> None:
    path, port = tmp_path / "error.json", str(free_port())
    script = (
        f"{SETUP}\nimport os, sys\nimport torch.distributed as dist\n{HOOKS[hook]}{PLACES[place]}raise ValueError('a')"
    )
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    store = {"PERDURE_STORE": f"127.0.0.1:{port}"}
    result = run(script, tmp_path, TORCHELASTIC_ERROR_FILE=str(path), **world, **store)
    assert result.returncode == 1, result.stderr
    assert json.loads(path.read_text())["message"]["message"] == "ValueError: a"
    if hook == "calls no other":
        assert "only a" in result.stdout


def test_the_exception_of_a_group_of_tasks_is_its_first_one(tmp_path: Path) -> None:
    script = (
        "import torch\ndef fail(): raise ValueError('a')\ntry: fail()\nexcept ValueError as error: first = error\n"
        "raise ExceptionGroup('tasks', [ExceptionGroup('more', [first]), KeyError('b')])"
    )
    path = tmp_path / "error.json"
    run(script, tmp_path, TORCHELASTIC_ERROR_FILE=str(path))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: a"
    assert raised_at(message["message"], message["extraInfo"]["py_callstack"]) == "ValueError at <string>:2"


def test_a_rank_that_is_killed_while_it_keeps_its_exception_leaves_no_half_a_file(tmp_path: Path) -> None:
    script = (
        "import torch, os, signal\n"
        "os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
        "raise RuntimeError('lost the peer')"
    )
    path = tmp_path / "error.json"
    assert run(script, tmp_path, TORCHELASTIC_ERROR_FILE=str(path)).returncode == -signal.SIGKILL
    assert not path.exists()


def test_torchs_own_record_comes_first(tmp_path: Path) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main(): raise RuntimeError('recorded')\nmain()"
    )
    path = tmp_path / "error.json"
    run(script, tmp_path, TORCHELASTIC_ERROR_FILE=str(path))
    assert json.loads(path.read_text())["message"]["message"] == "RuntimeError: recorded"


def test_only_our_packages_are_injected(tmp_path: Path) -> None:
    injected = inject(tmp_path)
    names = sorted(path.name.split("-")[0] for path in injected.iterdir())
    assert names == ["perdure_launcher", "perdure_launcher", "perdure_training"]
