"""A real Temporal dev server that tests can kill and restart, to show the effect of outages."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from perdure.local.control_plane import SERVER_OPTIONS
from perdure.local.temporal_binary import find
from tests.support.ports import free_port
from tests.support.waiting import eventually

SEARCH_ATTRIBUTES = {
    "JobPhase": "Keyword",
    "JobBackend": "Keyword",
    "JobNamespace": "Keyword",
    "JobOwner": "Keyword",
    "WorldSize": "Int",
    "JobRestarts": "Int",
}


def temporal_binary() -> Path:
    """The CLI that Perdure would use, which `make setup` has provided."""
    found = find()
    if found is None:
        raise FileNotFoundError("Temporal's CLI is missing: run `make setup`")
    return found


class DevServer:
    """`temporal server start-dev` on a port of its own; the database outlives kills."""

    def __init__(self, database: Path, *, options: tuple[str, ...] = (), namespaces: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.namespace = "default"
        self.database = database
        self._options = (*options, *(word for name in namespaces for word in ("--namespace", name)))
        self._log = database.with_suffix(".log")
        self._pid: int | None = None

    @property
    def address(self) -> str:
        """The address of the frontend."""
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Temporal's clients find this server."""
        return {"TEMPORAL_ADDRESS": self.address, "TEMPORAL_NAMESPACE": self.namespace}

    async def start(self, *, within: float = 60.0) -> None:
        """Starts it and returns when it serves the namespace."""
        self.launch()

        async def serves() -> bool:
            if self._pid is not None and os.waitpid(self._pid, os.WNOHANG) != (0, 0):
                self._pid = None
                # Another server may answer in its place.
                raise RuntimeError(f"the dev server has ended: {self._log.read_text()}")
            try:
                await (await self.client()).count_workflows()
            except Exception:
                return False
            return True

        try:
            await eventually(serves, within=within, what=lambda: f"the dev server serves: {self._log.read_text()}")
        except AssertionError:
            self.kill()
            raise

    def launch(self) -> None:
        """Starts it without waiting."""
        assert self._pid is None, "it runs already"
        command = [
            str(temporal_binary()),
            *("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(self.port)),
            *("--db-filename", str(self.database)),
            *(word for option in SERVER_OPTIONS for word in option),
            *(part for name, kind in SEARCH_ATTRIBUTES.items() for part in ("--search-attribute", f"{name}={kind}")),
            *self._options,
        ]
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._pid = os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
                setsid=True,
            )
        finally:
            os.close(log)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None

    async def restart(self) -> None:
        """Kills it where it runs and starts it on the same database and port."""
        self.kill()
        await self.start()

    async def client(self) -> Client:
        """A new client with the data converter that everything here uses."""
        return await Client.connect(self.address, namespace=self.namespace, data_converter=pydantic_data_converter)


@asynccontextmanager
async def dev_server(database: Path | None = None, *, options: tuple[str, ...] = ()) -> AsyncIterator[DevServer]:
    """A running server, for a test that kills it or needs options of its own."""
    with _folder() as folder:
        server = DevServer(database or folder / "temporal.db", options=options)
        try:
            await server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="perdure-temporal-", ignore_cleanup_errors=True) as name:
        yield Path(name)
