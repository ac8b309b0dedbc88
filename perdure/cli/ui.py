"""The command `perdure ui`."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.common import Session, out, say

if TYPE_CHECKING:
    from perdure.client.client import Client


def ui(
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1; 0: any.")] = 8234,
    *,
    here: Annotated[Session, "namespace", "address"],
) -> None:
    """Show jobs in a browser, on this machine: their courses, nodes, incidents and logs, with a button for each change.

    It prints a link with a token, without which it answers no one. Ctrl-C ends it; jobs continue.

    [dim]perdure ui · perdure ui -A · perdure ui --port 9000[/]
    """

    async def serve(client: Client) -> None:
        from perdure.page.server import serve_pages

        async with serve_pages(client, everywhere=everywhere, port=port) as link:
            out.print(link, markup=False)
            say("Anyone who has the link can change jobs. Ctrl-C ends it; jobs continue.")
            stopped = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            await stopped.wait()

    here.run(serve)
