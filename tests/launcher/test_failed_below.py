"""Tests of what torch's own exceptions say about the processes that its launchers have started."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from perdure_launcher.rank_exits import with_error
from perdure_launcher.rank_plugins.error_file import error_content, is_kept_already
from perdure_launcher.rank_plugins.failed_below import failed_below
from perdure_training.node_api.bodies import RankExit

KILLED, TERMINATED, ABORTED = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


def of_torchrun(*codes: int) -> ChildFailedError:
    return ChildFailedError(
        "train.py", {rank: ProcessFailure(rank, 70 + rank, code, "") for rank, code in enumerate(codes)}
    )


def wrapped() -> Exception:
    try:
        try:
            raise ProcessExitedException("process 1 terminated", 1, 71, KILLED, "SIGKILL")
        except ProcessExitedException as error:
            raise RuntimeError("An issue was found when launching the training.") from error
    except RuntimeError as error:
        return error


RAISED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 9, in main
ValueError: bad batch
"""


@pytest.mark.parametrize(
    ("error", "exit_code", "number", "text"),
    [
        (of_torchrun(TERMINATED, KILLED), None, 9, "rank 1 of the command's own torchrun, process 71"),
        (of_torchrun(1, KILLED), None, 9, "rank 1 of the command's own torchrun, process 71"),
        (of_torchrun(ABORTED, TERMINATED), None, 6, "rank 0 of the command's own torchrun, process 70"),
        (of_torchrun(TERMINATED, 3), 3, None, ""),
        (ProcessExitedException("process 1 terminated", 1, 71, KILLED, "SIGKILL"), None, 9, "process 71 of mp.spawn"),
        (ProcessExitedException("process 1 terminated", 1, 71, 3), 3, None, ""),
        (ProcessRaisedException(RAISED, 1, 71), 1, None, "ValueError: bad batch"),
        (wrapped(), None, 9, "process 71 of mp.spawn"),
        (subprocess.CalledProcessError(KILLED, "train"), None, 9, "a command that the rank had started"),
        (
            subprocess.CalledProcessError(2, "train"),
            1,
            None,
            "CalledProcessError: Command 'train' returned non-zero exit status 2.",
        ),
        (ValueError("own"), 1, None, "ValueError: own"),
    ],
    ids=[
        *("killed beside ended", "killed beside its victim", "aborted", "an exit code"),
        *("killed below spawn", "an exit code below spawn", "an exception below spawn", "the cause of another"),
        *("a command that was killed", "a command that failed", "no launcher's"),
    ],
)
def test_how_the_first_process_failed_is_how_the_rank_failed(
    error: BaseException, exit_code: int | None, number: int | None, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps(error_content(error, "Traceback of the launcher")))
    ended = with_error(RankExit(local_rank=0, exit_code=1), path)
    assert (ended.exit_code, ended.signal, ended.error) == (exit_code, number, text)
    if text == "ValueError: bad batch":
        assert 'File "train.py", line 9' in (ended.traceback or "")


def test_what_a_function_raised_that_torchs_launcher_runs_is_why_the_rank_failed(tmp_path: Path) -> None:
    told = {"message": "ValueError: bad batch", "extraInfo": {"py_callstack": "in main", "timestamp": "1"}}
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": told}))
    below = failed_below(ChildFailedError("main", {0: ProcessFailure(0, 70, 1, str(path))}))
    assert below is not None
    assert (below.status, below.error, below.traceback) == (1, "ValueError: bad batch", "in main")


def test_a_killed_process_is_the_cause_although_others_say_that_they_lost_it(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "RuntimeError: Connection closed by peer", "extraInfo": {}}}))
    assert is_kept_already(path, of_torchrun(1, 1))
    assert not is_kept_already(path, of_torchrun(1, KILLED))


@pytest.mark.parametrize("status", [True, "9", -9_000, 9_000, 0, None])
def test_a_status_that_no_process_has_is_not_believed(status: Any, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "x", "errorCode": status}}))
    ended = with_error(RankExit(local_rank=0, exit_code=1), path)
    assert (ended.exit_code, ended.signal) == (1, None)


def test_a_cause_that_leads_back_to_itself_ends() -> None:
    error = ValueError()
    error.__cause__ = error
    assert failed_below(error) is None
