"""`perdure join`: makes this machine, which a user or a scheduler allocated, a node of a job, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.common import AddressOption, JobArgument, NamespaceOption, run_async, say

if TYPE_CHECKING:
    from perdure.join.machine import JoinOptions
    from perdure.spec.job import JobSpec


def join(
    name: JobArgument,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="Must be the job's; default: the job's.", show_default=False),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the server, the job and a place, and stay until the job has ended.")
    ] = False,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", help="If there is no such job: start it with the command and this many nodes."),
    ] = None,
    nproc_per_node: Annotated[
        str | None, typer.Option("--nproc-per-node", help="For a job that --nodes starts.", show_default="one per GPU")
    ] = None,
    spec: Annotated[
        Path | None, typer.Option("--spec", metavar="FILE", help="If there is no such job: start the one of this file.")
    ] = None,
    node_id: Annotated[
        str,
        typer.Option(
            "--node-id",
            envvar="PERDURE_NODE_ID",
            help="The machine's ID in its allocation: a process that joins again under it gets its own place back.",
            show_default="Slurm's, else the host's name",
        ),
    ] = "",
    node_address: Annotated[
        str,
        typer.Option(
            "--node-address",
            envvar="PERDURE_NODE_ADDRESS",
            help="The address at which other nodes reach this machine.",
            show_default="its address towards the server",
        ),
    ] = "",
    namespace: NamespaceOption = "default",
    address: AddressOption = None,
) -> None:
    """Make this machine a node of a job, until the job has ended; for jobs with backend: joined.

    For machines that Slurm, a Kubernetes Job, SkyPilot, Ray or ssh gave you. It runs the job's command in the
    foreground, in the current folder; SIGTERM ends it with the job's grace period.

    [dim]srun perdure join llama --wait --nodes 2:4 -- torchrun train.py[/]
    [dim]perdure join llama[/]

    Exit codes: the job's (0 ok · 1 the script failed · 3 infrastructure, or no place · 4 cancelled · 5 deadline) ·
    2 usage · 6 control plane unreachable · 0 released by the job · 128 + n after signal n.
    """
    create = _job(name, command, nodes=nodes, nproc_per_node=nproc_per_node, spec=spec, namespace=namespace)
    from perdure.join.machine import JoinOptions

    options = JoinOptions(
        job=name, namespace=namespace, command=tuple(command) if command else None, create=create, wait=wait
    )
    raise typer.Exit(run_async(_join(options, node_id=node_id, node_address=node_address, address=address)))


async def _join(options: JoinOptions, *, node_id: str, node_address: str, address: str | None) -> int:
    from activities.nodes.joined.machine import this_machine
    from perdure.client.client import Client
    from perdure.errors import PerdureError
    from perdure.join.machine import MachineInJob

    client = Client(address=address, namespace=options.namespace)
    try:
        machine = this_machine(client.endpoint.address, node_id=node_id, address=node_address)
    except OSError as error:
        raise PerdureError(
            f"this machine has no route to {client.endpoint.address}: {error}",
            remedy="Check TEMPORAL_ADDRESS; --node-address sets the address at which other nodes reach this machine.",
        ) from error
    return await MachineInJob(client, machine, options, say=say).run()


def _job(
    name: str,
    command: list[str] | None,
    *,
    nodes: str | None,
    nproc_per_node: str | None,
    spec: Path | None,
    namespace: str,
) -> JobSpec | None:
    """The job to start if there is none; None if it must exist."""
    from perdure.spec.job import Backend
    from perdure.spec.load import validate_file
    from perdure.spec.validate import one_line_spec, validate_spec

    if spec is not None:
        if nodes or nproc_per_node:
            raise typer.BadParameter("the file sets this; change it there", param_hint="--nodes, --nproc-per-node")
        overrides = {"name": name, "namespace": namespace, "backend": Backend.JOINED.value}
        return validate_file(spec, overrides=overrides)[0]
    if nodes is None:
        if nproc_per_node:
            raise typer.BadParameter("is for jobs that --nodes starts", param_hint="--nproc-per-node")
        return None
    if not command:
        raise typer.BadParameter("needs the job's command: -- torchrun train.py", param_hint="--nodes")
    made = one_line_spec(
        command=command,
        name=name,
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        namespace=namespace,
        backend=Backend.JOINED,
    )
    return validate_spec(made)[0]
