"""Tests of what counts as left behind by ranks of earlier generations."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from perdure_launcher.old_ranks import of_generations_up_to
from perdure_launcher.rank_plugins.stack_file import StackFile
from perdure_launcher.system.processes import read_process
from perdure_training.node_api.layout import STACKS


@pytest.mark.parametrize(("began", "found"), [(0, True), (-1, False), (1, False)])
def test_a_process_whose_pid_a_former_rank_had_is_not_that_rank(tmp_path: Path, began: int, found: bool) -> None:
    (tmp_path / STACKS).mkdir()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        try:
            own = read_process(child.pid)
            assert own is not None
            (tmp_path / STACKS / StackFile(1, 0, child.pid, own.start_ticks + began).name).touch()
            left = of_generations_up_to(1, run_directory=tmp_path, below=os.getpid())
            assert [process.pid for process in left] == [child.pid] * found
        finally:
            child.kill()
