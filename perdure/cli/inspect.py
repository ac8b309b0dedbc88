"""Commands that show jobs: list, status, nodes, explain."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.cli import text
from perdure.cli.common import (
    JobArgument,
    NamespaceOption,
    OnlyRoleOption,
    ReadingSession,
    ServerSession,
    out,
    run_async,
    show_link,
    warn,
)
from perdure.cli.completion import complete_incident
from perdure.cli.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from perdure.client.client import Client
    from perdure.client.views import JobSummary, TaskFailure
    from perdure.contract import ArchiveReport, AutoResources, IncidentView, JobStatus, NodeView, Progress, TargetReport


def list_(
    *,
    namespace: NamespaceOption = "default",
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    running: Annotated[bool, typer.Option("--running", help="Only jobs that have not ended.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The most jobs to list, the newest first.")] = 50,
    archive: Annotated[
        str | None,
        typer.Option(
            "--archive",
            metavar="URL",
            help="List the jobs that this place keeps, outputs.archive of their specifications, and not Temporal's.",
            show_default=False,
        ),
    ] = None,
    here: ServerSession,
) -> None:
    """List jobs, the newest first; with --archive, those that an archive keeps.

    [dim]perdure list · perdure list --running -A · perdure list -o json · perdure list --archive s3://ml-archive/jobs[/]
    """
    from perdure.client import pauses, task_failures

    here = replace(here, namespace=namespace)
    if archive is None:
        jobs = here.read(lambda client: client.list(everywhere=everywhere, running=running, limit=limit))
    else:
        jobs = _kept(archive, namespace, everywhere=everywhere, running=running, limit=limit)
    if here.json:
        here.show(jobs)
        return
    place, option = ("", "") if archive is None else (f" at {archive}", f" --archive {shlex.quote(archive)}")
    if not jobs:
        out.print(f"no jobs{place}" if everywhere else f"no jobs in the namespace {namespace}{place}", markup=False)
        first = [] if archive else ["perdure run --nodes 2 -- torchrun train.py"]
        here.hint(*first, *([] if everywhere else [f"perdure list -A{option}"]))
        return
    out.print(_jobs_table(jobs, everywhere=everywhere, of_archive=archive is not None))
    for job in jobs:
        if job.pause:
            out.print(f"[bold yellow]{escape(job.name)}[/]  {escape(pauses.describe_pauses([job.pause])[0])}")
        if job.task_failure:
            out.print(f"[bold red]{escape(job.name)}[/]  {escape(task_failures.explain(job.task_failure))}")
    flag = here.flag if jobs[0].namespace == namespace else f" -n {jobs[0].namespace}"
    here.hint(
        f"perdure status {jobs[0].name}{flag}" + ("" if archive is None else f" --archive {shlex.quote(archive)}")
    )


def _kept(url: str, namespace: str, *, everywhere: bool, running: bool, limit: int) -> list[JobSummary]:
    """The jobs of an archive. A record that cannot be read hides no other one."""
    from perdure.client.archive import ArchivedJobs

    kept = ArchivedJobs(url).kept(namespace=namespace, everywhere=everywhere, running=running)
    jobs, problems = run_async(kept)
    for problem in problems:
        warn(f"left out: {problem}")
    return list(jobs[:limit])


def _jobs_table(jobs: list[JobSummary], *, everywhere: bool, of_archive: bool = False) -> Rows:
    table = Rows.of(
        "NAME", *(["NAMESPACE"] if everywhere else []), "PHASE", "RANKS", "RESTARTS", "OWNER", "AGE", "TOOK"
    )
    now = datetime.now(UTC)
    for job in jobs:
        table.add_row(
            escape(job.name),
            *([escape(job.namespace)] if everywhere else []),
            # Whether a job of which an archive has only the begin still runs is not known to it.
            "[yellow]not complete[/]" if of_archive and job.finished_at is None else _phase(job),
            "" if job.world_size is None else str(job.world_size),
            "" if job.restarts is None else str(job.restarts),
            escape(job.owner),
            text.age(job.started_at, now),
            text.duration(job.finished_at - job.started_at) if job.finished_at else "",
        )
    return table


def _phase(job: JobSummary) -> str:
    """The job's phase; the last known one if the job can decide nothing, and why."""
    shown = text.phase(job.phase or "running")
    shown += " [bold yellow](paused)[/]" if job.pause else ""
    return shown + (" [bold red](fails)[/]" if job.task_failure else "")


def status(name: JobArgument, role: OnlyRoleOption = None, *, here: ReadingSession) -> None:
    """Show a job's phase and its reason, speed, interruptions, and what happens next; with --role, those of one role.

    [dim]perdure status llama-8b-sft -n nlp · perdure status grpo --role rollout · perdure status grpo -o json[/]
    """
    here.read(lambda client: _status(client, here, name, role))


async def _status(client: Client, here: ReadingSession, name: str, role: str | None) -> None:
    from perdure.base.errors import NoWorker
    from perdure.client.failing_activities import describe_failing
    from perdure.client.hot_nodes import find_hot_nodes
    from perdure.client.pauses import describe_pauses, unpause_command
    from perdure.client.resource_use import with_peaks
    from perdure.client.views import all_warnings, closed, overall_progress

    try:
        known = closed(await client.status(name, role=role), await client.describe(name))
    except NoWorker:
        if not here.json:
            summary = await client.describe(name)
            out.print(f"[bold]{escape(name)}[/]  {_phase(summary)}, as the server knows it")
        raise
    if role is not None:
        known = only_role(known, role)
    nodes = await client.nodes(name, role=known.role)
    progress = overall_progress(nodes, known)
    pauses, task_failures, failing_activities = await client.troubles(known)
    failures, failing = _describe_task_failures(task_failures), describe_failing(failing_activities)
    hot = await find_hot_nodes(client, known)
    warnings = (*describe_pauses(pauses), *failures, *failing, *all_warnings(nodes, known), *hot)
    known = with_peaks(known.model_copy(update={"progress": progress, "warnings": warnings}), nodes)
    if pauses:
        known = known.model_copy(update={"next_action": f"unpause it: {unpause_command(pauses[0])}"})
    if here.json:
        here.show(known)
        return
    incidents = [one for one in await client.incidents(name) if role in (None, one.role)]
    out.print(_headline(known, progress))
    for line in text.tree(known.by_role):
        out.print(line)
    for label, words in facts(known, progress, nodes, incidents):
        out.print(f"[bold]{label:<8}[/] {escape(words)}")
    if known.notifies:
        for line in notified((await client.notifications(known)).targets):
            out.print(f"[bold]{'NOTIFIED':<8}[/] {escape(line)}")
    if known.archive:
        out.print(f"[bold]{'ARCHIVE':<8}[/] {escape(archived(await client.archive(known), known))}")
    page = client.endpoint.workflow_page(f"job/{known.namespace}/{known.name}")
    if page:
        show_link(f"{'UI':<8} ", page)
    here.hint(*_next_commands(known, here.flag))


def archived(report: ArchiveReport, status: JobStatus) -> str:
    """Where the job is archived, and whether that has worked."""
    if report.problem:
        return f"could not be written: {report.problem}"
    if report.complete_at is not None:
        return f"complete, at {report.folder}"
    if status.finished_at is not None:
        return f"is being written to {status.archive}"
    return f"at the end, to {status.archive}" + ("" if report.begun_at else ", which was not written to yet")


def notified(targets: Iterable[TargetReport]) -> Iterator[str]:
    """How the deliveries of a job's notifications are, a line for each target."""
    for one in targets:
        counts = {"delivered": one.sent, "waiting": one.waiting, "given up": one.given_up, "dropped": one.dropped}
        words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        yield f"{one.name}: {words or 'nothing to tell yet'}" + (f"; {one.last_error}" if one.last_error else "")


def only_role(status: JobStatus, role: str) -> JobStatus:
    """The status of one role of several, with its own phase and reason in place of the job's."""
    own = {one.name: one for one in status.by_role}.get(role)
    if own is None:
        return status
    phase, reason = (status.phase, status.reason) if status.finished_at else (own.phase, own.reason)
    return status.model_copy(update={"phase": phase, "reason": reason, "by_role": (own,)})


def _describe_task_failures(failures: tuple[TaskFailure, ...]) -> list[str]:
    from perdure.client import task_failures

    return [f"{found.workflow_id}: {task_failures.explain(found)}. {task_failures.remedy(found)}" for found in failures]


def _headline(status: JobStatus, progress: Progress | None) -> str:
    parts = [f"[bold]{escape(status.name)}[/]  {text.phase(status.phase)}, {text.nodes(status)}"]
    if progress:
        parts.append(text.step(progress))
        if left := text.eta(progress):
            parts.append(f"ETA {left}")
    if status.finished_at:
        parts.append(f"took {text.duration(status.finished_at - status.started_at)}")
    else:
        parts.append(f"for {text.age(status.started_at)}")
    return "   ".join(parts)


def facts(
    status: JobStatus, progress: Progress | None, nodes: tuple[NodeView, ...], incidents: list[IncidentView]
) -> list[tuple[str, str]]:
    """The lines of `perdure status` below its first one, by their labels."""
    incident = status.last_incident
    why = [status.reason] if status.reason else []
    # What stopped the job is the reason already.
    if incident and incident.title not in status.reason and not incident.stopped:
        why.append(text.incident_line(incident))
    newest = incidents[-1] if incidents else None
    if (
        newest
        and newest.observation
        and not status.finished_at
        and newest.number > (incident.number if incident else 0)
    ):
        why.append(f"{text.incident_line(newest)}, {text.age(newest.started_at)} ago")
    speed: list[str] = []
    idle = "" if status.finished_at else text.stall(status, nodes)
    if progress:
        speed = [words for words in (text.rate(progress),) if words]
        speed += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
        if progress.last_step_at and not status.finished_at and not idle:
            speed.append(f"last step {text.age(progress.last_step_at)} ago")
    speed += [idle] if idle else []
    if not status.finished_at and any(node.unsplit_steps for node in nodes):
        speed.append("slow ranks are not seen: steps are not split into computation and waiting")
    lost = text.lost_time(incidents, status.finished_at or datetime.now(UTC))
    interruptions = sum(one.observation is None for one in incidents)
    cost = f"{text.count(interruptions, 'interruption')}, {text.duration(lost)} lost"
    good = cost if interruptions or lost else "" if idle else "uninterrupted"
    good = "; ".join(part for part in (good, idle) if part)
    window = text.duration(status.restart_window)
    total = text.count(max(status.restarts_total, status.restarts), "restart")
    good += f"; {total}, {status.restarts}/{status.max_restarts} per {window}; generation {status.generation}"
    present = [node for node in nodes if node.phase in ("CREATED", "JOINED", "READY")]
    leases = f"leases {sum(node.reachable for node in present)}/{len(present)}"
    control = f"temporal ok   worker ok   {leases}   {text.protection(status)}"
    return [
        (label, words)
        for label, words in (
            ("WHY", "; ".join(why)),
            ("SPEED", "   ".join(speed)),
            ("GOOD", good),
            ("GOAL", text.goal(status)),
            ("SAVED", text.checkpoint(status.checkpoint)),
            ("AUTO", _auto(status.auto) if status.auto else ""),
            ("USED", text.peaks(status.peaks) if status.peaks else ""),
            *(("UNUSED", text.unused(one)) for one in status.unused),
            *(("ROOM", text.smaller(one)) for one in status.smaller),
            ("CODE", f"{status.workdir_digest[:19]}, uploaded with the job" if status.workdir_digest else ""),
            ("CONTROL", control if not status.finished_at else "" if status.protected else text.protection(status)),
            *(("WARNING", words) for words in _warnings(status)),
            ("NEXT", "" if status.finished_at else status.next_action),
        )
        if words
    ]


def _auto(chosen: AutoResources) -> str:
    from perdure.workflows.policy.capacity.past_use import words

    return words(chosen)


def _warnings(status: JobStatus) -> tuple[str, ...]:
    """The warnings; of a job that has ended, what it has not processed, and what is left of its nodes."""
    if not status.finished_at:
        return status.warnings
    return (*(one.summary for one in status.unprocessed), *status.left)


def _next_commands(status: JobStatus, flag: str) -> list[str]:
    name = status.name
    commands = [f"perdure explain {name}{flag}"] if status.last_incident else []
    if status.finished_at:
        return [*commands, f"perdure logs {name}{flag}"]
    if status.phase == "HELD":
        return [*commands, f"perdure shell {name}{flag}", f"perdure cancel {name}{flag}"]
    if status.phase == "SUSPENDED":
        return [*commands, f"perdure resume {name}{flag}"]
    return [*commands, f"perdure watch {name}{flag}"]


def nodes(name: JobArgument, role: OnlyRoleOption = None, *, here: ReadingSession) -> None:
    """Show the job's nodes, with the latest report of each agent.

    [dim]perdure nodes llama-8b-sft -n nlp · perdure nodes grpo --role rollout[/]
    """
    by_role = here.read(lambda client: _nodes(client, name, role))
    several = role is None and len(by_role) > 1
    if here.json:
        rows = [(one, node) for one, nodes in by_role.items() for node in nodes]
        here.show([{"role": one} | node.model_dump(mode="json") if several else node for one, node in rows])
        return
    columns = ("NODE", "STATE", "RANK", "HOST", "STEP", "RATE", "LOSS", "CPU", "MEMORY", "SINCE", "REASON")
    table = Rows.of(*(["ROLE"] if several else []), *columns)
    views = [(one, node) for one, nodes in by_role.items() for node in nodes]
    for one, node in views:
        symbol, style, word = text.node_state(node)
        progress, metrics = node.progress, node.metrics
        table.add_row(
            *([escape(one)] if several else []),
            f"{node.rank}" + (f".{node.incarnation}" if node.incarnation > 1 else ""),
            f"[{style}]{symbol} {word}[/]",
            "" if node.group_rank is None else str(node.group_rank),
            escape(node.host),
            f"{progress.step:,}" if progress else "",
            text.rate(progress) if progress else "",
            f"{progress.loss:.4g}" if progress and progress.loss is not None else "",
            f"{metrics.cpu_cores:.1f}" if metrics and metrics.cpu_cores is not None else "",
            text.bytes_(metrics.memory_bytes) if metrics and metrics.memory_bytes is not None else "",
            text.age(node.since),
            escape(node.reason or (f"avoids {', '.join(node.avoids)}" if node.avoids else "")),
        )
    out.print(table if views else f"{name} has no nodes now")
    first = f" --role {views[0][0]}" if several and views else ""
    here.hint(
        f"perdure logs {name}{here.flag}{first} --node {views[0][1].rank if views else 0}",
        *([f"perdure watch {name}{here.flag}"] if here.archive is None else []),
    )


async def _nodes(client: Client, name: str, role: str | None) -> dict[str, tuple[NodeView, ...]]:
    """The nodes of one role, or of each."""
    roles = (await client.status(name)).roles if role is None else (role,)
    return {one: await client.nodes(name, role=one) for one in roles}


def explain(
    name: JobArgument,
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="[N]",
            help="The incident's number; default: the last.",
            show_default=False,
            autocompletion=complete_incident,
        ),
    ] = None,
    role: OnlyRoleOption = None,
    *,
    here: ReadingSession,
) -> None:
    """Explain an interruption: what was seen, what it means, what was done, and what was not.

    [dim]perdure explain llama-8b-sft · perdure explain llama-8b-sft 3 -n nlp · perdure explain grpo --role rollout[/]
    """
    from perdure.base.errors import PerdureError
    from perdure.cli.explain import explanation, table_line, with_role_named

    incidents, status, hot = here.read(lambda client: _story(client, name, role))
    waiting = status.reason if status.phase in ("STARTING", "WAITING") else ""
    chosen = [incident for incident in incidents if number is None or incident.number == number]
    if number is not None and not chosen:
        known = ", ".join(str(incident.number) for incident in incidents) or "none"
        raise PerdureError(f"{name} has no incident {number}; its incidents are: {known}")
    if here.json:
        here.show(chosen if number is None else chosen[0])
        return
    if not incidents:
        out.print(f"{name}{f', role {role},' if role else ''} was never interrupted")
        _tell_rest(waiting, status, hot)
        here.hint(f"perdure status {name}{here.flag}")
        return
    several = len(status.roles) > 1
    if several:
        incidents, chosen = list(map(with_role_named, incidents)), list(map(with_role_named, chosen))
    if number is None:
        for incident in incidents[:-1]:
            out.print(table_line(incident), markup=False)
    ended = status.phase if status.finished_at else None
    out.print(explanation(chosen[-1], job=name, flag=here.flag, ended=ended, several_roles=several))
    if number is None:
        _tell_rest(waiting, status, hot)
    others = [incident.number for incident in incidents if incident.number != chosen[-1].number]
    here.hint(
        *([f"perdure explain {name} {others[-1]}{here.flag}"] if others else []), f"perdure status {name}{here.flag}"
    )


async def _story(client: Client, name: str, role: str | None) -> tuple[list[IncidentView], JobStatus, tuple[str, ...]]:
    """The interruptions of the job, or of one of its roles, its status, and what is said of its hot nodes."""
    from perdure.client.hot_nodes import find_hot_nodes
    from perdure.client.views import closed

    status = closed(await client.status(name, role=role), await client.describe(name))
    incidents = [one for one in await client.incidents(name) if role in (None, one.role)]
    return incidents, status, await find_hot_nodes(client, status if role is None else only_role(status, role))


def _tell_rest(waits: str, status: JobStatus, hot: tuple[str, ...]) -> None:
    """Prints what the job waits for now, or how it has ended, what slows it down, and which samples no rank will
    process."""
    if status.finished_at and not (status.last_incident and status.last_incident.stopped):
        out.print(f"[bold]{'END':<6}[/]{status.phase.lower()}: {escape(status.reason)}")
    if waits:
        out.print(f"[bold]{'NOW':<6}[/]waits: {escape(waits)}")
    for words in hot:
        out.print(f"[bold]{'NOW':<6}[/]{escape(words)}")
    for one in status.unprocessed:
        out.print(f"[bold]{'DATA':<6}[/]{escape(one.summary)}")
