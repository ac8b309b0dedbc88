"""Tests of errors that ranks left in their output only."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.agent import ends
from perdure.agent.output_errors import aborts_in, command_error, exceptions_in, explained
from perdure.contract import Failure, Progress, RankExit
from perdure_training.node_api.bodies import ReadyReport
from perdure_training.node_api.layout import LOGS, OUTPUT_LOG
from tests.agent.bench import Bench

SCRIPTS = {
    "a module that is missing": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "a syntax error": ("def f(:\n    pass", "SyntaxError: invalid syntax"),
    "a text of several lines": ("raise ValueError('one\\n  two\\nthree')", "ValueError: one"),
    "no text": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "an exception of a module": ("import json; json.loads('x')", "json.decoder.JSONDecodeError: Expecting value: line"),
    "an error while another is handled": (
        "try:\n    {}['a']\nexcept KeyError:\n    int('b')",
        "ValueError: invalid literal for int() with base 10: 'b'",
    ),
    "a traceback that rich draws": (
        "import rich.traceback; rich.traceback.install(show_locals=True); int('b')",
        "ValueError: invalid literal for int() with base 10: 'b'",
    ),
    "one that the program caught and printed before": (
        "import traceback\ntry:\n    {}['a']\nexcept KeyError:\n    traceback.print_exc()\n1 / 0",
        "ZeroDivisionError: division by zero",
    ),
}
WATCHDOG = """\
step 99
[rank1]:[E1123 10:00:00.123456789 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60081 milliseconds before \
timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: [Rank 1] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=60000) ran for 60081 \
milliseconds before timing out.
Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:635 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f libc10.so)
"""


@pytest.mark.parametrize(("script", "error"), SCRIPTS.values(), ids=SCRIPTS)
def test_the_exception_that_python_printed_last_is_found(script: str, error: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(script)
    output = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False).stderr
    assert exceptions_in(f"step 1\n{output}step 2\n")[None].startswith(error)


def test_what_an_aborted_process_said_is_found() -> None:
    error = aborts_in(WATCHDOG)[None]
    assert error.startswith("c10::DistBackendError: [PG ID 0")
    assert "Watchdog caught collective operation timeout" in error
    assert aborts_in("terminate called after throwing an instance of 'int'\n") == {None: "int"}


def test_each_rank_gets_its_own_error() -> None:
    output = "".join(
        f'[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File "t.py", line 1, in <module>\n'
        f"[rank{rank}]: ValueError: batch {rank}\n"
        for rank in (4, 5)
    )
    exits = tuple(RankExit(local_rank=rank - 4, global_rank=rank, exit_code=1) for rank in (4, 5))
    assert [one.error for one in explained(exits, output)] == ["ValueError: batch 4", "ValueError: batch 5"]


def test_an_error_file_counts_more_and_a_killed_rank_has_no_error() -> None:
    output = 'Traceback (most recent call last):\n  File "t.py", line 1\nValueError: printed\n'
    exits = (
        RankExit(local_rank=0, exit_code=1, error="KeyError: in its file"),
        RankExit(local_rank=1, signal=signal.SIGKILL),
        RankExit(local_rank=2, exit_code=1),
    )
    assert [one.error for one in explained(exits, output)] == ["KeyError: in its file", None, "ValueError: printed"]


def test_a_number_of_thousands_of_digits_is_no_rank() -> None:
    trace = "Traceback (most recent call last):\nValueError: bad sample"
    assert exceptions_in(f"[rank{'1' * 5_000}]: x\n{trace}") == {None: "ValueError: bad sample"}


def test_torchruns_own_exception_explains_no_rank() -> None:
    output = (
        "Traceback (most recent call last):\n"
        '  File "torchrun", line 8, in <module>\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert exceptions_in(output) == {}


def write(bench: Bench, text: str) -> None:
    path = bench.config.run_dir / LOGS / OUTPUT_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_report_has_the_error_and_the_output_of_its_own_world_only(bench: Bench) -> None:
    for generation in (1, 2):
        bench.apply(generation)
        bench.enter(generation)
        frame = f'  File "train.py", line {generation}\n'
        write(bench, f"Traceback (most recent call last):\n{frame}ModuleNotFoundError: in world {generation}\n")
        ended = RankExit(local_rank=0, global_rank=0, pid=generation, exit_code=1)
        bench.node.on_ready(ReadyReport(after_generation=generation, ranks=(ended,)))
    first, second = bench.job.of(Failure)
    assert [one.ranks[0].error for one in (first, second)] == [
        f"ModuleNotFoundError: in world {generation}" for generation in (1, 2)
    ]
    assert "in world 1" in first.log_tail
    assert second.log_tail.count("Traceback") == 1


def test_a_long_output_of_many_ranks_does_not_hide_why_they_were_aborted(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    write(bench, WATCHDOG + "frame #1: at::native::something (0x7f libtorch.so)\n" * 2_000)
    ended = RankExit(local_rank=0, global_rank=0, pid=7, signal=signal.SIGABRT)
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(ended,)))
    [failure] = bench.job.of(Failure)
    assert "Watchdog caught collective operation timeout" in (failure.ranks[0].error or "")
    assert len(failure.log_tail) <= ends.LOG_TAIL_MAX


HANDLED = (
    'ERROR:root:handled\nTraceback (most recent call last):\n  File "train.py", line 9, in each\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
)


@pytest.mark.parametrize(
    ("output", "code", "trained", "error"),
    [
        (HANDLED + "step 20 loss 0.9\nworse than the baseline\n", 3, True, None),
        (HANDLED + "step 20 loss 0.9\nworse than the baseline\n", 1, True, None),
        (HANDLED + "no configuration found\n", 3, False, None),
        (HANDLED, 3, True, "torch.OutOfMemoryError"),
        (HANDLED + "CUDA kernel errors might be reported later\n\nwandb: synced\n", 1, True, "torch.OutOfMemoryError"),
        (HANDLED + "E1128 22:54:26.1 7 torch/distributed/elastic] failed\n", 1, True, "torch.OutOfMemoryError"),
        (HANDLED + "step 20\nTraceback (most recent call last):\nValueError: end\n", 3, True, "ValueError: end"),
        ("".join(f"[rank0]:{line}\n" for line in HANDLED.splitlines()) + "bye\n", 1, True, "torch.OutOfMemoryError"),
        ("Traceback (most recent call last):\nImportError: one\nmore of its text\n", 1, False, "ImportError: one"),
    ],
    ids=[
        *("handled long before an exit code", "handled long before an exit", "handled before the training"),
        *("the last thing printed", "the rest of its text", "a line of torchrun", "a later one"),
        *("one that torch marks as uncaught", "an import that failed"),
    ],
)
def test_a_traceback_counts_where_it_ended_the_process(
    output: str, code: int, trained: bool, error: str | None
) -> None:
    [ended] = explained((RankExit(local_rank=0, global_rank=0, exit_code=code),), output, trained=trained)
    command = command_error(output, code, trained=trained) if "[rank" not in output else ended.error
    for found in (ended.error, command):
        assert (found or "").startswith(error or "")
        assert (found is None) is (error is None)


def test_a_report_of_ranks_that_trained_on_names_no_error_that_they_handled(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    write(bench, HANDLED + "step 20 loss 0.9\n")
    bench.progress = Progress(step=20, generation=1, generation_steps=20)
    ended = RankExit(local_rank=0, global_rank=0, pid=7, exit_code=1)
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(ended,)))
    [failure] = bench.job.of(Failure)
    assert failure.ranks[0].error is None
    assert "step 20" in failure.log_tail
