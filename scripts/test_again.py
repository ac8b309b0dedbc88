"""Runs the tests of `make test` again and again, each time in another order, and names each test that ever failed.

One green run shows little: a test that depends on luck fails once in twenty. Busy loops may run next to it. Each run
prints its duration, its processor time and its peak memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil

_MIB = 1024 * 1024
_BUSY = "while True: pass"
_RANDOM_ORDER = ("-p", "pytest_randomly", "--randomly-dont-reset-seed")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the suite."""

    exit_code: int
    seconds: float
    processor_seconds: float
    """Of the whole machine, without the busy loops."""
    peak_memory: int
    """Bytes that the machine's available memory fell by."""
    passed: int
    failed: tuple[str, ...]


def main() -> int:
    """Runs the suite; returns 1 if any test of any run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, metavar="N", help="how many runs (default 10)")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy loops beside the runs (default none)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="pytest's arguments, after --")
    options = parser.parse_args()
    arguments = [word for word in options.arguments if word != "--"]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="perdure-again-") as name, _busy_loops(options.load) as loops:
        print("run   exit   seconds   processor s   peak MiB   passed   failed", flush=True)
        for number in range(1, options.times + 1):
            run = _run(arguments, Path(name) / f"{number}.xml", loops)
            runs.append(run)
            print(
                f"{number:3}   {run.exit_code:4}   {run.seconds:7.0f}   {run.processor_seconds:11.0f}   "
                f"{run.peak_memory / _MIB:8.0f}   {run.passed:6}   {len(run.failed):6}",
                flush=True,
            )
            for test in run.failed:
                print(f"      {test}", flush=True)
    failures = Counter(test for run in runs for test in run.failed)
    for test, count in failures.most_common():
        print(f"failed {count} of {len(runs)}: {test}")
    green = sum(run.exit_code == 0 for run in runs)
    print(f"{green} of {len(runs)} runs were green")
    return 0 if green == len(runs) else 1


def _run(arguments: list[str], report: Path, loops: list[psutil.Process]) -> Run:
    before, started = _processor_seconds(loops), time.monotonic()
    with _peak_memory() as peak:
        command = [sys.executable, "-m", "pytest", "-q", *_RANDOM_ORDER, f"--junit-xml={report}", *arguments]
        log = report.with_suffix(".log")
        with log.open("w") as output:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - started
    if not report.exists():
        print(log.read_text()[-3000:], flush=True)
        return Run(exit_code=code or 1, seconds=seconds, processor_seconds=0, peak_memory=peak[0], passed=0, failed=())
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = tuple(sorted({_name(case) for case in cases if _is(case, "failure", "error")}))
    if failed:
        print(log.read_text()[-20_000:], file=sys.stderr, flush=True)
    return Run(
        exit_code=code,
        seconds=seconds,
        processor_seconds=_processor_seconds(loops) - before,
        peak_memory=peak[0],
        passed=sum(not _is(case, "failure", "error", "skipped") for case in cases),
        failed=failed,
    )


def _is(case: ElementTree.Element, *outcomes: str) -> bool:
    return any(case.find(outcome) is not None for outcome in outcomes)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


@contextmanager
def _busy_loops(count: int) -> Iterator[list[psutil.Process]]:
    with ExitStack() as stack:
        loops: list[psutil.Process] = []
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _BUSY])
            stack.callback(process.wait)
            stack.callback(process.kill)
            loops.append(psutil.Process(process.pid))
        yield loops


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Yields a list whose only item becomes the peak of what is in use beyond that at the start."""
    at_start, peak, ended = _available(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], at_start - _available())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _available() -> int:
    return psutil.virtual_memory().available


def _processor_seconds(loops: list[psutil.Process]) -> float:
    """Returns what the machine has used since its start, without the loops."""
    times = psutil.cpu_times()
    own = sum(used.user + used.system for loop in loops if (used := loop.cpu_times()))
    return times.user + times.system + getattr(times, "nice", 0.0) - own


if __name__ == "__main__":
    raise SystemExit(main())
