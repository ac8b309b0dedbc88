"""The operator as a process: connects to Temporal and to the API server, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence

from activities.nodes.kubernetes.api import KubernetesApi, KubernetesError
from perdure.client.client import Client
from perdure.client.connection import connect, find_endpoint
from perdure.errors import Refused
from perdure.operator.operator import Operator
from perdure.operator.ownership import Ownership
from perdure.operator.resource import PLURAL

logger = logging.getLogger("perdure.operator")


async def serve(*, address: str | None, namespaces: Sequence[str], ownership: Ownership = Ownership.REQUIRE) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Raises:
        ControlPlaneUnreachable: if Temporal does not answer at the start.
        Refused: if the API server does not permit watching the objects.
    """
    endpoint = find_endpoint(address)
    temporal = await connect(
        endpoint, identity=f"perdure-operator@{socket.gethostname()}:{os.getpid()}", part="operator"
    )
    api = await KubernetesApi.connect()
    operator = asyncio.create_task(
        Operator(api, Client(endpoint=endpoint, temporal=temporal), namespaces=namespaces, ownership=ownership).run()
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, operator.cancel)
    where = f"the namespaces {', '.join(namespaces)}" if namespaces else "all namespaces"
    logger.info("serving %s of %s; Temporal at %s, %s", PLURAL, where, endpoint.address, endpoint.namespace)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await operator
    except KubernetesError as error:
        remedy = "Apply deploy/crds/trainingjobs.yaml." if error.status == 404 else "See docs/kubernetes-resource.md."
        raise Refused(f"the API server does not permit watching {PLURAL}: {error}", remedy=remedy) from error
    finally:
        await api.close()
