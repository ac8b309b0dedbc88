"""Programs before a server: TLS, which Temporal's dev server cannot require, and a Service, which the tests' cluster
cannot route to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from scripts.cluster.certificates import Certificates

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def tls_front(port: int, *, address: str, name: str, certificates: Certificates) -> AsyncIterator[int]:
    """Passes HTTP/2 on to a local port, for clients that show a certificate of the authority.

    Args:
        port: of the server, on this machine.
        address: where clients connect.
        name: that the server's certificate is for.
        certificates: signed the clients' ones, and sign the server's.

    Yields:
        The port that clients connect to.
    """
    certificate, key = certificates.issue(name, user=name, hosts=[f"DNS:{name}"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    async with _front(lambda: asyncio.open_connection("127.0.0.1", port), address=address, context=context) as front:
        yield front


@contextlib.asynccontextmanager
async def service_front(
    list_pods: Callable[[], Awaitable[list[dict[str, Any]]]], port: int, *, address: str
) -> AsyncIterator[int]:
    """Passes connections on to pods that are ready, in turn, as a Service does.

    Args:
        list_pods: Returns the pods.
        port: of the pods.
        address: where clients connect.

    Yields:
        The port that clients connect to.
    """
    turn = 0

    async def connect() -> Streams:
        nonlocal turn
        ready = [pod for pod in await list_pods() if _is_ready(pod)]
        if not ready:
            raise ConnectionRefusedError
        turn += 1
        return await asyncio.open_connection(ready[turn % len(ready)]["status"]["podIP"], port)

    async with _front(connect, address=address) as front:
        yield front


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


@contextlib.asynccontextmanager
async def _front(
    connect: Callable[[], Awaitable[Streams]], *, address: str, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        serving.add(task)
        try:
            behind_reader, behind_writer = await connect()
            await asyncio.gather(_pass_on(reader, behind_writer), _pass_on(behind_reader, writer))
        except OSError:
            writer.close()
        finally:
            serving.discard(task)

    server = await asyncio.start_server(serve, address, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either side closes."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
