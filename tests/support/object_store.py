"""A real S3 server on this machine, which a test can kill and start again: versitygw over a folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.temporal_server import free_port
from tests.support.waiting import wait_for

_KEY, _SECRET = "perdure", "perdure-secret"


class ObjectStore:
    """The server, and the folder in which its objects are files."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.folder = folder
        self._program = program
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What its clients need."""
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def uploads(self) -> list[Path]:
        """The parts of uploads that are not complete, which are files of their own."""
        return [path for path in self.folder.glob("*/.sgwtmp/**/*") if path.is_file()]

    def start(self) -> None:
        """Starts the server; returns when it answers."""
        attributes = self.folder.with_name(f"attributes-of-{self.folder.name}")
        attributes.mkdir(exist_ok=True)
        process = self._process = subprocess.Popen(
            [
                *(self._program, "--port", f"127.0.0.1:{self._port}", "--region", "us-east-1"),
                # Not every file system has extended attributes, where versitygw keeps them by itself.
                *("posix", "--sidecar", attributes, self.folder),
            ],
            env=os.environ | {"ROOT_ACCESS_KEY": _KEY, "ROOT_SECRET_KEY": _SECRET},
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
        )
        wait_for(lambda: process.poll() is not None or self._listens())
        assert process.poll() is None, "the object store has ended"

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Stops the server without a word: it has its connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the server with whatever it is doing."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def restarted_when(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Starts the server from another thread as soon as a condition holds."""

        def restart() -> None:
            wait_for(condition, within=300)
            self.start()

        thread = threading.Thread(target=restart)
        thread.start()
        yield
        thread.join()

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def object_store(program: Path, folder: Path, *, bucket: str) -> Iterator[ObjectStore]:
    """Runs a server over a new folder that has one bucket."""
    (folder / bucket).mkdir(parents=True)
    store = ObjectStore(program, folder)
    store.start()
    try:
        yield store
    finally:
        store.kill()
