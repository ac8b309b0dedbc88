"""Reports: the page of a job as one file, for people who have no server to ask, and after the job has ended."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import perdure
from perdure.base.errors import Refused
from perdure.client.client import Client
from perdure.page import render
from perdure.page.course import course_of
from perdure.page.looks import JobLook, JobWatch
from perdure.page.plots import draw

_STYLE = Path(__file__).with_name("static") / "page.css"


async def report(client: Client, name: str) -> str:
    """The page of a job, in HTML that loads nothing."""
    look = await _look(client, name)
    return render.page(
        "report.html",
        root="",
        events="",
        title=name,
        name=name,
        namespace=look.summary.namespace,
        parts=render.JobPage(is_live=False).parts(look),
        roles=list(look.nodes),
        spec=render.spec_text(look.spec),
        style=_STYLE.read_text(encoding="utf-8"),
        version=perdure.__version__,
        visit=None,
    )


async def plot(client: Client, name: str, what: Collection[str]) -> str:
    """Plots of a job, as SVG."""
    look = await _look(client, name)
    assert look.status is not None
    return draw(course_of(look.status, look.incidents, now=datetime.now(UTC)), what=what, style=True)


async def _look(client: Client, name: str) -> JobLook:
    look = await JobWatch(client, name, client.namespace).look()
    if look.status is None:
        raise Refused(look.problem)
    return look
