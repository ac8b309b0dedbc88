"""Checks that this node can connect to another one: otherwise ranks would hang in their first collective.

A machine that refuses the connection counts as reachable: in `env` mode it is the ranks that listen, and not on all
nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

_PATIENCE = timedelta(seconds=4)
"""Time limit of the check: the kernel resends a lost packet after one second, and again after two."""


async def why_cut_off(address: str, port: int) -> str:
    """Returns why the other machine does not answer; empty if it does."""
    try:
        async with asyncio.timeout(_PATIENCE.total_seconds()):
            _, connection = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"{address} port {port} does not answer"
    except OSError as error:
        return f"{address} port {port} cannot be reached: {error.strerror or error}"
    connection.close()
    with contextlib.suppress(OSError):
        await connection.wait_closed()
    return ""
