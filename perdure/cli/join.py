"""`perdure join`: makes this machine, which a user or a scheduler allocated, a node of a job, in the foreground."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.common import AddressOption, JobArgument, NamespaceOption, continue_without_reader, run_async, say

if TYPE_CHECKING:
    from perdure.activities.nodes.joined.machine import Machine
    from perdure.join.machine import JoinOptions
    from perdure.spec.job import JobSpec


def join(
    name: JobArgument,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="Must be the job's; default: the job's.", show_default=False),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option("--role", help="The role among whose nodes to be.", show_default="the first that lacks nodes"),
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
        Path | None, typer.Option("--spec", metavar="FILE", help="If there is no such job: start it from this file.")
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
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            envvar="PERDURE_METRICS_PORT",
            min=1,
            max=65535,
            help="Serve Prometheus metrics of the node on this port, on all interfaces.",
            show_default="none",
        ),
    ] = None,
    rack: Annotated[
        str,
        typer.Option(
            "--rack",
            envvar="PERDURE_RACK",
            help="The machine's rack, or whatever fails at once: copies of snapshots go to machines of other racks.",
            show_default="by Slurm's topology, if it has one",
        ),
    ] = "",
    gateway: Annotated[
        str,
        typer.Option(
            "--gateway",
            metavar="URL",
            envvar="PERDURE_GATEWAY",
            help="Join through the gateway at https://HOST:PORT, without Temporal; requires a ticket.",
            show_default="the ticket's",
        ),
    ] = "",
    ticket: Annotated[
        Path | None,
        typer.Option(
            "--ticket",
            metavar="FILE",
            envvar="PERDURE_TICKET",
            help="The ticket that the job's owner made with `perdure ticket`: join through the gateway.",
            show_default=False,
        ),
    ] = None,
    namespace: NamespaceOption = "default",
    address: AddressOption = None,
) -> None:
    """Make this machine a node of a job, until the job has ended; for jobs with backend: joined.

    For machines that Slurm, a Kubernetes Job, SkyPilot, Ray or ssh gave you. It runs the job's command in the
    foreground, in the current folder; SIGTERM ends it with the job's grace period.

    [dim]srun perdure join llama --wait --nodes 2:4 -- torchrun train.py[/]
    [dim]perdure join llama[/]
    [dim]perdure join llama --ticket llama.ticket[/]

    Exit codes: the job's (0 ok · 1 the script failed · 3 infrastructure, or no place · 4 cancelled · 5 deadline) ·
    2 usage · 6 control plane unreachable · 0 released by the job · 128 + n after signal n.
    """
    if gateway and ticket is None:
        raise typer.BadParameter(
            "requires a ticket, which `perdure ticket` makes: --ticket FILE", param_hint="--gateway"
        )
    if ticket and (nodes or spec or address):
        raise typer.BadParameter(
            "a machine with a ticket joins a job that its owner has started, through the gateway only",
            param_hint="--nodes, --spec, --address",
        )
    create = _job(name, command, nodes=nodes, nproc_per_node=nproc_per_node, spec=spec, namespace=namespace)
    from perdure.join.machine import JoinOptions

    options = JoinOptions(
        job=name,
        namespace=namespace,
        role=role,
        command=tuple(command) if command else None,
        create=create,
        wait=wait,
    )
    describe = partial(_machine, node_id=node_id, address=node_address, metrics_port=metrics_port, rack=rack)
    if ticket:
        joining = _join_by_ticket(options, describe, ticket, gateway)
    else:
        joining = _join(options, describe, address)
    continue_without_reader()
    raise typer.Exit(run_async(joining))


async def _join(options: JoinOptions, describe: Callable[[str, str], Machine], address: str | None) -> int:
    from perdure.client.client import Client
    from perdure.client.joining import DirectJobConnection
    from perdure.join.commands import MachineCommands
    from perdure.join.machine import MachineInJob

    client = Client(address=address, namespace=options.namespace)
    machine = describe(client.endpoint.address, "TEMPORAL_ADDRESS")
    connection = DirectJobConnection(client, options.job, options.namespace)
    with _own_id(machine, options) as leave:
        commands = MachineCommands(client)
        return await MachineInJob(connection, machine, options, say=say, commands=commands, on_leaving=leave).run()


async def _join_by_ticket(
    options: JoinOptions, describe: Callable[[str, str], Machine], ticket_path: Path, gateway: str
) -> int:
    from perdure.base.errors import PerdureError
    from perdure.join.gateway import GatewayJobConnection
    from perdure.join.machine import MachineInJob
    from perdure.join.ticket_file import TicketFile, gateway_address

    ticket = TicketFile.read(ticket_path)
    if ticket.job != options.job or options.namespace not in ("default", ticket.namespace):
        raise PerdureError(
            f"{ticket_path} is a ticket of the job {ticket.job} in the namespace {ticket.namespace}",
            remedy=f"Join that job, or have a ticket made: perdure ticket {options.job}",
        )
    address = gateway_address(gateway or ticket.gateway)
    machine = describe(address, "--gateway")
    connection = GatewayJobConnection(address, ticket)
    try:
        with _own_id(machine, options) as leave:
            return await MachineInJob(connection, machine, options, say=say, on_leaving=leave).run()
    finally:
        await connection.close()


def _own_id(machine: Machine, options: JoinOptions) -> AbstractContextManager[Callable[[], None]]:
    """Holds the machine's ID in the job, unless the user has chosen it: that may be in order to displace a process."""
    from perdure.activities.nodes.joined.machine import joined_folder
    from perdure.join.own_id import held

    if machine.chosen_id:
        return nullcontext(lambda: None)
    return held(machine.node_id, job=f"{options.namespace}/{options.job}", folder=joined_folder())


def _machine(server: str, source: str, **settings: Any) -> Machine:
    """Describes this machine by the user's settings."""
    from perdure.activities.nodes.joined.machine import InvalidAddress, this_machine
    from perdure.base.errors import PerdureError

    try:
        return this_machine(server, **settings)
    except InvalidAddress as error:
        raise typer.BadParameter(str(error), param_hint="--node-address") from error
    except OSError as error:
        raise PerdureError(
            f"this machine has no route to {server}: {error}",
            remedy=f"Check {source}; --node-address sets the address at which other nodes reach this machine.",
        ) from error


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
