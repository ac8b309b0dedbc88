"""The state folder: the files of the embedded default, by which every later command finds it again.

    version            format of this folder; other formats are refused rather than guessed at
    lock               held while the server or the worker is started or stopped
    temporal/          server.json (process and ports), temporal.db, server.log
    payload-keys.json  the keys that encrypt what the database holds
    worker/            worker.json (process and code version), worker.log and its rotations
    machine.json       the machine whose worker has local nodes here
    nodes/             the run directories of local nodes
    history.db         what happened to jobs (docs/history.md)

Files are replaced atomically: after a full disk or a kill they hold the old content, never half of the new one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from perdure.base.errors import StateFolderError
from perdure.base.files import exclusive_lock, write_private_file

FORMAT = 1
"""The folder's format. A release that reads an older one lists it here; none does yet."""

LEAST_FREE_BYTES = 64 * 1024 * 1024
"""The free space below which the server's database could not grow through one job."""


STATE_VARIABLE = "PERDURE_STATE"


def default_path() -> Path:
    """The path in `PERDURE_STATE`, else the user's own folder.

    Raises:
        StateFolderError: if neither is known.
    """
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named).expanduser().absolute()
    return users_own_path()


def users_own_path() -> Path:
    """`perdure` in XDG's state folder, on every system.

    Raises:
        StateFolderError: if the user has no home folder.
    """
    # platformdirs would choose a folder below ~/Library on macOS, where existing state is not.
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "perdure"
    except RuntimeError:
        raise StateFolderError(
            f"no home folder is known: HOME is not set, and no user has the ID {os.getuid()} here",
            remedy=f"Set HOME, or {STATE_VARIABLE} to a folder that this user can write to.",
        ) from None


_OF_EARLIER_WORKERS = ("nodes", "history.db", "history.db-wal", "history.db-shm", "history.db-journal")


class StateFolder:
    """One state folder. Creating the object touches nothing; `open` creates and checks the folder."""

    def __init__(self, path: Path | None = None) -> None:
        self.path: Path = (path or default_path()).absolute()
        self.temporal: Path = self.path / "temporal"
        self.worker: Path = self.path / "worker"
        self.nodes: Path = self.path / "nodes"
        self.payload_keys: Path = self.path / "payload-keys.json"
        self.server_record: Path = self.temporal / "server.json"
        self.worker_record: Path = self.worker / "worker.json"

    def open(self) -> StateFolder:
        """Creates the folder if it is missing.

        Raises:
            StateFolderError: if it belongs to another release or its disk is full, or it cannot be written.
        """
        with self.map_errors():
            # Records and node configurations hold tokens.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._one_at_a_time():
                fresh = self._is_fresh
                if not fresh:
                    self._check_version()
                for folder in (self.path, self.temporal, self.worker, self.nodes):
                    folder.mkdir(mode=0o700, exist_ok=True)
                    if (found := folder.stat()).st_mode & 0o077 and found.st_uid == os.geteuid():
                        # An earlier release or a user has made it.
                        folder.chmod(0o700)
                self.check_space()
                if fresh:
                    self.write(self.path / "version", f"{FORMAT}\n")
        return self

    @contextmanager
    def _one_at_a_time(self) -> Generator[None]:
        """Keeps other processes from reading a folder that is being created, with a lock on the folder itself."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def check_version(self) -> None:
        """Refuses a folder that this release cannot read.

        Raises:
            StateFolderError: if the folder exists and is of another version, or is not a state folder.
        """
        if self.path.is_dir():
            with self._one_at_a_time():
                self._check_version()

    def _check_version(self) -> None:
        other = "Or keep it and use another folder: set PERDURE_STATE to a new path."
        try:
            text = (self.path / "version").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            if self._is_fresh:
                return
            raise StateFolderError(
                f"{self.path} is not empty and is not a state folder of Perdure: it has no `version` file",
                remedy="Set PERDURE_STATE to an empty or new folder.",
            ) from None
        if not text.isdecimal():
            raise StateFolderError(
                f"{self.path / 'version'} reads {text!r}; expected the folder's format, {FORMAT}",
                remedy=f"Move the folder away (mv {self.path} {self.path}.broken). {other}",
            )
        if int(text) < FORMAT:
            raise StateFolderError(
                f"the state folder {self.path} is of the older format {text}; this release reads format {FORMAT}",
                remedy="Let its jobs end under the release that made it, stop that release's worker and server, then "
                f"move it away (mv {self.path} {self.path}.format{text}). {other}",
            )
        if int(text) > FORMAT:
            raise StateFolderError(
                f"the state folder {self.path} is of format {text}, made by a newer release; this one reads {FORMAT}",
                remedy=f"Upgrade perdure (pip install --upgrade perdure). {other}",
            )

    @property
    def _is_fresh(self) -> bool:
        """Whether nothing is in it but what a worker of an earlier release has put there without `open`."""
        return all(entry.name in _OF_EARLIER_WORKERS for entry in self.path.iterdir())

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def check_space(self) -> None:
        """Refuses a disk that is almost full.

        Raises:
            StateFolderError: if less than `LEAST_FREE_BYTES` are free.
        """
        free = self.free_bytes()
        if free < LEAST_FREE_BYTES:
            raise StateFolderError(
                f"the disk of the state folder {self.path} is full: {free // 2**20} MiB free, "
                f"{LEAST_FREE_BYTES // 2**20} MiB needed",
                remedy="Free some space there, or set PERDURE_STATE to a folder on another disk.",
            )

    def write(self, path: Path, text: str) -> None:
        """Replaces a file's content atomically."""
        with self.map_errors():
            write_private_file(path, text.encode(), durable=True)

    @asynccontextmanager
    async def lock(self, report: Callable[[str], None] = lambda _: None) -> AsyncGenerator[None]:
        """Lets one process at a time start or stop the processes of this folder.

        Args:
            report: Is called with lines about a wait for another process.
        """
        async with AsyncExitStack() as stack:
            with self.map_errors():
                work = "starts or stops what runs from this state folder"
                await stack.enter_async_context(exclusive_lock(self.path / "lock", work, report=report))
            yield

    @contextmanager
    def map_errors(self) -> Generator[None]:
        """Maps the operating system's errors to errors that name the folder and the remedy."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StateFolderError(
                    f"the disk of the state folder {self.path} is full ({error.strerror})",
                    remedy="Free some space there, or set PERDURE_STATE to a folder on another disk.",
                ) from error
            raise StateFolderError(
                f"cannot use the state folder {self.path}: {error.strerror or error}"
                + (f" ({error.filename})" if error.filename else ""),
                remedy="Set PERDURE_STATE to a folder that you may write.",
            ) from error
