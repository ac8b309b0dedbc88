"""The gateway as a process: connects to Temporal and to the API server, and serves agents until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
from base64 import b64decode
from datetime import timedelta
from pathlib import Path
from typing import Final

from perdure.activities.nodes.kubernetes.settings import own_namespace
from perdure.base.credentials.keyring import AUTHORITY, AUTHORITY_KEY, SIGNING_KEYS, Keyring, KeyringInvalid
from perdure.base.errors import Refused
from perdure.base.files import write_private_file
from perdure.base.kubernetes import KubernetesApi, Object, core_path
from perdure.base.kubernetes_errors import KubernetesError
from perdure.base.services import health_endpoint
from perdure.client.connection import connect, find_endpoint, payload_encryption
from perdure.gateway.callers import ApiTokenReviewer, Callers, NoTokenReviewer
from perdure.gateway.certificates import CertificateInvalid, ServerCertificates, SiteCertificate
from perdure.gateway.metrics import serving_metrics
from perdure.gateway.server import Gateway

logger = logging.getLogger("perdure.gateway")

KEYRING_SECRET: Final = "perdure-gateway"
STOP_GRACE: Final = timedelta(seconds=5)
"""The time for calls in progress to end when the gateway is stopped. Polls end at once."""


async def serve(
    *,
    address: str | None,
    listen: str,
    keyring_secret: str,
    keyring: Path | None = None,
    health_port: int | None,
    metrics_port: int | None = None,
    certificate: SiteCertificate | None = None,
) -> None:
    """Runs a gateway until SIGTERM or SIGINT.

    Args:
        address: The Temporal server; by default as the environment configures it.
        listen: Host and port for agents.
        keyring_secret: The name of the Secret with the key ring.
        keyring: A folder with the key ring instead, without a cluster: only machines that join are served.
        health_port: The port that answers `GET /healthz`.
        metrics_port: The port that serves Prometheus metrics.
        certificate: The site's, shown besides the gateway's own to those who call it by its names.

    Raises:
        ControlPlaneUnreachable: if Temporal does not answer at the start.
        Refused: if the key ring cannot be read, or the address cannot be used.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    endpoint = find_endpoint(address)
    temporal = await connect(
        endpoint, identity=f"perdure-gateway@{socket.gethostname()}:{os.getpid()}", patient=True, part="gateway"
    )
    api = None if keyring else await KubernetesApi.connect(part="perdure-gateway")
    try:
        if api is None:
            assert keyring is not None
            ring, reviewer = read_keyring(keyring), NoTokenReviewer()
        else:
            ring, reviewer = await _keyring(api, own_namespace(), keyring_secret), ApiTokenReviewer(api)
        try:
            certificates = ServerCertificates(ring.authority, certificate)
        except CertificateInvalid as error:
            raise Refused(f"--tls-certificate, --tls-key: {error}", remedy=_REMEDY) from error
        callers = Callers(ring.signing_keys, reviewer)
        encryption = payload_encryption(endpoint)
        encryption.use(temporal)
        gateway = Gateway(temporal, callers, ring.signing_keys, encryption=encryption)
        try:
            port = await gateway.start(listen, certificates)
        except OSError as error:
            raise Refused(str(error), remedy="Name a free port with --listen HOST:PORT.") from error
        logger.info("serving agents at port %d; Temporal at %s, %s", port, endpoint.address, endpoint.namespace)
        async with health_endpoint(health_port), serving_metrics(gateway.metrics, metrics_port):
            await stopped.wait()
        logger.info("stopping")
        await gateway.stop(STOP_GRACE)
    finally:
        if api is not None:
            await api.close()


async def make_keyring(keyring_secret: str) -> None:
    """Creates the key ring's Secret if it does not exist, so that workers that mount it need not wait for a gateway.

    Raises:
        Refused: if it can be neither read nor created.
    """
    api = await KubernetesApi.connect(part="perdure-gateway")
    try:
        await _keyring(api, own_namespace(), keyring_secret)
    finally:
        await api.close()


def read_keyring(folder: Path) -> Keyring:
    """Reads the key ring from a folder; creates it if the folder has none. Of several gateways that start, one creates
    it.

    Raises:
        Refused: if it cannot be read or created.
    """
    try:
        if not folder.exists():
            draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            for name, content in Keyring.new().to_entries().items():
                write_private_file(draft / name, content.encode())
            try:
                draft.rename(folder)
            except OSError:
                shutil.rmtree(draft, ignore_errors=True)
                if not folder.exists():
                    raise
            else:
                logger.info("created the key ring %s", folder)
        names = (SIGNING_KEYS, AUTHORITY, AUTHORITY_KEY)
        return Keyring.from_entries({name: (folder / name).read_text(encoding="utf-8") for name in names})
    except OSError as error:
        raise Refused(f"the key ring {folder} cannot be read: {error}", remedy=_REMEDY) from error
    except KeyringInvalid as error:
        raise Refused(f"{folder} is not a key ring: {error}", remedy=_REMEDY) from error


async def _keyring(api: KubernetesApi, namespace: str, name: str) -> Keyring:
    """Reads the key ring's Secret; creates it if it does not exist. Of several gateways that start, one creates it."""
    secrets = core_path(namespace, "secrets")
    try:
        secret = await api.get(f"{secrets}/{name}")
        if secret is None:
            content: Object = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "perdure"}},
                "stringData": Keyring.new().to_entries(),
            }
            secret = await api.create_or_get(secrets, content)
            logger.info("created the Secret %s/%s with new keys", namespace, name)
    except KubernetesError as error:
        raise Refused(f"the Secret {namespace}/{name} cannot be read: {error}", remedy=_REMEDY) from error
    data: dict[str, str] = secret.get("data") or {}
    try:
        return Keyring.from_entries({key: b64decode(value).decode("utf-8", "replace") for key, value in data.items()})
    except KeyringInvalid as error:
        raise Refused(f"the Secret {namespace}/{name} is not a key ring: {error}", remedy=_REMEDY) from error


_REMEDY: Final = "See docs/gateway.md."
