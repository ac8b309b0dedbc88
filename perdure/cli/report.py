"""The commands `perdure report` and `perdure plot`, which write a job's course to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.common import JobArgument, ReadingSession, out

FileSession = Annotated[ReadingSession, "namespace", "address", "archive"]
"""The session of commands whose output is a file."""

OutputFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write.", show_default=False)
]


def report(name: JobArgument, output: OutputFile = None, *, here: FileSession) -> None:
    """Write a report of a job: its course, incidents, nodes and specification, in one HTML file that loads nothing. It
    can be made while the job runs and after it has ended.

    [dim]perdure report llama-8b-sft · perdure report llama-8b-sft -o report.html[/]
    """
    from perdure.page.report import report

    path = output or Path(f"{name}.html")
    path.write_text(here.run(lambda client: report(client, name)), encoding="utf-8")
    out.print(f"{path}: the report of {name}", markup=False)


def plot(
    name: JobArgument,
    what: Annotated[
        str, typer.Option("--what", help="The plots, from top to bottom: worlds, steps, throughput, loss.")
    ] = "worlds,steps,throughput,loss",
    output: OutputFile = None,
    *,
    here: FileSession,
) -> None:
    """Draw a job's course as SVG: the nodes of its worlds, its steps, speed and loss over time, with each incident.

    [dim]perdure plot llama-8b-sft · perdure plot llama-8b-sft --what throughput,loss -o loss.svg[/]
    """
    from perdure.page.plots import WHAT
    from perdure.page.report import plot

    names = [word.strip() for word in what.split(",") if word.strip()]
    if not names or not set(names) <= set(WHAT):
        raise typer.BadParameter(f'got "{what}"; expected some of {", ".join(WHAT)}', param_hint="--what")
    path = output or Path(f"{name}.svg")
    if path.suffix.lower() != ".svg":
        raise typer.BadParameter(f"{path}: plots are SVG; name a file that ends with .svg", param_hint="--output")
    path.write_text(here.run(lambda client: plot(client, name, names)), encoding="utf-8")
    out.print(f"{path}: {', '.join(names)} of {name}", markup=False)
