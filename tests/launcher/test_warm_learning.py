"""Tests of importing a rank's modules in advance for the next one, unless that could make a difference."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure_launcher.warm_start.imports import Imports
from perdure_launcher.warm_start.plan import Plan
from tests.launcher.nodes import SCRIPTS
from tests.launcher.warmth import Warmth, interpreter_with, warmth

pytestmark = pytest.mark.timeout(300)

with_real_torch = pytest.mark.long("warm-starts")

PACKAGES = {
    "plain": "import plain_part\n",
    "plain_part": "",
    "prints": "print('imported')\n",
    "starts_thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "starts_process": "import subprocess\nkept = subprocess.Popen(['sleep', '100'], stdout=-3, stderr=-3)\n",
    "opens_file": "kept = open('/dev/null')\n",
    "has_generator": "import random\ngenerator = random.Random()\ndrawn = generator.random()\n",
    "has_numpys": "import numpy\ngenerator = numpy.random.default_rng()\ndrawn = float(generator.random())\n",
    "has_torchs": "import torch\ngenerator = torch.Generator()\n",
    "has_lock": "import multiprocessing\nlock = multiprocessing.Lock()\n",
    "has_systems": "import random, tempfile\nkept = random.SystemRandom(), next(tempfile._get_candidate_names())\n",
    "reads_rank": "import os\nrank = os.environ.get('RANK')\n",
    "reads_all": "import os\nrank = dict(os.environ).get('RANK')\n",
    "imports_reader": "import reads_rank\n",
    "reads_devices": "import os\ndevices = os.environ.get('CUDA_VISIBLE_DEVICES')\n",
    "reads_setting": "import os\nsetting = os.environ.get('SETTING')\n",
    "sets_setting": "import os\nos.environ.setdefault('OTHER_SETTING', 'its own')\n",
    "asks_main": "import sys\nfile = getattr(sys.modules['__main__'], '__file__', None)\n",
    "asks_path": "import sys\nfirst = sys.path[0]\n",
    "imports_users": "import users_own\n",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_with(PACKAGES, tmp_path_factory.mktemp("environment"))


def looked(script: Warmth) -> dict[str, Any]:
    ended = script.run()
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def ahead(script: Warmth, *names: str) -> set[str]:
    """Returns which of these packages the next fork finds imported. If a standby is ready by then, the rank is no fork:
    it has more of them, and `plain` in any case."""
    found = set(names) & set(looked(script)["ahead"])
    return found & {"plain"} if script.last.standby else found


def test_what_a_rank_imports_is_there_when_the_next_one_starts(python: str) -> None:
    with warmth("learns.py", "plain", "asks_main:file", "asks_path:first", executable=python) as script:
        first = looked(script)
        assert script.last.warm, script.log()
        learned = script.learn()
        assert (learned["left_out"], learned["failure"]) == ({}, "")
        second = looked(script)
        assert script.last.warm, script.log()
        news = set(second["ahead"]) - set(first["ahead"])
        assert {"plain", "plain_part", "asks_main", "asks_path"} <= news
        expected = {"asks_main:file": str(SCRIPTS / "learns.py"), "asks_path:first": str(SCRIPTS)}
        assert first["values"] == expected
        assert second["values"] == expected


def test_a_package_that_is_upgraded_meanwhile_is_the_one_that_ranks_import(tmp_path: Path) -> None:
    """As with `pip install`, and then `perdure restart`."""
    environment = tmp_path / "environment"
    python = interpreter_with({"upgraded": "version = 'one'\n"}, environment)
    [module] = environment.glob("lib/python*/site-packages/upgraded.py")
    with warmth("learns.py", "upgraded:version", executable=python) as script:
        assert looked(script)["values"] == {"upgraded:version": "one"}
        script.learn()
        assert not script.supervisor.start_ranks()
        assert looked(script)["values"] == {"upgraded:version": "one"}
        assert script.last.warm, script.log()
        upgrade = tmp_path / "upgrade.py"
        upgrade.write_text("version = 'two and more'\n")
        upgrade.rename(module)
        assert script.supervisor.start_ranks()
        assert looked(script)["values"] == {"upgraded:version": "two and more"}
        assert not script.last.warm
        script.supervisor.follow_ranks(lambda: True)
        assert script.supervisor.wait_until_warm(timedelta(seconds=60))
        assert looked(script)["values"] == {"upgraded:version": "two and more"}
        assert script.last.warm, script.log()


def test_what_an_import_prints_and_sets_is_repeated_in_each_rank(python: str) -> None:
    with warmth("learns.py", "prints", "sets_setting", executable=python) as script:
        for _ in range(2):
            assert script.run().stdout.count("imported") == 1
            script.learn()


LEFT_OUT = [
    {
        "starts_thread": "its import started 1 threads",
        "starts_process": "its import left a process running",
        "opens_file": "its import left 1 files open",
        "has_lock": "its import created a lock or other memory that forks share",
    },
    {
        "reads_all": "reads_all reads the whole environment when it is imported",
        "imports_users": "it imports users_own from the script's own folder",
        "reads_setting": "it reads SETTING, which the script sets",
    },
    pytest.param({"has_torchs": "its import made generators (Generator)"}, marks=with_real_torch),
]


@pytest.mark.parametrize("reasons", LEFT_OUT, ids=["of processes", "of places and settings", "of torch"])
def test_what_a_fork_could_not_carry_over_is_left_out(python: str, reasons: dict[str, str]) -> None:
    real_torch = "has_torchs" in reasons
    with warmth("learns.py", "SETTING=yes", *reasons, "plain", executable=python, real_torch=real_torch) as script:
        looked(script)
        assert script.learn()["left_out"] == reasons
        assert ahead(script, "plain", *reasons) == {"plain"}
        assert script.last.warm, script.log()


def test_forks_draw_different_numbers_from_generators_of_packages(python: str) -> None:
    names = ("has_generator:drawn", "has_numpys:drawn")
    with warmth("learns.py", *names, "has_systems", executable=python) as script:
        looked(script)
        assert script.learn()["left_out"] == {
            "has_generator": "its import made generators (Random)",
            "has_numpys": "its import made generators (PCG64)",
        }
        one, other = looked(script), looked(script)
        assert script.last.warm, script.log()
        assert "has_systems" in one["ahead"]
        for name in names:
            assert one["values"][name] != other["values"][name]


def test_what_imports_something_left_out_is_left_out_too(python: str) -> None:
    with warmth("learns.py", "imports_reader", "plain", executable=python) as script:
        looked(script)
        reason = "reads_rank reads RANK when it is imported"
        assert script.learn()["left_out"] == {"reads_rank": reason, "imports_reader": reason}
        assert ahead(script, "plain", "imports_reader", "reads_rank") == {"plain"}


def test_what_reads_the_visible_devices_is_imported_for_ranks_that_see_the_same(python: str) -> None:
    with warmth("learns.py", "reads_devices", executable=python, CUDA_VISIBLE_DEVICES="") as script:
        looked(script)
        assert script.learn()["left_out"] == {}
        assert "reads_devices" in looked(script)["ahead"]
        script.run(environment={"CUDA_VISIBLE_DEVICES": "none"})
        assert script.last.reason == "its environment differs in CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("setting", "contradicts"),
    [
        ("OMP_NUM_THREADS", True),
        ("TORCH_DISTRIBUTED_DEBUG", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("TORCH_NCCL_BLOCKING_WAIT", False),
        ("SETTING", False),
    ],
)
def test_what_torch_and_its_libraries_read_is_known_by_its_name(setting: str, *, contradicts: bool) -> None:
    imports = Imports(Plan.of_ranks(["-u", "learns.py"], {}))
    assert bool(imports.find_contradiction([setting])) == contradicts


def test_a_script_that_sets_what_torch_reads_starts_cold_from_its_first_start_on(python: str) -> None:
    setting = "PYTORCH_CUDA_ALLOC_CONF"
    reason = f"the script sets {setting}, which is read while modules are imported"
    with warmth("learns.py", f"{setting}=2", executable=python) as script:
        assert "torch" not in looked(script)["ahead"]
        assert (script.last.warm, script.last.reason) == (False, reason)
        assert script.learn()["failure"] == reason
        assert "torch" not in looked(script)["ahead"]
        assert (script.last.warm, script.last.reason) == (False, reason)


def test_a_rank_that_starts_again_is_the_same_process_with_its_own_variables_folder_and_output(python: str) -> None:
    with warmth("starts_again.py", executable=python) as script:
        ended = script.run(environment={"RANK": "5"})
    assert ended.returncode == 3, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == second
    assert first.endswith(f" RANK 5 None {SCRIPTS}")


def test_what_a_child_of_a_rank_sets_does_not_start_the_rank_again(python: str) -> None:
    with warmth("starts_again.py", "in-a-child", executable=python) as script:
        ended = script.run()
        assert (ended.returncode, script.last.warm) == (3, True), ended.stderr


@with_real_torch
@pytest.mark.usefixtures("ranks")
def test_a_script_that_says_so_in_its_text_starts_cold_at_once() -> None:
    with warmth("sets_threads.py", OMP_NUM_THREADS="2", real_torch=True) as script:
        assert script.run().stdout == "1\n"
        assert script.last.reason == "the script sets OMP_NUM_THREADS, which is read when torch is imported"
