"""Script that starts a detached process exactly once. It runs in an interpreter of its own, where forking is safe.

The process writes its own identity before it executes the program. So another process that finds the identity file
knows which process to look for, and a second starter, after a crash or at the same time, starts nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def started_ticks(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since boot; None if it does not run. Distinguishes processes
    that had the same PID."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name may contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # A process in state Z or X has ended.
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def boot_id() -> str:
    """Returns the boot ID. It changes with every boot, after which PIDs and ticks start over."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def pid_namespace() -> str:
    """Returns the namespace of PIDs of this process; empty if that cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _claim(identity_file: str) -> bool:
    """Writes this process's identity; returns False if another process has written its own before."""
    draft = f"{identity_file}.{os.getpid()}"
    identity = {
        "pid": os.getpid(),
        "started": started_ticks(os.getpid()),
        "boot": boot_id(),
        "namespace": pid_namespace(),
        "time": time.time(),
    }
    with open(draft, "w", encoding="ascii") as file:
        json.dump(identity, file)
    try:
        os.link(draft, identity_file)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    return True


def _become(identity_file: str, output: str, directory: str, command: list[str]) -> None:
    os.setsid()
    # A worker in the background ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(directory)
    if _claim(identity_file):
        os.execvpe(command[0], command, os.environ)


def main() -> int:
    """Runs `spawn.py IDENTITY_FILE OUTPUT DIRECTORY COMMAND…`. Returns when the program runs, or prints why it does
    not."""
    identity_file, output, directory, *command = sys.argv[1:]
    # The pipe closes when the program starts, or when a child with nothing to start ends.
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        try:
            _become(identity_file, output, directory, command)
        except OSError as error:
            os.write(writing, str(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        problem = pipe.read().decode(errors="replace")
    if problem:
        sys.stderr.write(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
