"""A TLS proxy for a plain-text server: Temporal's dev server cannot require certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from scripts.cluster.certificates import Certificates


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
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        serving.add(task)
        with contextlib.suppress(OSError):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pass_on(reader, behind_writer), _pass_on(behind_reader, writer))
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
