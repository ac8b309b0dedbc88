"""`perdure ticket`: lets machines that do not reach Temporal join a job through the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.base.words import count
from perdure.cli.common import JobArgument, Session, out

if TYPE_CHECKING:
    from datetime import timedelta

    from perdure.client.client import Client
    from perdure.contract import GatewayFacts
    from perdure.join.ticket_file import TicketFile


def ticket(
    name: JobArgument,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="The most nodes that machines with this ticket may be at a time.")
    ] = 1,
    expires: Annotated[
        str,
        typer.Option("--expires", help="Until then, new machines are admitted; later, only those that joined before."),
    ] = "24h",
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Where to write the ticket.", show_default="NAME.ticket"),
    ] = None,
    gateway: Annotated[
        str,
        typer.Option(
            "--gateway", metavar="HOST:PORT", help="Where the machines reach the gateway.", show_default="the site's"
        ),
    ] = "",
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority",
            metavar="FILE",
            help="The certificate of the authority that issues the gateway's certificate.",
            show_default="the site's",
        ),
    ] = None,
    server_name: Annotated[
        str,
        typer.Option(
            "--server-name",
            metavar="NAME",
            help="The name in the gateway's certificate, where --authority issued the site's own.",
            show_default=False,
        ),
    ] = "",
    revoke: Annotated[
        str, typer.Option("--revoke", metavar="ID", help="Withdraw this ticket, and its machines' places, instead.")
    ] = "",
    *,
    here: Session,
) -> None:
    """Make a ticket, with which machines that cannot reach Temporal join a job through the gateway.

    Anyone who has the file can add machines to that job, and nothing else: pass it on as you would a password.

    [dim]perdure ticket llama --nodes 8 --expires 12h · perdure ticket llama --revoke 3f2a90c1d4e5[/]
    """
    from perdure.spec.durations import parse_duration

    if revoke:
        accepted = here.run(lambda client: client.revoke_ticket(name, revoke))
        if here.json:
            here.show(accepted)
        else:
            out.print(accepted.message, markup=False)
        return
    try:
        lifetime = parse_duration(expires)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--expires") from None
    path = file or Path(f"{name}.ticket")
    if path.exists():
        raise typer.BadParameter(f"{path} exists; remove it or name another file", param_hint="--file")
    made = here.run(
        lambda client: _make(
            client,
            name,
            nodes=nodes,
            lifetime=lifetime,
            gateway=gateway,
            authority=authority,
            server_name=server_name,
        )
    )
    made.write(path)
    _show(here, made, path)


def _show(here: Session, made: TicketFile, path: Path) -> None:
    if here.json:
        here.show({"file": str(path), **made.model_dump(mode="json", exclude={"secret", "authority"})})
        return
    places = count(made.nodes, "node")
    out.print(f"ticket {made.id} for {places} of {made.job}, until {made.expires_at:%Y-%m-%d %H:%M} UTC: {path}")
    where = "" if made.gateway else " --gateway HOST:PORT"
    here.hint(f"perdure join {made.job} --ticket {path}{where}", f"perdure ticket {made.job} --revoke {made.id}")


async def _make(
    client: Client,
    name: str,
    *,
    nodes: int,
    lifetime: timedelta,
    gateway: str,
    authority: Path | None,
    server_name: str,
) -> TicketFile:
    from perdure.base.credentials.names import GATEWAY_NAME
    from perdure.join.ticket_file import TicketFile, gateway_address

    site = await _gateway_of(client, authority, server_name)
    address = gateway_address(gateway) if gateway else site.address
    issued = await client.issue_ticket(name, nodes=nodes, lifetime=lifetime)
    return TicketFile(
        job=name,
        namespace=client.namespace,
        id=issued.id,
        secret=issued.secret,
        nodes=issued.nodes,
        expires_at=issued.expires_at,
        gateway=address,
        authority=site.authority,
        server_name=site.server_name or GATEWAY_NAME,
    )


async def _gateway_of(client: Client, authority: Path | None, server_name: str) -> GatewayFacts:
    """How machines reach the gateway, as a worker of the site or the command line says.

    Raises:
        PerdureError: if neither does.
    """
    from temporalio.client import WorkflowFailureError
    from temporalio.service import RPCError

    from perdure.base.errors import PerdureError
    from perdure.client.site import read_site
    from perdure.contract import GatewayFacts

    if authority is not None:
        try:
            return GatewayFacts(authority=authority.read_text(encoding="ascii"), server_name=server_name)
        except (OSError, UnicodeDecodeError) as error:
            raise PerdureError(
                f"--authority: {authority} cannot be read: {error}", remedy="Name a file in PEM."
            ) from error
    temporal = await client.connect()
    try:
        facts = (await read_site(temporal, task_queue=client.endpoint.task_queue)).gateway
    except (WorkflowFailureError, RPCError):
        facts = None
    if facts is None:
        raise PerdureError(
            "no worker of this site says how machines reach its gateway",
            remedy="Name the certificate of its authority with --authority (ca.crt of its key ring), or set "
            "PERDURE_GATEWAY_AUTHORITY for the workers. See docs/gateway.md.",
        )
    return facts
