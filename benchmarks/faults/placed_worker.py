"""A worker that starts each node of a local job on a machine of its own: see `machines`.

Everything else is the product's own: the same workflows, activities and local nodes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from perdure.activities.nodes.configurations import agent_configuration
from perdure.activities.nodes.local import launch
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.local.folders import FolderOwner, NodeFolder
from perdure.base.services import leave, log_to
from perdure.client.connection import connect, find_endpoint, payload_encryption
from perdure.contract import NodeRequest
from perdure.worker import running_worker

from .machines import Placement, placement

ENTER = Path(__file__).with_name("programs") / "enter.py"
_CHUNK = 65_536


def place_nodes(known: Placement) -> None:
    """Has the local backend start its nodes on these machines."""
    configure = launch.write_configurations

    def write_configurations(folder: NodeFolder, request: NodeRequest, *_: Any, **__: Any) -> FolderOwner:
        machine = known.machines[request.node.rank]
        agent = agent_configuration(request, address=machine.address, host=machine.network, run_dir=folder.run_dir)
        return configure(folder, request, agent)

    launch.write_configurations = write_configurations
    launch.program = lambda module: [sys.executable, "-P", str(ENTER), module]


async def forward(server: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connects a machine to the server, which listens on loopback only."""
    host, _, port = server.rpartition(":")
    with suppress(OSError):
        there, here = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_copy(reader, here), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve() -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    endpoint, known = find_endpoint(), placement()
    place_nodes(known)
    entrance = await asyncio.start_server(partial(forward, endpoint.address), known.gateway)
    port = entrance.sockets[0].getsockname()[1]
    connection = {"TEMPORAL_ADDRESS": f"{known.gateway}:{port}", "TEMPORAL_CONFIG_FILE": os.devnull}
    client = await connect(endpoint, patient=True)
    backend = LocalBackend(connection={**connection, **payload_encryption(endpoint).environment})
    async with running_worker(client, backends=[backend]):
        await stopped.wait()


if __name__ == "__main__":
    log_to(None)
    asyncio.run(serve())
    leave(0)
