"""The command `perdure cluster`: machines, who holds what, who waits for what, and what another node would bring."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.cli import text
from perdure.cli.common import NamespaceOption, ServerSession, out
from perdure.cli.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from perdure.contract import ClusterJob, ClusterView, Machine
    from perdure.spec.job import Backend

_OLD = timedelta(minutes=1)
_UNITS = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20))


def cluster(
    *,
    namespace: NamespaceOption = "default",
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Only the machines of this backend.", show_default=False),
    ] = None,
    here: ServerSession,
) -> None:
    """Show the machines, which jobs have nodes on them, which wait for nodes, and what another one would bring to whom.

    [dim]perdure cluster · perdure cluster -A · perdure cluster --backend kubernetes -o json[/]
    """
    from perdure.client.cluster import read_clusters

    wanted = _backends(backend)
    views = here.run(lambda client: read_clusters(client, wanted))
    if not everywhere:
        views = [within(view, {namespace}) for view in views]
    if here.json:
        here.show(views)
        return
    if backend is None:
        views = with_content(views)
    for number, view in enumerate(views):
        if number:
            out.print()
        _show(view, everywhere=everywhere)
    here = replace(here, namespace=namespace)
    waiting = next((job for view in views for job in view.jobs if job.waiting), None)
    shown = waiting or next((job for view in views for job in view.jobs), None)
    here.hint(*([f"perdure plan {shown.job}{here.flag}"] if shown is not None else []), "perdure list")


def _backends(name: str | None) -> tuple[Backend, ...]:
    # Models of the specification take longer to import than `--help` may.
    from perdure.spec.job import Backend

    if name is None:
        return tuple(Backend)
    if name not in tuple(Backend):
        raise typer.BadParameter(f"got {name!r}; expected one of {', '.join(Backend)}", param_hint="--backend")
    return (Backend(name),)


def with_content(views: list[ClusterView]) -> list[ClusterView]:
    """The views that show anything; the first one where none does."""
    return [view for view in views if view.machines_total or view.jobs or view.problem] or views[:1]


def within(view: ClusterView, namespaces: Collection[str]) -> ClusterView:
    """The view with the jobs of some namespaces only. The pods of others on machines are counted."""
    machines: list[Machine] = []
    for machine in view.machines:
        own = tuple(one for one in machine.held if one.namespace in namespaces)
        others = machine.others + sum(one.nodes for one in machine.held if one.namespace not in namespaces)
        machines.append(machine.replace(held=own, others=others))
    jobs = tuple(job for job in view.jobs if job.namespace in namespaces)
    return view.replace(machines=tuple(machines), jobs=jobs, jobs_total=len(jobs))


def facts(view: ClusterView, age: timedelta) -> str:
    """Returns the sums of a cluster in one line.

    Args:
        view: The cluster.
        age: The age of the view.
    """
    unusable = sum(shape.unusable for shape in view.shapes)
    words = [text.count(view.machines_total, "machine")]
    words += [f"{unusable} on which no node can start"] if unusable else []
    words += [f"{text.count(view.pods_waiting, 'pod')} of others wait"] if view.pods_waiting else []
    words += [f"shared for {view.sharing}"] if view.sharing is not None and any(job.shares for job in view.jobs) else []
    words.append(f"seen {text.duration(age)} ago")
    return ", ".join(words)


def warnings(view: ClusterView, age: timedelta) -> list[str]:
    """Returns why less is known of a cluster than could be."""
    found = ["no worker has looked at them since; `perdure doctor` says why"] if age > _OLD else []
    return [*found, view.problem] if view.problem else found


def _show(view: ClusterView, *, everywhere: bool) -> None:
    age = datetime.now(UTC) - view.seen_at
    out.print(f"[bold]{escape(view.backend)}[/]  {escape(facts(view, age))}")
    for warning in warnings(view, age):
        out.print(f"[yellow]warning:[/] {escape(warning)}")
    if len(view.shapes) > 1 or view.machines_total > len(view.machines):
        out.print(_shapes_table(view))
    if view.machines:
        out.print(_machines_table(view.machines, everywhere=everywhere))
    left = view.machines_total - len(view.machines)
    if left > 0:
        out.print(f"and {text.count(left, 'machine')} more, which are in the sums above", style="dim")
    if view.jobs:
        out.print(_jobs_table(view.jobs, everywhere=everywhere))


def _shapes_table(view: ClusterView) -> Rows:
    table = Rows.of("MACHINES", "EACH", "FREE", "UNUSABLE", "TAINTS")
    for shape in view.shapes:
        unusable = str(shape.unusable) if shape.unusable else ""
        taints = escape(", ".join(shape.taints))
        table.add_row(str(shape.machines), escape(amounts(shape.capacity)), str(shape.free), unusable, taints)
    return table


def _machines_table(machines: Iterable[Machine], *, everywhere: bool) -> Rows:
    table = Rows.of("MACHINE", "HAS", "FREE", "HELD BY", "")
    for machine in machines:
        held = [f"{_job_name(one.namespace, one.job, everywhere)} {one.nodes}" for one in machine.held]
        held += [f"others {machine.others}"] if machine.others else []
        notes = [note for note in (machine.problem, *machine.taints) if note]
        table.add_row(
            escape(machine.name),
            escape(amounts(machine.capacity)),
            escape(free(machine)),
            escape(", ".join(held)),
            escape(", ".join(notes)),
        )
    return table


def _jobs_table(jobs: Iterable[ClusterJob], *, everywhere: bool) -> Rows:
    table = Rows.of("JOB", "PHASE", "NODES", "WAITS FOR", "ONE MORE", "ROOM", "SHARES")
    for job in jobs:
        name = _job_name(job.namespace, job.job, everywhere)
        table.add_row(
            escape(name),
            text.phase(job.phase),
            share_of_range(job),
            escape(waits_for(job)),
            gain(job),
            "" if job.room is None else str(job.room),
            sharing(job),
        )
    return table


def free(machine: Machine) -> str:
    """Writes what is left of a machine."""
    return amounts({what: machine.free.get(what, 0) for what in machine.capacity})


def _job_name(namespace: str, job: str, everywhere: bool) -> str:
    return f"{namespace}/{job}" if everywhere else job


def share_of_range(job: ClusterJob) -> str:
    """Writes the nodes that a job has, of those that it may have."""
    return f"{job.nodes} of {job.fewest}:{job.most}" if job.fewest < job.most else f"{job.nodes} of {job.most}"


def waits_for(job: ClusterJob) -> str:
    """Writes how many nodes a job waits for, and why."""
    return f"{text.count(job.waiting, 'node')}: {job.waits_for}".removesuffix(": ") if job.waiting else ""


def gain(job: ClusterJob) -> str:
    """Writes what another unit of nodes would bring to a job."""
    if job.gain is not None:
        return f"{job.gain:+.0%} speed"
    may_have_more = job.fewest < job.most and job.nodes and job.nodes + job.unit <= job.most
    return "not measured" if may_have_more else ""


def sharing(job: ClusterJob) -> str:
    """Writes whether a job shares its cluster, and with what advice."""
    if not job.shares:
        return ""
    return "yes" if job.advised is None else f"{job.advised.nodes} advised"


def amounts(found: Mapping[str, float]) -> str:
    """Writes quantities of resources for people: `8 gpu, 96 cpu, 1.0 Ti memory`."""
    order = sorted(found, key=lambda what: (what in ("cpu", "memory"), what))
    return ", ".join(f"{_amount(what, found[what])} {what.rpartition('/')[2]}" for what in order)


def _amount(what: str, number: float) -> str:
    if what != "memory":
        return f"{number:g}"
    unit, size = next(((unit, size) for unit, size in _UNITS if number >= size), ("Mi", 2**20))
    return f"{number / size:.1f} {unit}"
