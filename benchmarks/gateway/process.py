"""`python -m benchmarks.gateway.process`: one gateway, for a server without Kubernetes: it believes what tokens say."""

from __future__ import annotations

import asyncio
import json
import sys

from temporalio.client import Client

from perdure.base.credentials.grants import PodName
from perdure.base.credentials.keyring import Keyring
from perdure.base.services import leave
from perdure.gateway.callers import Callers
from perdure.gateway.certificates import ServerCertificates
from perdure.gateway.server import Gateway

NAMESPACE = "bench"


class TrustingReviewer:
    """Takes the token for the name of its pod. A real review is one request in a minute for each agent."""

    async def pod_of(self, token: str) -> PodName:
        return PodName(namespace=NAMESPACE, name=token)


async def serve(temporal: str, listen: str, keyring: Keyring) -> None:
    """Serves until the process is killed."""
    keys = keyring.signing_keys
    gateway = Gateway(await Client.connect(temporal), Callers(keys, TrustingReviewer()), keys)
    await gateway.start(listen, ServerCertificates(keyring.authority))
    print("serving", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    server, address = sys.argv[1:]
    asyncio.run(serve(server, address, Keyring.from_entries(json.loads(sys.stdin.readline()))))
    leave(0)
