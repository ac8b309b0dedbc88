"""Takes away locks of builds whose process has ended: torch's `FileBaton`, with which a rank that builds an extension
(`torch.utils.cpp_extension`, DeepSpeed's operators) keeps the others of its machine waiting.

The lock is a file that exists. Until torch 2.15 a rank that was killed during a build left it behind, and every rank
that needed the extension waited for good, in this job and in all later ones. So each rank notes which lock is its own,
in a folder of its user's on this machine, and a rank that meets a lock looks for its owner. Only a lock that is proven
to be an ended process's is removed; where nothing is known of it, the rank prints what it waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.files import write_file

_FOLDER = "build-locks"
_TURN = "turn"
"""The file that a rank locks while it takes a lock away and gets its own: no other one takes that."""
_SILENT = 60.0
"""Seconds that a rank waits before it prints for what: most builds take less."""


def install() -> None:
    """Makes this process note its own locks, and look for the owners of others."""
    from torch.utils.file_baton import FileBaton

    acquire, release = FileBaton.try_acquire, FileBaton.release

    def try_acquire(self: Any) -> bool:
        with _turn():
            acquired = bool(acquire(self)) or (remove_left(self.lock_file_path) and bool(acquire(self)))
            if acquired:
                _note(self.lock_file_path)
        return acquired

    def wait(self: Any) -> None:
        begun, told = time.monotonic(), False
        while os.path.exists(self.lock_file_path):
            with _turn():
                if remove_left(self.lock_file_path):
                    return
            if not told and time.monotonic() - begun >= _SILENT:
                told = True
                _say(describe(self.lock_file_path))
            time.sleep(self.wait_seconds)

    def release_and_forget(self: Any) -> None:
        release(self)
        with contextlib.suppress(OSError):
            os.unlink(_record(self.lock_file_path))

    FileBaton.try_acquire, FileBaton.wait, FileBaton.release = try_acquire, wait, release_and_forget


def remove_left(lock: str) -> bool:
    """Removes a lock whose owner has ended on this machine; returns whether there was such a one."""
    try:
        noted = json.loads(_record(lock).read_text())
        if noted["lock"] != _identity(lock) or not _has_ended(noted):
            return False
        os.unlink(lock)
    except (OSError, ValueError, LookupError, TypeError):
        return False
    _say(f"removed {lock}, the lock of a build whose process {noted['pid']} has ended")
    return True


def describe(lock: str) -> str:
    """Says what a rank waits for that meets a lock of an unknown owner."""
    try:
        since = time.strftime("since %Y-%m-%d %H:%M:%S", time.localtime(os.stat(lock).st_ctime))
    except OSError:
        since = "for a while"
    return (
        f"this rank waits for {lock}, which has existed {since}: a process that builds an extension made it, "
        "or one that was ended before it removed it. If nothing builds there any more, on any machine: remove the file"
    )


def _say(text: str) -> None:
    """Prints a line into the rank's output."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"perdure: {text}\n")
        sys.stderr.flush()


def _note(lock: str) -> None:
    """Writes whose lock it is."""
    with contextlib.suppress(OSError, AttributeError):
        own = processes.read_process(os.getpid())
        noted = {"lock": _identity(lock), "pid": os.getpid(), "start": own.start_ticks if own else 0, **_machine()}
        write_file(_record(lock), json.dumps(noted))


def _has_ended(noted: dict[str, Any]) -> bool:
    here = _machine()
    if noted["host"] != here["host"]:
        return False
    if noted["boot"] != here["boot"]:
        return True
    if noted["namespace"] != here["namespace"]:
        return False
    process = processes.read_process(noted["pid"])
    return process is None or process.zombie or process.start_ticks != noted["start"]


def _machine() -> dict[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "namespace": processes.pid_namespace()}


def _identity(lock: str) -> list[int]:
    """Tells a lock from a later one of the same path: its inode is soon used again."""
    found = os.stat(lock)
    return [found.st_dev, found.st_ino, found.st_ctime_ns]


@contextlib.contextmanager
def _turn() -> Generator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(_folder() / _TURN, "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record(lock: str) -> Path:
    digest = hashlib.sha256(os.path.realpath(lock).encode(errors="surrogateescape")).hexdigest()
    return _folder() / f"{digest[:32]}.json"


def _folder() -> Path:
    """Returns the folder of this user's notes on this machine.

    Raises:
        OSError: if it cannot be made, or is another user's.
    """
    from perdure_training.node_api.layout import short_links
    from perdure_training.node_api.untrusted_files import make_own_folder

    own = short_links()
    make_own_folder(own, remedy="remove it")
    folder = own / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
