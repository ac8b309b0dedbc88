"""`perdure watch`: the live view of a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from perdure.base.errors import ExitCode
from perdure.cli.common import JobArgument, Session, read_in_time

if TYPE_CHECKING:
    from perdure.client.client import Client


def watch(name: JobArgument, here: Session) -> None:
    """Watch a job until it ends; leaving detaches. Exits with the job's exit code.

    [dim]perdure watch llama-8b-sft -n nlp[/]

    Keys: e explains the last incident, l shows the logs, q leaves.
    """
    raise typer.Exit(here.run(lambda client: _watch(client, here, name)))


async def _watch(client: Client, here: Session, name: str) -> ExitCode:
    from perdure.cli.live import follow

    await read_in_time(client, lambda client: client.describe(name))
    return await follow(client, here, name, keys=True)
