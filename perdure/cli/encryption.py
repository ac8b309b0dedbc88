"""Commands for encrypted payloads: Temporal's own tools with the codec that they need, and the file of keys."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.common import AddressOption, out, run_async, say

if TYPE_CHECKING:
    from perdure.base.encryption.codec_server import CodecAddress
    from perdure.client.connection import Endpoint


def codec_server(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND]...", help="Run this command, and serve until it ends.", show_default=False
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1.", show_default="a free one")
    ] = 0,
    address: AddressOption = None,
) -> None:
    """Decrypt payloads for Temporal's own command line and UI, and encrypt what they send.

    Runs the command with the variables that Temporal's command line needs: the server's address and the codec
    server's. Without a command, prints the endpoint for the UI's settings. Serves only callers that have the token.

    [dim]perdure codec-server · perdure codec-server -- bash[/]
    """
    raise typer.Exit(run_async(_codec_server(command or [], port=port, address=address)))


def temporal(context: typer.Context) -> None:
    """Run Temporal's own command line on the jobs' server: all that follows is its own.

    It needs no installation and no settings: it is the one that Perdure comes with, finds the server as the other
    commands do, and shows and sends payloads as they are where they are encrypted.

    [dim]perdure temporal workflow show -w job/default/llama · perdure temporal workflow list[/]
    """
    from perdure.base.errors import ControlPlaneUnreachable
    from perdure.client.connection import find_endpoint
    from perdure.local import temporal_binary

    command = [str(run_async(temporal_binary.ensure(say))), *context.args]
    try:
        find_endpoint()
    except ControlPlaneUnreachable as missing:
        # Its help, for example, needs no server.
        say(f"{missing}. {missing.remedy}")
        raise typer.Exit(subprocess.run(command, check=False).returncode) from None
    raise typer.Exit(run_async(_codec_server(command, port=0, address=None)))


async def _codec_server(command: list[str], *, port: int, address: str | None) -> int:
    from perdure.base.encryption.codec import PayloadEncryption
    from perdure.base.encryption.codec_server import codec_server
    from perdure.client.connection import find_endpoint, payload_encryption

    endpoint = find_endpoint(address)
    # Without a client, the codec cannot tell what was never encrypted, and shows it as it is.
    encryption = PayloadEncryption.of(payload_encryption(endpoint).keys)
    async with codec_server(encryption, origins=_origins(endpoint.ui), port=port) as codec:
        if command:
            return await _run(command, endpoint, codec)
        out.print(f"codec endpoint for the Temporal UI's settings: {codec.endpoint_with_token}", markup=False)
        out.print(f"  TEMPORAL_CODEC_ENDPOINT={codec.endpoint}", markup=False)
        out.print(f'  TEMPORAL_CODEC_AUTH="{codec.authorization}"', markup=False)
        say("Any process that has the token reads all payloads. Ctrl-C ends it.")
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()
        return 0


def _origins(ui: str) -> list[str]:
    """The allowed origins of the UI's pages: localhost and 127.0.0.1."""
    return [ui, ui.replace("//127.0.0.1:", "//localhost:")] if ui else []


async def _run(command: list[str], endpoint: Endpoint, codec: CodecAddress) -> int:
    from perdure.local import temporal_binary

    environment = {**os.environ, **codec.environment, "TEMPORAL_ADDRESS": endpoint.address}
    environment["TEMPORAL_NAMESPACE"] = endpoint.namespace
    if shutil.which("temporal") is None:
        # For the command itself, and for what it runs, such as a shell.
        found = await temporal_binary.ensure(say)
        environment["PATH"] = os.pathsep.join((environment.get("PATH", os.defpath), str(found.parent)))
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise typer.BadParameter(f"{command[0]!r} is not on PATH", param_hint="COMMAND")
    process = await asyncio.create_subprocess_exec(program, *command[1:], env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, process.send_signal, number)
    code = await process.wait()
    return code if code >= 0 else 128 - code


def payload_keys(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="The file of keys.", show_default="PERDURE_PAYLOAD_KEYS_FILE, or the local default's"
        ),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="Add a new key, which encrypts from now on; payloads that older keys encrypted stay readable.",
        ),
    ] = False,
) -> None:
    """Make the file of keys that encrypt payloads, or rotate its keys. No key is printed.

    [dim]perdure payload-keys keys.json · perdure payload-keys --rotate[/]
    """
    from perdure.base.encryption.keys import KEYS_FILE_VARIABLE, create_keys, rotate_keys
    from perdure.base.state_folder import StateFolder

    named = os.environ.get(KEYS_FILE_VARIABLE)
    path = file or (Path(named) if named else StateFolder().open().payload_keys)
    keys = rotate_keys(path) if rotate else create_keys(path)
    out.print(f"{path}: {len(keys.all)} {'key' if len(keys.all) == 1 else 'keys'}", markup=False)
    for number, key in enumerate(keys.all):
        out.print(
            f"  {key.id}  {key.created:%Y-%m-%d %H:%M}  {'encrypts' if number == 0 else 'decrypts'}", markup=False
        )
