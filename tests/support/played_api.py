"""A Kubernetes API server that a test plays, where the real one cannot fail on demand."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from perdure.base.kubernetes import KubernetesApi

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def played_server(answer: Answer, *, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[str]:
    """Yields the URL of a server that answers every request by a function."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def played_api(answer: Answer) -> AsyncIterator[KubernetesApi]:
    """Yields a client of such a server."""
    async with played_server(answer) as server:
        configuration = Configuration()
        configuration.host = server
        api = KubernetesApi(configuration)
        try:
            yield api
        finally:
            await api.close()


def write_kubeconfig(path: Path, server: str, *, authority: Path | None = None, **user: Any) -> Path:
    """Writes a kubeconfig for a server and returns its path; `user` has how its user identifies itself."""
    cluster = {"server": server} | ({"certificate-authority": str(authority)} if authority else {})
    content = {
        "current-context": "site",
        "contexts": [{"name": "site", "context": {"cluster": "site", "user": "worker"}}],
        "clusters": [{"name": "site", "cluster": cluster}],
        "users": [{"name": "worker", "user": user}],
    }
    path.write_text(json.dumps(content))
    return path


def refusal(status: int, reason: str, message: str) -> web.Response:
    """A refusal, as the API server words it."""
    return web.json_response({"code": status, "reason": reason, "message": message}, status=status)
