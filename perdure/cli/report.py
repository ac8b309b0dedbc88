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
    """Draw a job's course: the nodes of its worlds, its steps, speed and loss over time, with each incident. The file's
    name chooses the format: .svg; with the extra plots also .png and .pdf.

    [dim]perdure plot llama-8b-sft · perdure plot llama-8b-sft --what throughput,loss -o loss.png[/]
    """
    from perdure.page.figures import FORMATS
    from perdure.page.plots import WHAT
    from perdure.page.report import plot

    names = [word.strip() for word in what.split(",") if word.strip()]
    if not names or not set(names) <= set(WHAT):
        raise typer.BadParameter(f'got "{what}"; expected some of {", ".join(WHAT)}', param_hint="--what")
    path = output or Path(f"{name}.svg")
    endings = [f".{one}" for one in ("svg", *FORMATS)]
    if path.suffix.lower() not in endings:
        expected = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise typer.BadParameter(f"got {path}; expected a file that ends with {expected}", param_hint="--output")
    here.run(lambda client: plot(client, name, names, path))
    out.print(f"{path}: {', '.join(names)} of {name}", markup=False)
