"""The command that sends a sample of a job's notifications."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.cli.common import ServerSession, out

if TYPE_CHECKING:
    from perdure.contract import NotifierReport


def notify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job, in YAML or JSON.", show_default=False)],
    *,
    here: ServerSession,
) -> None:
    """Send a sample to all whom a job file's `notifications` name; starts no job.

    A worker sends it, as it would for the job: with its network, its secrets, and the site's policy. Ends with 3 if one
    of them did not take it.

    [dim]perdure notify job.yaml · perdure notify job.yaml -o json[/]
    """
    from perdure.base.errors import ExitCode, Refused

    report = here.run(lambda client: client.send_sample(file))
    if not report.targets:
        raise Refused(f"{file} has no notifications", remedy="See docs/notifications.md.")
    if here.json:
        here.show(report)
    else:
        _print(report)
    if any(one.given_up for one in report.targets):
        raise typer.Exit(ExitCode.INFRASTRUCTURE)


def _print(report: NotifierReport) -> None:
    for one in report.targets:
        words = "[green]delivered[/]" if one.sent else f"[red]failed[/]  {escape(one.last_error)}"
        out.print(f"[bold]{one.name}[/]  {words}")
