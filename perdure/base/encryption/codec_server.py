"""The codec server: encrypts and decrypts payloads for Temporal's command line and UI, by their remote codec protocol.

Any user and any web page on this machine can connect to a port of loopback. So each request must carry a token, as its
`Authorization` header or, for the UI, which sends no such header, as the first part of its path; it must name loopback
as its host, and come from the Temporal UI if a page sent it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from temporalio.api.common.v1 import Payload, Payloads

from perdure.base.encryption.codec import PayloadEncryption, readable

HOST = "127.0.0.1"

LONGEST_REQUEST = 64 * 1024 * 1024
"""A page of a history holds many payloads; Temporal's server itself sends up to 4 MB at once."""


@dataclass(frozen=True, kw_only=True)
class CodecAddress:
    """How to reach the codec server."""

    endpoint: str
    token: str

    @property
    def authorization(self) -> str:
        """The `Authorization` header of requests."""
        return f"Bearer {self.token}"

    @property
    def endpoint_with_token(self) -> str:
        """The endpoint for a UI, which sends no `Authorization` header of ours."""
        return f"{self.endpoint}/{self.token}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Temporal's command line uses the server. On its command line, other users would see
        the token."""
        return {"TEMPORAL_CODEC_ENDPOINT": self.endpoint, "TEMPORAL_CODEC_AUTH": self.authorization}


@asynccontextmanager
async def codec_server(
    encryption: PayloadEncryption, *, origins: Collection[str] = (), port: int = 0
) -> AsyncGenerator[CodecAddress]:
    """Serves on loopback while the context is open.

    Args:
        encryption: The codec.
        origins: Origins of web pages that may use it, which must also know the token.
        port: The port; 0 for one that is free.

    Raises:
        OSError: if the port is taken.
    """
    token = secrets.token_urlsafe(32)
    server = _CodecServer(encryption, token, frozenset(origins))
    application = web.Application(client_max_size=LONGEST_REQUEST, middlewares=[server.guard])
    for prefix in ("", "/{token}"):
        application.router.add_post(f"{prefix}/encode", server.encode)
        application.router.add_post(f"{prefix}/decode", server.decode)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        _, chosen = runner.addresses[0][:2]
        server.hosts = {f"{HOST}:{chosen}", f"localhost:{chosen}"}
        yield CodecAddress(endpoint=f"http://{HOST}:{chosen}", token=token)
    finally:
        await runner.cleanup()


class _CodecServer:
    def __init__(self, encryption: PayloadEncryption, token: str, origins: frozenset[str]) -> None:
        self._encryption = encryption
        self._token = token
        self._origins = origins
        self.hosts: set[str] = set()

    @web.middleware
    async def guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if request.host not in self.hosts or (origin is not None and origin not in self._origins):
            raise web.HTTPForbidden
        if request.method == "OPTIONS":
            return web.Response(status=204, headers=_cors(origin))
        given = request.match_info.get("token") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPUnauthorized
        response = await handler(request)
        response.headers.update(_cors(origin))
        return response

    async def encode(self, request: web.Request) -> web.Response:
        return _answer(await self._encryption.encode(await _payloads(request)))

    async def decode(self, request: web.Request) -> web.Response:
        decoded = await self._encryption.decode(await _payloads(request))
        return _answer([readable(payload) for payload in decoded])


async def _payloads(request: web.Request) -> list[Payload]:
    try:
        return list(Parse(await request.text(), Payloads()).payloads)
    except (ParseError, UnicodeDecodeError):
        raise web.HTTPBadRequest from None


def _answer(payloads: list[Payload]) -> web.Response:
    return web.Response(text=MessageToJson(Payloads(payloads=payloads)), content_type="application/json")


def _cors(origin: str | None) -> dict[str, str]:
    if origin is None:
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "POST",
        "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Namespace",
        "Vary": "Origin",
    }
