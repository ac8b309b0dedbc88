"""Whether this node gets to another one: ranks that cannot would hang in their first collective.

A machine that refuses the connection answers: in `env` mode it is the ranks that listen, and not all of them do.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

_PATIENCE = timedelta(seconds=4)
"""A packet that is lost is sent again after one second, and then after two."""


async def why_cut_off(address: str, port: int) -> str:
    """Why the other machine does not answer; empty where it does."""
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
