"""The server of `perdure ui`: pages, their events, logs, and forms that change a job.

It has no state of its own: what it shows is in the jobs, and what it has looked at is forgotten a minute after the last
page that shows it was closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from perdure.base.errors import PerdureError
from perdure.base.ui_proxy import refuse_pages_of_others
from perdure.cli import text
from perdure.cli.terminal import printable, printed_line
from perdure.client.changes import Changes
from perdure.client.client import Client
from perdure.client.logs.places import ArchiveOnly
from perdure.client.views import FINAL_PHASES, nodes_of_ranks
from perdure.contract import JobPhase
from perdure.contract.names import job_workflow_id
from perdure.page import render
from perdure.page.access import VISIT, NotAllowed, Right, allowed, held, require
from perdure.page.actions import ACTIONS, FIELDS, GOAL, Action
from perdure.page.answers import PREFIX, html, message, send_lines, send_parts, show_errors
from perdure.page.archived import Archive
from perdure.page.clusters import ClusterPages
from perdure.page.feed import Feed
from perdure.page.looks import JobList, JobLook, JobWatch, ListLook
from perdure.page.sessions import Sessions, add_headers
from perdure.spec.durations import parse_duration
from perdure.spec.scaling import ScalingPolicy, goal_words

logger = logging.getLogger("perdure.page")

HOST = "127.0.0.1"
PORT = 8234
"""The port where none is named: the one after that of the Temporal UI."""

_STATIC = Path(__file__).with_name("static")
_LIST_INTERVAL = timedelta(seconds=2)
_INTERVAL = timedelta(seconds=2)
"""Agents report their progress as often; what happens to a job is shown at once."""
_SLOW_INTERVAL = timedelta(seconds=5)
"""For a job of many nodes, and for one that has ended."""
_NEVER = timedelta(minutes=1)
"""For a job that is read from its archive, where nothing changes."""
_MANY_NODES = 200
_LOG_TAIL = 500
_ROOT = "../../../"


LookT = TypeVar("LookT")


class Shown(NamedTuple, Generic[LookT]):
    """A look, and what all pages show of it."""

    look: LookT
    parts: render.Parts


async def _shown(look: Callable[[], Awaitable[LookT]], render_: Callable[[LookT], render.Parts]) -> Shown[LookT]:
    found = await look()
    return Shown(found, render_(found))


class Pages:
    """Handles requests.

    Args:
        client: Reads and changes jobs.
        everywhere: Show the jobs of all namespaces.
        namespaces: Of these, show those of these namespaces only; None: all.
        read_only: Change nothing.
        archive: The place in which jobs are looked for that Temporal does not know, or not any more.
        for_others: Those who see it have other rights than this process: of files and storages, only this archive is
            read.
    """

    def __init__(
        self,
        client: Client,
        *,
        everywhere: bool,
        namespaces: Collection[str] | None = None,
        read_only: bool = False,
        archive: str | None = None,
        for_others: bool = False,
    ) -> None:
        if for_others:
            client._log_places = ArchiveOnly(archive)
        self._client = client
        self._archive = Archive(archive, for_others=for_others) if archive else None
        self._everywhere = everywhere
        self._namespaces = namespaces
        self._read_only = read_only
        self._list: Feed[Shown[ListLook]] | None = None
        self._jobs: dict[tuple[str, str], Feed[Shown[JobLook]]] = {}
        self._clusters = ClusterPages(client, everywhere=everywhere, namespaces=namespaces)

    def routes(self, prefix: str) -> Iterable[web.AbstractRouteDef]:
        """The addresses below a prefix. A job's page ends with a slash, so that all of its links are relative."""
        job = f"{prefix}/jobs/{{namespace}}/{{name}}/"
        return (
            web.get(f"{prefix}/", self.jobs),
            web.get(f"{prefix}/events", self.jobs_events),
            web.get(job, self.job),
            web.get(f"{job}events", self.job_events),
            web.get(f"{job}logs", self.logs),
            web.get(f"{job}lines", self.lines),
            web.get(f"{job}change/{{action}}", self.plan),
            web.post(f"{job}change/{{action}}", self.change),
            *self._clusters.routes(prefix),
            web.static(f"{prefix}/static", _STATIC),
        )

    async def close(self, _: web.Application) -> None:
        """Ends looking."""
        feeds = [*self._jobs.values(), *([self._list] if self._list else [])]
        await asyncio.gather(self._clusters.close(), *(feed.close() for feed in feeds))

    # The list of jobs

    async def jobs(self, request: web.Request) -> web.StreamResponse:
        """The list of jobs."""
        parts = await self._visible(request, await self._list_feed().newest())
        where = f"namespace {self._client.namespace}"
        if self._everywhere:
            where = "all namespaces" if self._namespaces is None else ", ".join(sorted(self._namespaces))
        phases = [phase.value for phase in JobPhase if phase is not JobPhase.UNKNOWN]
        return html(
            request, "jobs.html", root="", events="events", title=f"Jobs of {where}", parts=parts, phases=phases
        )

    async def jobs_events(self, request: web.Request) -> web.StreamResponse:
        """Changes of the list."""
        return await send_parts(request, self._list_while_known(request))

    async def _list_while_known(self, request: web.Request) -> AsyncGenerator[render.Parts]:
        async with aclosing(self._list_feed().follow()) as looks:
            async for shown in looks:
                if not await request[VISIT].is_known():
                    return
                yield await self._visible(request, shown)

    async def _visible(self, request: web.Request, shown: Shown[ListLook]) -> render.Parts:
        """The list, without the jobs that this user may not see."""
        jobs = shown.look.jobs
        known = frozenset(job.summary.namespace for job in jobs)
        served = known if self._namespaces is None else known.intersection(self._namespaces)
        seen = await allowed(request[VISIT], Right.READ, served)
        return shown.parts if seen == known else render.of_namespaces(shown.parts, jobs, seen)

    def _list_feed(self) -> Feed[Shown[ListLook]]:
        if self._list is None:
            jobs = JobList(self._client, everywhere=self._everywhere)
            look = partial(_shown, jobs.look, render.ListPage().parts)
            self._list = Feed(look, lambda _: _LIST_INTERVAL, self._forget_list)
        return self._list

    def _forget_list(self) -> None:
        self._list = None

    # One job

    async def job(self, request: web.Request) -> web.StreamResponse:
        """The page of a job."""
        namespace, name = await self._readable(request)
        look, parts = await self._feed(namespace, name).newest()
        actions = [] if self._read_only else _actions(look)
        rights: dict[Right, None] = dict.fromkeys((Right.LOGS, *(one.right for one in actions)))
        has = await held(request[VISIT], rights, namespace)
        may = {right: right in has for right in rights}
        return html(
            request,
            "job.html",
            root=_ROOT,
            events="events",
            title=name,
            name=name,
            namespace=namespace,
            parts=parts,
            roles=list(look.nodes),
            actions=[(one, may[one.right]) for one in actions],
            may_read_logs=may[Right.LOGS],
            lacking=[right for right, granted in may.items() if not granted],
            # A large one takes seconds, and others wait for their pages.
            spec=await asyncio.to_thread(render.spec_text, look.spec),
        )

    async def job_events(self, request: web.Request) -> web.StreamResponse:
        """Changes of that page."""
        namespace, name = await self._readable(request)
        return await send_parts(request, self._parts_while_allowed(request, namespace, name))

    async def _parts_while_allowed(
        self, request: web.Request, namespace: str, name: str
    ) -> AsyncGenerator[render.Parts]:
        async with aclosing(self._feed(namespace, name).follow()) as looks:
            async for shown in looks:
                if not await request[VISIT].may(Right.READ, namespace):
                    return
                yield shown.parts

    async def _readable(self, request: web.Request, right: Right = Right.READ) -> tuple[str, str]:
        """Namespace and name of the job that a request is about, if its user has the right.

        Raises:
            NotAllowed: if the user lacks the right, whether or not there is such a job.
        """
        namespace = request.match_info["namespace"]
        await require(request, right, namespace)
        if self._namespaces is not None and namespace not in self._namespaces:
            raise NotAllowed(f"these pages are not of the namespace {namespace}")
        return namespace, request.match_info["name"]

    def _feed(self, namespace: str, name: str) -> Feed[Shown[JobLook]]:
        key = (namespace, name)
        if key not in self._jobs:
            watch = JobWatch(self._client, name, namespace)
            page = render.JobPage(self._client.endpoint.workflow_page(job_workflow_id(namespace, name)))
            once = partial(self._archive.look, watch, name, namespace) if self._archive else watch.look
            look = partial(_shown, once, page.parts)
            self._jobs[key] = Feed(look, _interval, lambda: self._jobs.pop(key, None), watch.news)
        return self._jobs[key]

    # Logs

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """The page with lines of a job's output."""
        namespace, name = await self._readable(request, Right.LOGS)
        look = (await self._feed(namespace, name).newest()).look
        chosen = {key: request.query.get(key, "") for key in ("role", "node", "rank", "since")}
        stream = str(request.rel_url.with_query({key: value for key, value in chosen.items() if value}).query_string)
        return html(
            request,
            "logs.html",
            root=_ROOT,
            events="events",
            title=f"Logs of {name}",
            name=name,
            namespace=namespace,
            roles=list(look.nodes),
            chosen=chosen,
            stream=f"lines?{stream}",
        )

    async def lines(self, request: web.Request) -> web.StreamResponse:
        """The lines themselves, until the job ends."""
        namespace, name = await self._readable(request, Right.LOGS)
        return await send_lines(request, self._lines_while_allowed(request, namespace, name))

    async def _lines_while_allowed(self, request: web.Request, namespace: str, name: str) -> AsyncGenerator[str]:
        async with aclosing(self._log_lines(request, namespace, name)) as lines:
            async for line in lines:
                await require(request, Right.LOGS, namespace)
                yield line

    async def _log_lines(self, request: web.Request, namespace: str, name: str) -> AsyncGenerator[str]:
        query = request.query
        role = query.get("role") or None
        nodes = [_number(query["node"])] if query.get("node") else None
        client = self._client
        if self._archive and (await self._feed(namespace, name).newest()).look.is_archived:
            client = self._archive.jobs(name, namespace) or client
        if query.get("rank"):
            from perdure.cli.ranks import parse_ranks

            views = await client.nodes(name, namespace=namespace, role=role)
            nodes = sorted(nodes_of_ranks(views, parse_ranks(query["rank"])))
        since = _moment(query["since"]) if query.get("since") else None
        lines = client.logs(
            name,
            namespace=namespace,
            node=nodes,
            role=role,
            follow=True,
            tail=None if since else _LOG_TAIL,
            since=since,
        )
        async with aclosing(lines):
            async for line in lines:
                time = f"{line.time:%H:%M:%S} " if line.time else ""
                yield f"{time}{printable(line.role)} {line.node:>3} | {printed_line(line.text)}"

    # Changes

    async def plan(self, request: web.Request) -> web.StreamResponse:
        """What a change would do; nothing is changed."""
        self._refuse_changes()
        namespace, name = await self._readable(request, _action(request).right)
        return await self._show_plan(request, namespace, name, {key: request.query.get(key, "") for key in FIELDS})

    def _refuse_changes(self) -> None:
        if self._read_only:
            raise web.HTTPForbidden(text="This page changes nothing: it was started with --read-only.\n")

    async def _show_plan(
        self, request: web.Request, namespace: str, name: str, values: dict[str, str], problem: str = ""
    ) -> web.StreamResponse:
        action = _action(request)
        status = await self._client.status(name, namespace=namespace, role=values["role"] or None)
        plan, outlook = "", None
        if status.finished_at:
            problem = f"{name} does not run: it has ended as {status.phase}"
        elif not problem and action.is_complete(values):
            try:
                values = action.settled(values)
                change = action.change(_changes(namespace, name, values), values, status)
                after = await change.preview(self._client) if change.preview else None
                plan, outlook = text.plan(change.plan, status), after and render.outlook(after)
            except PerdureError as error:
                problem = f"{error} {error.remedy}".strip()
        return html(
            request,
            "change.html",
            root=f"{_ROOT}../",
            events="",
            title=f"{action.label}: {name}",
            name=name,
            namespace=namespace,
            action=action,
            values=values,
            roles=status.roles,
            plan=plan,
            outlook=outlook,
            goal_fields=GOAL,
            policies=list(ScalingPolicy),
            goal=goal_words(status.goal or {}),
            problem=problem,
            uid=status.uid,
        )

    async def change(self, request: web.Request) -> web.StreamResponse:
        """Makes a change, of the run that the form was about."""
        self._refuse_changes()
        action = _action(request)
        namespace, name = await self._readable(request, action.right)
        form = {key: value for key, value in (await request.post()).items() if isinstance(value, str)}
        values = {key: form.get(key, "") for key in FIELDS}
        user = request[VISIT].user
        status = await self._client.status(name, namespace=namespace, role=values["role"] or None)
        if status.uid != form.get("uid"):
            problem = f"nothing was changed: the page was about an earlier run, and {name} has been started again since"
            return await self._show_plan(request, namespace, name, values, problem)
        try:
            changes = _changes(namespace, name, values, user)
            accepted = await action.change(changes, values, status).send(self._client)
        except PerdureError as error:
            return await self._show_plan(request, namespace, name, values, f"{error} {error.remedy}".strip())
        if (namespace, name) in self._jobs:
            self._jobs[namespace, name].refresh()
        if user:
            logger.info("%s: %s of %s/%s: %s", user, action.name, namespace, name, accepted.message)
        return message(request, f"{action.label}: {name}", accepted.message, back="../")


def _changes(namespace: str, name: str, values: dict[str, str], user: str = "") -> Changes:
    """The changes that a form asks for; the job keeps who has asked."""
    reason = ": ".join(filter(None, (user and f"{user}, on the page", values["reason"])))
    return Changes(name=name, namespace=namespace, role=values["role"] or None, reason=reason)


def _action(request: web.Request) -> Action:
    try:
        return ACTIONS[request.match_info["action"]]
    except KeyError:
        raise web.HTTPNotFound from None


def _actions(look: JobLook) -> list[Action]:
    """The buttons that make sense now."""
    if look.is_over:
        return []
    suspended = look.status is not None and look.status.phase is JobPhase.SUSPENDED
    roles = look.status.roles if look.status else ()
    left_out = set[str]() if len(roles) > 1 else {"suspend"} if suspended else {"resume"}
    return [action for action in ACTIONS.values() if action.name not in left_out]


def _interval(shown: Shown[JobLook]) -> timedelta:
    look = shown.look
    if look.is_archived:
        return _NEVER
    many = sum(map(len, look.nodes.values())) > _MANY_NODES
    return _SLOW_INTERVAL if many or look.summary.phase in FINAL_PHASES else _INTERVAL


def _number(given: str) -> int:
    if not given.isdecimal():
        raise ValueError(f'got "{given}" as a node; expected its number, such as 0')
    return int(given)


def _moment(given: str) -> datetime:
    try:
        return datetime.now(UTC) - parse_duration(given)
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise ValueError(f'Since: got "{given}"; expected a duration such as 10m, or a time (ISO 8601)') from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def application_of(pages: Pages, guard: Middleware, url: str) -> web.Application:
    """The application of pages.

    Args:
        pages: Handles requests.
        guard: Lets through requests of admitted users, and says who they are.
        url: The address at which a proxy shows it; empty: none.
    """
    shown_as = urlsplit(url.rstrip("/"))
    application = web.Application(middlewares=[refuse_pages_of_others(shown_as), guard, show_errors])
    application[PREFIX] = shown_as.path
    application.on_response_prepare.append(add_headers)
    # A proxy may pass its path on, or not.
    for prefix in {"", shown_as.path}:
        application.add_routes(pages.routes(prefix))
    application.on_shutdown.append(pages.close)
    return application


@asynccontextmanager
async def serve_pages(
    client: Client,
    *,
    everywhere: bool = False,
    port: int = PORT,
    read_only: bool = False,
    url: str = "",
    archive: str | None = None,
) -> AsyncGenerator[str]:
    """Serves on loopback while the context is open, and yields the link that admits a browser.

    Args:
        client: Reads and changes jobs.
        everywhere: Show the jobs of all namespaces; otherwise those of the client's.
        port: The port; 0 for one that is free.
        read_only: Show no buttons, and change nothing.
        url: The address at which a proxy before this server shows it, with or without a path; empty: no proxy.
        archive: The place in which jobs are looked for that Temporal does not know, or not any more.

    Raises:
        OSError: if the port is taken.
    """
    sessions = Sessions()
    pages = Pages(client, everywhere=everywhere, read_only=read_only, archive=archive)
    application = application_of(pages, sessions.guard, url)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        home = url.rstrip("/") or f"http://{HOST}:{runner.addresses[0][1]}"
        yield f"{home}/?token={sessions.token}"
    finally:
        await runner.cleanup()
