"""The pages of a site as a process: serves users whom the cluster knows until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from aiohttp import web

from perdure.base.errors import Refused
from perdure.base.kubernetes import KubernetesApi
from perdure.base.listening import listening_sockets
from perdure.base.services import health_endpoint
from perdure.client.client import Client
from perdure.client.connection import connect, find_endpoint
from perdure.gateway.certificates import CertificateInvalid, SiteCertificate
from perdure.page.server import Pages, application_of, logger
from perdure.page.users import AUDIENCE, ClusterUsers, SignIn
from perdure_training.node_api.addresses import split_address

_CERTIFICATE_LOOK = 10.0
"""Seconds between two looks for a newer certificate."""


async def serve(
    *,
    address: str | None,
    listen: str,
    namespaces: Collection[str] = (),
    url: str = "",
    audience: str = AUDIENCE,
    read_only: bool = False,
    archive: str | None = None,
    certificate: SiteCertificate | None = None,
    health_port: int | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        address: The Temporal server; by default as the environment configures it.
        listen: Host and port for browsers.
        namespaces: The namespaces whose jobs are shown; empty: all.
        url: The address at which browsers know it; empty: this machine's own names only, as by port-forward.
        audience: The audience of tokens; empty: the API server's own.
        read_only: Show no buttons, and change nothing.
        archive: The place in which jobs are looked for that Temporal does not know, or not any more.
        certificate: Serve TLS with it; None: something before it does.
        health_port: The port that answers `GET /healthz`.

    Raises:
        ControlPlaneUnreachable: if Temporal does not answer at the start.
        Refused: if the address or the certificate cannot be used.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    endpoint = find_endpoint(address)
    temporal = await connect(endpoint, identity=f"perdure-page@{socket.gethostname()}:{os.getpid()}", part="page")
    api = await KubernetesApi.connect(part="perdure-page")
    try:
        users = ClusterUsers(api, audience)
        pages = Pages(
            Client(temporal=temporal, endpoint=endpoint),
            everywhere=True,
            namespaces=namespaces or None,
            read_only=read_only,
            archive=archive,
            for_others=True,
        )
        is_secure = certificate is not None or urlsplit(url).scheme == "https"
        application = application_of(pages, SignIn(users, is_secure=is_secure).guard, url)
        async with _serving(application, listen, certificate), health_endpoint(health_port):
            logger.info("serving pages at %s; Temporal at %s, %s", listen, endpoint.address, endpoint.namespace)
            await stopped.wait()
        logger.info("stopping")
    finally:
        await api.close()


@asynccontextmanager
async def _serving(
    application: web.Application, listen: str, certificate: SiteCertificate | None
) -> AsyncGenerator[None]:
    context = _context(certificate) if certificate else None
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    renewing = asyncio.create_task(_renew(context, certificate)) if context and certificate else None
    try:
        try:
            for one in listening_sockets(*split_address(listen)):
                await web.SockSite(runner, one, ssl_context=context).start()
        except (OSError, ValueError) as error:
            raise Refused(f"--listen {listen}: {error}", remedy="Name a free port with --listen HOST:PORT.") from error
        yield
    finally:
        if renewing:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
        await runner.cleanup()


def _context(certificate: SiteCertificate) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        _load(context, certificate)
    except CertificateInvalid as error:
        raise Refused(f"--tls-certificate, --tls-key: {error}", remedy="Name the files of one certificate.") from error
    return context


def _load(context: ssl.SSLContext, certificate: SiteCertificate) -> None:
    certificate.read()  # Says which file is wrong, and leaves the context as it is.
    context.load_cert_chain(certificate.certificate, certificate.private_key)


async def _renew(context: ssl.SSLContext, certificate: SiteCertificate) -> None:
    """Shows a newer certificate to the next connections; one that cannot be used replaces none."""
    version = certificate.version()
    while True:
        await asyncio.sleep(_CERTIFICATE_LOOK)
        if (now := certificate.version()) == version:
            continue
        version = now
        try:
            _load(context, certificate)
            logger.info("the certificate was replaced")
        except (CertificateInvalid, OSError) as error:
            logger.error("the certificate stays as it was: %s", error)
