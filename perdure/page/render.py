"""Turns looks into HTML, part by part, so that only parts that have changed are sent to a page.

All text comes from templates that escape it, without control characters: names, messages and log lines are written by
training code, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.text import Text

from perdure.cli import cluster as machines
from perdure.cli import plan, text
from perdure.cli.explain import explanation, with_role_named
from perdure.cli.inspect import archived, facts, notified
from perdure.cli.terminal import printable
from perdure.contract import IncidentView, JobStatus, NodeView
from perdure.page.course import course_of
from perdure.page.looks import JobLook, JobRow, ListLook
from perdure.page.plots import draw

_MOST_IN_TABLE = 64
"""Nodes that have a row each; of more, the map of nodes shows each one's detail."""

_SHADES = 5
"""Shades of step times in the map of nodes, from as fast as the median to half as slow again."""

_DRAWN_EVERY = timedelta(seconds=5)
"""Time between two drawings of the same course, which is a little longer each time."""

MadeT = TypeVar("MadeT")


@dataclass
class Parts:
    """The content of a page: parts by their element's ID, and lists of elements, each by its own."""

    parts: dict[str, str] = field(default_factory=dict[str, str])
    lists: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def since(self, before: Parts | None) -> dict[str, Any]:
        """What a page that shows `before` needs to show this."""
        known = before or Parts()
        message: dict[str, Any] = {
            "parts": {name: html for name, html in self.parts.items() if known.parts.get(name) != html}
        }
        lists: dict[str, Any] = {}
        for name, items in self.lists.items():
            shown = known.lists.get(name, {})
            fresh = {key: html for key, html in items.items() if shown.get(key) != html}
            if fresh or list(items) != list(shown):
                lists[name] = {"items": fresh} | ({"order": list(items)} if list(items) != list(shown) else {})
        return message | {"lists": lists}


def _clean(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


environment = Environment(
    loader=PackageLoader("perdure.page"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_clean,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.globals.update(text=text, machines=machines)  # pyrefly: ignore[bad-argument-type]


def page(template: str, **values: Any) -> str:
    """A whole page."""
    return environment.get_template(template).render(now=datetime.now(UTC), **values)


def part(name: str, **values: Any) -> str:
    """One part of a page, by its macro."""
    macro = getattr(environment.get_template("parts.html").module, name)
    return str(macro(**values))


class ListPage:
    """The parts of the list of jobs. Only rows that have changed are made again."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[dict[str, Any], str]] = {}

    def parts(self, look: ListLook) -> Parts:
        """What the page shows of a look."""
        rows: dict[str, tuple[dict[str, Any], str]] = {}
        for row in look.jobs:
            key, values = _key(row), _row(row)
            known = self._rows.get(key)
            rows[key] = known if known and known[0] == values else (values, part("job_row", **values))
        self._rows = rows
        return Parts(
            {
                "problem": part("problem", problem=look.problem),
                "count": _count(look.jobs),
            },
            {"jobs": {key: html for key, (_, html) in rows.items()}},
        )


def of_namespaces(parts: Parts, jobs: Sequence[JobRow], namespaces: Collection[str]) -> Parts:
    """The list of some jobs, without those of other namespaces."""
    seen = [row for row in jobs if row.summary.namespace in namespaces]
    keys = [_key(row) for row in seen]
    rows = parts.lists["jobs"]
    return Parts({**parts.parts, "count": _count(seen)}, {"jobs": {key: rows[key] for key in keys}})


def _key(row: JobRow) -> str:
    return f"job/{row.summary.namespace}/{row.summary.name}"


def _count(jobs: Sequence[JobRow]) -> str:
    return part("count", jobs=len(jobs), open=sum(row.summary.finished_at is None for row in jobs))


def _row(row: JobRow) -> dict[str, Any]:
    job, status, progress = row.summary, row.status, row.progress
    incident = status.last_incident if status else None
    return {
        "job": job,
        "phase": str(job.phase or (status.phase if status else "RUNNING")),
        "note": "paused" if job.pause else "fails" if job.task_failure else "",
        "step": text.step(progress) if progress else "",
        "rate": text.rate(progress) if progress and not job.finished_at else "",
        "eta": text.eta(progress) if progress and not job.finished_at else "",
        "incident": text.incident_line(incident) if incident else "",
        "took": text.duration(job.finished_at - job.started_at) if job.finished_at else "",
    }


class JobPage:
    """The parts of the page of a job. Those whose facts have not changed are kept.

    Args:
        page_link: Its page in the Temporal UI; empty where that is unknown.
        is_live: Link to other pages of the server.
    """

    def __init__(self, page_link: str = "", *, is_live: bool = True) -> None:
        self._page_link = page_link
        self._is_live = is_live
        self._kept: dict[str, tuple[Any, Any]] = {}

    def parts(self, look: JobLook) -> Parts:
        """What the page shows of a look."""
        status = look.status
        if status is None:
            return Parts({"problem": part("problem", problem=look.problem or "the job has not answered yet")})
        several = len(status.roles) > 1
        own = look.nodes.get(status.role, ())
        rows = [*facts(status, look.progress, own, list(look.incidents)), *_stored(status), *_cost(look, status)]
        rows += [("NOTIFIED", line) for line in notified(look.told)]
        rows += _archive(look, status)
        moment = look.time.timestamp() // _DRAWN_EVERY.total_seconds()
        drawn = (moment, status.generation, status.phase, status.finished_at, look.incidents)
        parts = Parts(
            {
                "problem": part("problem", problem=look.problem),
                "headline": part("headline", status=status, progress=look.progress),
                "facts": part("facts", rows=rows, page_link="" if look.is_archived else self._page_link),
                "roles": part("roles", status=status) if several else "",
                "data": self._keep("data", look.data, lambda: part("data", datasets=look.data)),
                "plots": self._keep("plots", drawn, lambda: _plots(look, status)),
                "quiet": "" if look.incidents else '<p class="small">Nothing has interrupted it.</p>',
                "nodes": self._keep("nodes", look.nodes, lambda: part("nodes", by_role=_tables(look), several=several)),
            }
        )
        parts.lists |= self._keep("maps", look.nodes, lambda: _maps(look))
        told = (look.incidents, status.finished_at, several)
        parts.lists["incidents"] = self._keep("incidents", told, lambda: self._incidents(look, status))
        return parts

    def _keep(self, name: str, facts_: object, make: Callable[[], MadeT]) -> MadeT:
        """What was made of the same facts, or else is made now."""
        known = self._kept.get(name)
        if known is None or known[0] != facts_:
            known = self._kept[name] = (facts_, make())
        return known[1]

    def _incidents(self, look: JobLook, status: JobStatus) -> dict[str, str]:
        flag = "" if status.namespace == "default" else f" -n {status.namespace}"
        several = len(status.roles) > 1
        ended = status.phase if status.finished_at else None
        shown = map(with_role_named, look.incidents) if several else look.incidents
        return {
            f"incident-{one.number}": part(
                "incident",
                incident=one,
                story=explanation(one, job=status.name, flag=flag, ended=ended, several_roles=several).plain,
                line=text.incident_line(one),
                is_live=self._is_live,
                since=one.started_at.isoformat(timespec="seconds"),
            )
            for one in sorted(shown, key=_newest_first)
        }


def _stored(status: JobStatus) -> list[tuple[str, str]]:
    """Where the newest checkpoint is, and why there is no newer one."""
    saved = status.checkpoint
    if not saved.url:
        return []
    place = f"{saved.url.rstrip('/')}/{saved.folder}".rstrip("/")
    words = [place if saved.folder else f"nothing yet in {place}"]
    words += [text.bytes_(saved.size)] if saved.size else []
    words += [f"stored in {text.duration(saved.took)}"] if saved.took else []
    words += [f"nothing newer is stored: {saved.problem}"] if saved.problem else []
    return [("STORED", ", ".join(words))]


def _archive(look: JobLook, status: JobStatus) -> list[tuple[str, str]]:
    """Where the job is archived, or was read."""
    if look.archive is None or not (look.archive.folder or status.archive):
        return []
    words = archived(look.archive, status)
    return [
        ("ARCHIVE", f"{words}; this is read from it: Temporal does not know the job" if look.is_archived else words)
    ]


def _cost(look: JobLook, status: JobStatus) -> list[tuple[str, str]]:
    """What the worlds have taken so far, and their price where the specification has one."""
    hours = course_of(status, look.incidents, now=look.time).node_hours
    price = status.scaling.price if status.scaling else None
    words = f"{hours:,.2f} node-hours of training"
    return [("COST", f"{words}, {hours * price:,.2f} at {price:g} for each" if price else words)] if hours else []


def _plots(look: JobLook, status: JobStatus) -> Markup:
    return draw(course_of(status, look.incidents, now=look.time), href="#incident-")


def _maps(look: JobLook) -> dict[str, dict[str, str]]:
    return {
        f"map-{role}": {f"{role}-{cell.number}": part("cell", cell=cell) for cell in _cells(role, nodes)}
        for role, nodes in look.nodes.items()
    }


def _newest_first(incident: IncidentView) -> int:
    return -incident.number


class Cell(NamedTuple):
    """One node in the map of nodes."""

    role: str
    number: int
    state: str
    """Chooses the color."""
    shade: int
    """How slow its steps are beside those of the others."""
    words: str


class NodeRow(NamedTuple):
    """One node in the table of nodes."""

    node: NodeView
    symbol: str
    state: str
    words: str


def _tables(look: JobLook) -> dict[str, list[NodeRow]]:
    return {
        role: [NodeRow(node, *_state(node)) for node in nodes] if len(nodes) <= _MOST_IN_TABLE else []
        for role, nodes in look.nodes.items()
    }


def _state(node: NodeView) -> tuple[str, str, str]:
    symbol, style, word = text.node_state(node)
    return symbol, {"green": "good", "cyan": "ready", "red": "bad", "yellow": "warn"}.get(style, "off"), word


def _cells(role: str, nodes: Sequence[NodeView]) -> list[Cell]:
    times = {node.rank: seconds for node in nodes if (seconds := _computes(node)) is not None}
    usual = statistics.median(times.values()) if times else 0.0
    return [_cell(role, node, times.get(node.rank), usual) for node in nodes]


def _computes(node: NodeView) -> float | None:
    """Seconds of a step in which its slowest rank computes; else of a whole step."""
    if node.step_times:
        return max(one.compute for one in node.step_times)
    return node.usual_step.total_seconds() if node.usual_step else None


def _cell(role: str, node: NodeView, computes: float | None, usual: float) -> Cell:
    """A node's state, and what is known of its machine, in figures that do not change with every look."""
    _, state, word = _state(node)
    words = [f"node {node.rank}" + (f" ({node.host})" if node.host else ""), word if state != "warn" else "no step"]
    shade = 0
    if computes is not None:
        if usual > 0:
            shade = min(max(round((computes / usual - 1) * 10), 0), _SHADES - 1)
        words.append(f"computes {computes:.2g} s of a step")
        if waits := [one.wait for one in node.step_times]:
            words.append(f"waits {max(waits):.2g} s")
    if node.incarnation > 1:
        words.append(f"replaced {text.count(node.incarnation - 1, 'time')}")
    if node.metrics and node.metrics.memory_bytes is not None:
        words.append(f"memory {node.metrics.memory_bytes / 2**30:.2g} GiB")
    heat = [one.temperature_celsius for one in node.metrics.devices if one.temperature_celsius] if node.metrics else []
    words += [f"{max(heat):.2g} °C"] if heat else []
    words += [node.reason] if node.reason else []
    return Cell(role, node.rank, state, shade, ", ".join(words))


class Outlook(NamedTuple):
    """What a job would do after a change, and how fast it is with numbers of nodes."""

    words: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def outlook(after: JobStatus) -> Outlook:
    """What a job would do whose status were this."""
    words, view = plan.would_choose(after), after.scaling
    sizes = plan.sizes(view, after, also=(), price=view.price) if view else []
    if view is None or not sizes:
        return Outlook(words)
    table = plan.table(sizes, view)
    return Outlook(words, table.columns, [[Text.from_markup(cell).plain for cell in row] for row in table.rows])


def spec_text(spec: Mapping[str, Any]) -> str:
    """The specification as YAML, without what looks like a secret."""
    import yaml

    from perdure.spec.without_secrets import spec_without_secrets

    shown = spec_without_secrets(spec)
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100) if shown else ""
