"""Starts or finds the local server and prints it, as a command does; it stays if it is told `waits`."""

from __future__ import annotations

import asyncio
import sys
import time

from perdure.base.services import leave
from perdure.local.control_plane import LocalControlPlane


def main() -> None:
    """Prints the server's address and process."""
    endpoint = asyncio.run(LocalControlPlane().ensure_server())
    server = LocalControlPlane().status().server
    print(endpoint.address, server and server.pid, flush=True)
    while "waits" in sys.argv:
        time.sleep(1)
    # As perdure's own commands do.
    leave(0)


if __name__ == "__main__":
    main()
