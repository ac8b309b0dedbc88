"""Ends every process of a session of tests once the session's first process has ended, and removes its folder.

A program of its own, without imports of the rest: it has to outlive a session that is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PAUSE = 0.1
_ROUNDS = 100


def main() -> None:
    """Waits for the end of the input, then kills."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    # A process that is being started may appear after a round.
    for _ in range(_ROUNDS):
        if not [pid for pid in _marked(folder) if _kill(pid)]:
            break
        time.sleep(_PAUSE)
    shutil.rmtree(folder, ignore_errors=True)


def _marked(folder: str) -> list[int]:
    """Returns the processes whose environment names the folder."""
    mark = os.fsencode(folder)
    if not Path("/proc/self/environ").exists():
        answer = subprocess.run(["ps", "-axEwwo", "pid=,command="], capture_output=True, check=False).stdout
        found = [int(line.split(None, 1)[0]) for line in answer.splitlines() if mark in line]
    else:
        found = [
            int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and mark in _environment(path)
        ]
    return [pid for pid in found if pid not in (os.getpid(), os.getppid())]


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
