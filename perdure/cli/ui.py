"""The command `perdure ui`."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from perdure.cli.common import PageArchiveOption, Session, out, say

if TYPE_CHECKING:
    from perdure.client.client import Client


def ui(
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1; 0: any.")] = 8234,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show no buttons, and change nothing.")] = False,
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", help="The address at which a proxy before it shows it, with its path."),
    ] = "",
    archive: PageArchiveOption = None,
    *,
    here: Annotated[Session, "namespace", "address"],
) -> None:
    """Show jobs in a browser, on this machine: their courses, nodes, incidents and logs, with a button for each change.

    It prints a link with a token, without which it answers no one. Ctrl-C ends it; jobs continue.

    [dim]perdure ui · perdure ui -A · perdure ui --port 9000 --read-only[/]
    """
    check_url(url)

    async def serve(client: Client) -> None:
        from perdure.page.server import serve_pages

        pages = serve_pages(client, everywhere=everywhere, port=port, read_only=read_only, url=url, archive=archive)
        async with pages as link:
            out.print(link, markup=False)
            say(f"Anyone who has the link can {'see' if read_only else 'change'} jobs. Ctrl-C ends it; jobs continue.")
            stopped = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            await stopped.wait()

    here.run(serve)


def check_url(url: str) -> None:
    """Refuses what is no address of pages.

    Raises:
        BadParameter: if it is not.
    """
    address = urlsplit(url)
    if url and (address.scheme not in ("http", "https") or not address.hostname or address.query or address.fragment):
        raise typer.BadParameter(f'got "{url}"; expected one such as https://gate.example/perdure', param_hint="--url")


def is_own_name(url: str) -> bool:
    """Whether an address is one of this machine itself."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
