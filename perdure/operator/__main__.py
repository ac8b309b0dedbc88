"""Runs the operator: `python -m perdure.operator`.

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
from perdure.client.client import Client
from perdure.client.connection import connect, find_endpoint
from perdure.errors import ExitCode, PerdureError, Refused
from perdure.operator.operator import Operator
from perdure.operator.resource import PLURAL
from perdure.worker import leave, log_to

logger = logging.getLogger("perdure.operator")


async def serve(*, address: str | None, namespaces: Sequence[str]) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Raises:
        ControlPlaneUnreachable: if Temporal does not answer at the start.
        Refused: if the API server does not let the objects be seen.
    """
    endpoint = find_endpoint(address)
    temporal = await connect(endpoint, identity=f"perdure-operator@{socket.gethostname()}:{os.getpid()}")
    api = await KubernetesApi.connect()
    operator = asyncio.create_task(
        Operator(api, Client(endpoint=endpoint, temporal=temporal), namespaces=namespaces).run()
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
        raise Refused(f"the API server does not let {PLURAL} be followed: {error}", remedy=remedy) from error
    finally:
        await api.close()


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Runs the operator in this process."""
    parser = argparse.ArgumentParser(prog="python -m perdure.operator", description=__doc__)
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
        logger.exception("the operator failed")
        return ExitCode.INFRASTRUCTURE
    return ExitCode.OK


if __name__ == "__main__":
    leave(main())
