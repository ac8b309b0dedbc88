"""Reports: the page of a job as one file, for people who have no server to ask, and after the job has ended."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import perdure
from perdure.base.errors import Refused
from perdure.client.archive import ArchivedJobs
from perdure.client.client import Client
from perdure.contract import ArchivedJob
from perdure.page import render
from perdure.page.archived import look_of
from perdure.page.course import course_of
from perdure.page.figures import write_figure
from perdure.page.looks import JobLook, JobWatch
from perdure.page.plots import draw

_STYLE = Path(__file__).with_name("static") / "page.css"


async def report(client: Client, name: str) -> str:
    """The page of a job, in HTML that loads nothing."""
    return _render(await _look(client, name))


def report_of(record: ArchivedJob) -> str:
    """The page of a job of which an archive keeps this."""
    return _render(look_of(record))


def _render(look: JobLook) -> str:
    return render.page(
        "report.html",
        root="",
        events="",
        title=look.summary.name,
        name=look.summary.name,
        namespace=look.summary.namespace,
        parts=render.JobPage(is_live=False).parts(look),
        roles=list(look.nodes),
        spec=render.spec_text(look.spec),
        style=_STYLE.read_text(encoding="utf-8"),
        version=perdure.__version__,
        visit=None,
    )


async def plot(client: Client, name: str, what: Collection[str], path: Path) -> None:
    """Writes plots of a job to a file, in the format that its suffix names: SVG, or one of `FORMATS`.

    Raises:
        Refused: if that format needs a package that is not installed.
    """
    look = await _look(client, name)
    assert look.status is not None
    course = course_of(look.status, look.incidents, now=datetime.now(UTC))
    if path.suffix.lower() == ".svg":
        path.write_text(draw(course, what=what, style=True), encoding="utf-8")
    else:
        write_figure(course, path, what=what, title=f"{look.status.namespace}/{name}")


async def _look(client: Client, name: str) -> JobLook:
    if isinstance(client, ArchivedJobs):
        await client.status(name)  # Refuses a record that is not complete.
        return look_of(await client.archived(name))
    look = await JobWatch(client, name, client.namespace).look()
    if look.status is None:
        raise Refused(look.problem)
    return look
