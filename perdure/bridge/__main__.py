"""Runs the bridge: `python -m perdure.bridge`.

Makes a training job of each TrainingJob object of a Kubernetes cluster, and shows in its status how the job is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence

from activities.nodes.kubernetes.api import KubernetesApi, KubernetesError
from perdure.bridge.bridge import Bridge
from perdure.bridge.resource import PLURAL
from perdure.client import Client
from perdure.connection import connect, find_endpoint
from perdure.errors import ExitCode, PerdureError, Refused
from perdure.worker import leave, log_to

logger = logging.getLogger("perdure.bridge")


async def serve(*, address: str | None, namespaces: Sequence[str]) -> None:
    """Runs the bridge until SIGTERM or SIGINT.

    Raises:
        ControlPlaneUnreachable: if Temporal does not answer at the start.
        Refused: if the API server does not let the objects be seen.
    """
    endpoint = find_endpoint(address)
    temporal = await connect(endpoint, identity=f"perdure-bridge@{socket.gethostname()}:{os.getpid()}")
    api = await KubernetesApi.connect()
    bridge = asyncio.create_task(Bridge(api, Client(endpoint=endpoint, temporal=temporal), namespaces=namespaces).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, bridge.cancel)
    where = f"the namespaces {', '.join(namespaces)}" if namespaces else "all namespaces"
    logger.info("serving %s of %s; Temporal at %s, %s", PLURAL, where, endpoint.address, endpoint.namespace)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await bridge
    except KubernetesError as error:
        remedy = "Apply deploy/crds/trainingjobs.yaml." if error.status == 404 else "See docs/kubernetes-resource.md."
        raise Refused(f"the API server does not let {PLURAL} be followed: {error}", remedy=remedy) from error
    finally:
        await api.close()


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Runs the bridge in this process."""
    parser = argparse.ArgumentParser(prog="python -m perdure.bridge", description=__doc__)
    parser.add_argument("--address", help="of the Temporal server; else as Temporal's environment configuration says")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="serve only this Kubernetes namespace; may be repeated; default: all",
    )
    options = parser.parse_args(arguments)
    log_to(None)
    try:
        asyncio.run(serve(address=options.address, namespaces=options.namespace))
    except PerdureError as error:
        logger.error("%s %s", error, error.remedy)
        return error.exit_code
    except Exception:
        logger.exception("the bridge failed")
        return ExitCode.INFRASTRUCTURE
    return ExitCode.OK


if __name__ == "__main__":
    leave(main())
