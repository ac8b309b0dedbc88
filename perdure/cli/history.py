"""The command `perdure history`: jobs of the past, which failures began where, and what jobs usually need."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.base.errors import PerdureError
from perdure.cli import text
from perdure.cli.common import NamespaceOption, ServerSession, out
from perdure.cli.rows import Rows

if TYPE_CHECKING:
    from perdure.contract import HistoryAnswer, HistoryRequest, HostFailures, JobShape, PastJob, RoleNeeds


def history(
    *,
    namespace: NamespaceOption = "default",
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="NAME", help="Only jobs like this one of the past.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="Only jobs like the one of this specification.", show_default=False),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", help="What jobs with this image usually need.", show_default=False),
    ] = None,
    by_host: Annotated[
        bool, typer.Option("--failures-by-host", help="The machines on which failures began, instead of jobs.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only jobs of the last 30d, for example.", show_default=False),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", min=0, help="The price of a node for an hour, for costs.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="The most jobs to show.")] = 50,
    here: ServerSession,
) -> None:
    """Show jobs of the past, also those that Temporal has forgotten: what became of them, and what they took.

    [dim]perdure history --like llama-8b-sft · perdure history --failures-by-host --since 30d[/]
    """
    from perdure.contract import HistoryRequest

    if like is not None and file is not None:
        raise PerdureError("--like and -f: give one of them")
    request = HistoryRequest(
        namespace=None if everywhere else namespace,
        since=_since(since) if since is not None else None,
        image=image,
        like=like,
        shape=_shape(file) if file is not None else None,
        limit=limit,
    )
    here = replace(here, namespace=namespace)
    answer = here.run(lambda client: client.history(request))
    if here.json:
        here.show(answer)
        return
    if not answer.found:
        out.print(f"the history has no such jobs{_complete(answer)}")
        here.hint("perdure list")
        return
    if by_host:
        out.print(_hosts_table(answer.hosts) if answer.hosts else "no failure whose machine is known")
    elif image is not None:
        out.print(_needs_table(answer.needs))
    else:
        out.print(_jobs_table(answer.jobs, everywhere=everywhere, alike=_alike(request), price=price))
    shown = len(answer.jobs)
    if shown < answer.found and not by_host and image is None:
        out.print(f"{shown} of {answer.found} jobs: --limit shows more", style="dim")


def _since(given: str) -> datetime:
    from perdure.spec.durations import parse_duration

    try:
        return datetime.now(UTC) - parse_duration(given)
    except (ValueError, OverflowError) as error:
        raise PerdureError(f"--since {given}: expected a time such as 12h or 30d") from error


def _shape(file: Path) -> JobShape:
    from perdure.contract import JobShape
    from perdure.spec.load import validate_file

    job, _ = validate_file(file)
    return JobShape.of(job)


def _alike(request: HistoryRequest) -> bool:
    return request.like is not None or request.shape is not None


def _complete(answer: HistoryAnswer) -> str:
    return f"; it is complete until {text.clock(answer.recorded_at)}" if answer.recorded_at is not None else ""


def _jobs_table(jobs: tuple[PastJob, ...], *, everywhere: bool, alike: bool, price: float | None) -> Rows:
    table = Rows.of(
        "NAME",
        *(["NAMESPACE"] if everywhere else []),
        *(["SAME"] if alike else []),
        *("PHASE", "NODES", "STEP", "RESTARTS", "LOST", "TOOK", "NODE-HOURS"),
        *(["COST"] if price is not None else []),
        "AGE",
    )
    now = datetime.now(UTC)
    for job in jobs:
        table.add_row(
            escape(job.name),
            *([escape(job.namespace)] if everywhere else []),
            *([f"{job.alike} of 3"] if alike else []),
            text.phase(job.phase),
            str(job.nodes or ""),
            "" if job.step_seconds is None else f"{job.step_seconds:.3g} s",
            str(job.restarts),
            text.duration(timedelta(seconds=job.lost_seconds)) if job.lost_seconds else "",
            text.duration(job.finished_at - job.started_at) if job.finished_at else "",
            f"{job.node_hours:,.2f}",
            *([f"{job.node_hours * price:,.2f}"] if price is not None else []),
            text.age(job.started_at, now),
        )
    return table


def _hosts_table(hosts: tuple[HostFailures, ...]) -> Rows:
    table = Rows.of("HOST", "FAILURES", "JOBS", "CLASSES", "LOST", "LAST")
    now = datetime.now(UTC)
    for host in hosts:
        classes = ", ".join(f"{failure} {number}" for failure, number in host.classes.items())
        lost = text.duration(timedelta(seconds=host.lost_seconds))
        last = text.age(host.last_at, now)
        table.add_row(escape(host.host), str(host.failures), str(host.jobs), classes, lost, last)
    return table


def _needs_table(needs: tuple[RoleNeeds, ...]) -> Rows:
    table = Rows.of("IMAGE", "COMMAND", "JOBS", "SUCCEEDED", "NODES", "MEMORY", "CPU", "GPU-MEMORY", "TOOK")
    for one in needs:
        took = text.duration(timedelta(seconds=one.seconds)) if one.seconds is not None else ""
        share = f"{one.succeeded / one.jobs:.0%}"
        used = (
            text.bytes_(one.memory) if one.memory else "",
            f"{one.cpu:.3g}" if one.cpu else "",
            text.bytes_(one.gpu_memory) if one.gpu_memory else "",
        )
        table.add_row(escape(one.image), escape(one.command), str(one.jobs), share, f"{one.nodes:g}", *used, took)
    return table
