"""The gateway of the benchmark's pods, as a process of this machine: the worker tells pods of it or of Temporal."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from base64 import b64decode
from pathlib import Path

from benchmarks.recovery.processes import TrialFailed
from perdure.activities.nodes.kubernetes.settings import own_namespace
from perdure.base.credentials.keyring import AUTHORITY, SIGNING_KEYS
from perdure.base.files import write_private_file
from perdure.base.kubernetes import KubernetesApi
from perdure.local.control_plane import LocalControlPlane
from scripts.cluster.machine import API_ADDRESS

SECRET = "bench-gateway"
"""The Secret with the keys."""

START_SECONDS = 60.0

_ADDRESS = "PERDURE_KUBERNETES_GATEWAY_ADDRESS"
_KEYRING = "PERDURE_KUBERNETES_GATEWAY_KEYRING"


class GatewaySwitch:
    """Has new pods' agents connect to a gateway, which it starts when it is first needed, or to Temporal."""

    def __init__(self, control_plane: LocalControlPlane, api: KubernetesApi, kubeconfig: Path, folder: Path) -> None:
        self._control_plane = control_plane
        self._api = api
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._process: Process | None = None
        self._on = False

    async def turn(self, *, on: bool) -> None:
        """Restarts the worker if that changes what it tells its pods.

        Raises:
            TrialFailed: if the gateway does not start.
        """
        if on == self._on:
            return
        if on:
            port = await self._start()
            os.environ |= {_ADDRESS: f"{API_ADDRESS}:{port}", _KEYRING: str(await self._keyring())}
        else:
            for name in (_ADDRESS, _KEYRING):
                del os.environ[name]
            await self._stop()
        self._on = on
        await self._control_plane.stop_worker()
        await self._control_plane.ensure_worker()

    async def close(self) -> None:
        """Ends the gateway, and removes its keys."""
        await self._stop()
        for name in (_ADDRESS, _KEYRING):
            os.environ.pop(name, None)
        await self._api.delete(f"{self._secrets}/{SECRET}")

    @property
    def _secrets(self) -> str:
        return f"/api/v1/namespaces/{own_namespace()}/secrets"

    async def _start(self) -> int:
        server = self._control_plane.status().server
        assert server
        with socket.socket() as probe:
            probe.bind((API_ADDRESS, 0))
            port = probe.getsockname()[1]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perdure.cli.main", "gateway", "--listen", f"{API_ADDRESS}:{port}"),
            *("--keyring-secret", SECRET, "--address", server.address),
            env=os.environ | {"KUBECONFIG": str(self._kubeconfig)},
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await _answers(port):
                    if self._process.returncode is not None:
                        raise TrialFailed(f"the gateway ended with {self._process.returncode} while starting")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise TrialFailed(f"the gateway does not answer at {API_ADDRESS}:{port}") from None
        return port

    async def _keyring(self) -> Path:
        """The part of the key ring that workers have."""
        secret = await self._api.get(f"{self._secrets}/{SECRET}")
        assert secret
        folder = self._folder / "gateway"
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in (SIGNING_KEYS, AUTHORITY):
            write_private_file(folder / name, b64decode(secret["data"][name]))
        return folder

    async def _stop(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(API_ADDRESS, port)
    except OSError:
        return False
    writer.close()
    return True
