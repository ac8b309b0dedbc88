"""`perdure watch`: the live view of a running job."""

from __future__ import annotations

import typer

from perdure.cli.common import AddressOption, JobArgument, NamespaceOption, OutputOption, run_async, session


def watch(
    name: JobArgument,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Watch a job until it ends; leaving detaches. Exits with the job's exit code.

    [dim]perdure watch llama-8b-sft -n nlp[/]

    Keys: e explains the last incident, l shows the logs, q leaves.
    """
    raise typer.Exit(run_async(_watch(name, namespace, output=output, address=address)))


async def _watch(name: str, namespace: str, *, output: OutputOption, address: str | None) -> int:
    from perdure.cli.live import follow
    from perdure.client.client import Client

    here = session(namespace=namespace, output=output, address=address)
    async with Client(address=address, namespace=namespace) as client:
        await client.describe(name)
        return await follow(client, here, name, keys=True)
