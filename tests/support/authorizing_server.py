"""A real Temporal server that asks for credentials, configured as docs/install-kubernetes.md says: TLS, and tokens that
name the Temporal namespaces that their owner may use."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError, TLSConfig

from scripts.cluster.certificates import Certificates
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually

NAME = "temporal.test"
"""The name in the server's certificate."""


class Identities:
    """What signs tokens: the part of an identity provider that the server needs."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def token(self, *permissions: str, valid: timedelta = timedelta(hours=1)) -> str:
        """Returns a token with these permissions, such as `nlp:write`."""
        header = {"alg": "RS256", "kid": "1", "typ": "JWT"}
        claims = {"sub": "test", "permissions": permissions, "exp": int(time.time() + valid.total_seconds())}
        content = ".".join(_encoded(json.dumps(part).encode()) for part in (header, claims))
        signature = self._key.sign(content.encode(), padding.PKCS1v15(), SHA256())
        return f"{content}.{_encoded(signature)}"

    @property
    def key_set(self) -> dict[str, Any]:
        """The public key, as the server fetches it."""
        numbers = self._key.public_key().public_numbers()
        modulus, exponent = (
            _encoded(number.to_bytes((number.bit_length() + 7) // 8, "big")) for number in (numbers.n, numbers.e)
        )
        return {"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": "1", "n": modulus, "e": exponent}]}


class AuthorizingServer:
    """The server, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.identities = Identities()
        self.certificates = Certificates(folder / "pki")
        self.certificates.create()
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder

    def environment(self, namespace: str, token: str) -> dict[str, str]:
        """The variables with which Temporal's clients connect."""
        return {
            "TEMPORAL_ADDRESS": self.address,
            "TEMPORAL_NAMESPACE": namespace,
            "TEMPORAL_API_KEY": token,
            "TEMPORAL_TLS_SERVER_NAME": NAME,
            "TEMPORAL_TLS_SERVER_CA_CERT_PATH": str(self.certificates.authority),
        }

    async def client(self, namespace: str, token: str | None) -> Client:
        """A client with a token, or without one."""
        authority = self.certificates.authority.read_bytes()
        return await Client.connect(
            self.address,
            namespace=namespace,
            api_key=token,
            tls=TLSConfig(server_root_ca_cert=authority, domain=NAME),
            data_converter=pydantic_data_converter,
            lazy=True,
        )

    async def register(self, namespaces: Sequence[str]) -> None:
        """Creates namespaces, as an administrator; returns when they can be used."""
        token = self.identities.token("temporal-system:admin")
        for namespace in namespaces:
            admin = await self.client(namespace, token)
            retention = Duration(seconds=int(timedelta(days=1).total_seconds()))
            request = RegisterNamespaceRequest(namespace=namespace, workflow_execution_retention_period=retention)
            await admin.workflow_service.register_namespace(request)

            async def known(client: Client = admin) -> bool:
                try:
                    await client.count_workflows()
                except RPCError:
                    return False
                return True

            await eventually(known)

    def configuration(self, keys: str) -> dict[str, Any]:
        """The server's configuration; its database is in memory."""
        certificate, key = self.certificates.issue(NAME, user=NAME, hosts=[f"DNS:{NAME}"])
        store = {
            "sql": {
                "pluginName": "sqlite",
                "databaseName": "default",
                "connectAddr": "localhost",
                "connectProtocol": "tcp",
                "connectAttributes": {"mode": "memory", "cache": "private"},
                "maxConns": 1,
                "maxIdleConns": 1,
                "maxConnLifetime": "1h",
            }
        }
        ports = {name: free_port() for name in ("internal-frontend", "history", "matching", "worker")}
        ports["frontend"] = int(self.address.rpartition(":")[2])
        active = {"enabled": True, "initialFailoverVersion": 1, "rpcName": "frontend", "rpcAddress": self.address}
        return {
            "log": {"stdout": True, "level": "warn"},
            "persistence": {
                "defaultStore": "default",
                "visibilityStore": "visibility",
                "numHistoryShards": 1,
                "datastores": {"default": store, "visibility": store},
            },
            "global": {
                "membership": {"maxJoinDuration": "30s", "broadcastAddress": "127.0.0.1"},
                "tls": {
                    "frontend": {
                        "server": {"certFile": str(certificate), "keyFile": str(key)},
                        "client": {"serverName": NAME, "rootCaFiles": [str(self.certificates.authority)]},
                    }
                },
                "authorization": {
                    "authorizer": "default",
                    "claimMapper": "default",
                    "permissionsClaimName": "permissions",
                    "jwtKeyProvider": {"keySourceURIs": [keys], "refreshInterval": "10m"},
                },
            },
            "services": {
                name: {"rpc": {"grpcPort": port, "membershipPort": free_port(), "bindOnLocalHost": True}}
                for name, port in ports.items()
            },
            "clusterMetadata": {
                "enableGlobalNamespace": False,
                "failoverVersionIncrement": 10,
                "masterClusterName": "active",
                "currentClusterName": "active",
                "clusterInformation": {"active": active},
            },
            "dcRedirectionPolicy": {"policy": "noop"},
        }


@asynccontextmanager
async def authorizing_server(program: Path, folder: Path) -> AsyncIterator[AuthorizingServer]:
    """Runs the server while the context is open.

    Args:
        program: Temporal's server, which is not the dev server.
        folder: For its configuration and log.
    """
    server = AuthorizingServer(folder)
    application = web.Application()

    async def key_set(_: web.Request) -> web.Response:
        return web.json_response(server.identities.key_set)

    application.router.add_get("/keys.json", key_set)
    provider = web.AppRunner(application, access_log=None)
    await provider.setup()
    await web.TCPSite(provider, "127.0.0.1", 0).start()
    configuration = folder / "temporal.yaml"
    configuration.write_text(
        yaml.safe_dump(server.configuration("http://{}:{}/keys.json".format(*provider.addresses[0])))
    )
    services = ("frontend", "internal-frontend", "history", "matching", "worker")
    with (folder / "temporal.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(program), "--config-file", str(configuration), "start"),
            *(word for service in services for word in ("--service", service)),
            stdout=log,
            stderr=log,
        )
    try:
        admin = await server.client("temporal-system", server.identities.token("temporal-system:admin"))

        async def serves() -> bool:
            assert process.returncode is None, (folder / "temporal.log").read_text()[-3000:]
            try:
                await admin.count_workflows()
            except (RPCError, RuntimeError):
                return False
            return True

        await eventually(serves, what=lambda: f"the server serves: {(folder / 'temporal.log').read_text()[-3000:]}")
        yield server
    finally:
        process.kill()
        await process.wait()
        await provider.cleanup()


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
