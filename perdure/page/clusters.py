"""The page of machines: what is free, which jobs have nodes on them, which wait, and what another node would bring.

Machines are shown to each user who may see jobs of a namespace that the page shows; jobs of other namespaces, and their
nodes, are counted only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from aiohttp import web

from perdure.base.errors import PerdureError
from perdure.cli.cluster import with_content, within
from perdure.client.client import Client
from perdure.client.cluster import read_clusters
from perdure.contract import ClusterView
from perdure.page import render
from perdure.page.access import VISIT, NotAllowed, Right, allowed
from perdure.page.answers import html, send_parts
from perdure.page.feed import Feed
from perdure.spec.job import Backend

INTERVAL = timedelta(seconds=5)
"""Time between two looks. A look asks the Temporal server, and no worker."""


@dataclass(frozen=True)
class ClustersLook:
    """The clusters at one moment."""

    time: datetime
    views: Sequence[ClusterView] = ()
    problem: str = ""
    """Why this is not fresh."""


class ClusterPages:
    """Handles requests for the page of machines.

    Args:
        client: Reads what workers have seen.
        everywhere: Show the jobs of all namespaces; otherwise those of the client's.
        namespaces: Of these, show those of these namespaces only; None: all.
    """

    def __init__(self, client: Client, *, everywhere: bool, namespaces: Collection[str] | None) -> None:
        self._client = client
        self._served = namespaces if everywhere else {client.namespace}
        self._last = ClustersLook(datetime.now(UTC))
        self._feed: Feed[ClustersLook] | None = None

    def routes(self, prefix: str) -> Iterable[web.AbstractRouteDef]:
        """The addresses below a prefix."""
        return web.get(f"{prefix}/cluster/", self.page), web.get(f"{prefix}/cluster/events", self.events)

    async def close(self) -> None:
        """Ends looking."""
        if self._feed is not None:
            await self._feed.close()

    async def page(self, request: web.Request) -> web.StreamResponse:
        """The page."""
        parts = await self._visible(request, await self._looks().newest())
        return html(
            request, "cluster.html", root="../", events="events", title="Machines", parts=parts, backends=tuple(Backend)
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Changes of the page."""
        return await send_parts(request, self._while_allowed(request))

    async def _while_allowed(self, request: web.Request) -> AsyncGenerator[render.Parts]:
        async with aclosing(self._looks().follow()) as looks:
            async for look in looks:
                if not await request[VISIT].is_known():
                    return
                yield await self._visible(request, look)

    async def _visible(self, request: web.Request, look: ClustersLook) -> render.Parts:
        """What a user may see of a look.

        Raises:
            NotAllowed: if the user may see the jobs of no namespace.
        """
        served = self._served
        if served is None:
            served = {job.namespace for view in look.views for job in view.jobs} | {self._client.namespace}
        seen = await allowed(request[VISIT], Right.READ, served)
        if not seen:
            raise NotAllowed(
                f"{request[VISIT].user} may see the jobs of no namespace here, and so no machines",
                remedy=f"It takes the right to {Right.READ} in one, which an administrator grants by a RoleBinding.",
            )
        return _parts(look, [(view, within(view, seen)) for view in look.views])

    def _looks(self) -> Feed[ClustersLook]:
        if self._feed is None:
            self._feed = Feed(self._look, lambda _: INTERVAL, self._forget)
        return self._feed

    def _forget(self) -> None:
        self._feed = None

    async def _look(self) -> ClustersLook:
        now = datetime.now(UTC)
        try:
            self._last = ClustersLook(now, with_content(await read_clusters(self._client)))
        except PerdureError as error:
            self._last = replace(self._last, time=now, problem=str(error))
        return self._last


def _parts(look: ClustersLook, views: Sequence[tuple[ClusterView, ClusterView]]) -> render.Parts:
    """The parts of the page.

    Args:
        look: The clusters.
        views: Each as it is, and as its user sees it.
    """
    parts = render.Parts({"problem": render.part("problem", problem=look.problem)})
    for backend in Backend:
        parts.parts[f"cluster-{backend}"] = ""
        parts.lists |= {f"{kind}-{backend}": {} for kind in ("shapes", "machines", "roles")}
    for whole, view in views:
        backend, age = view.backend, look.time - view.seen_at
        hidden, left_out = len(whole.jobs) - len(view.jobs), whole.jobs_total - len(whole.jobs)
        facts = {"view": view, "age": age, "hidden": hidden, "left_out": left_out}
        parts.parts[f"cluster-{backend}"] = render.part("cluster", **facts)
        several = view.shapes if len(view.shapes) > 1 or view.machines_total > len(view.machines) else ()
        parts.lists[f"shapes-{backend}"] = _rows(f"shape-{backend}", "shape_row", enumerate(several))
        machines = ((machine.name, machine) for machine in view.machines)
        parts.lists[f"machines-{backend}"] = _rows(f"machine-{backend}", "machine_row", machines)
        roles = ((f"{job.namespace}/{job.job}/{job.role}", job) for job in view.jobs)
        parts.lists[f"roles-{backend}"] = _rows(f"role-{backend}", "role_row", roles)
    return parts


def _rows(prefix: str, macro: str, items: Iterable[tuple[object, object]]) -> dict[str, str]:
    keyed = ((f"{prefix}-{key}", item) for key, item in items)
    return {key: render.part(macro, key=key, one=item) for key, item in keyed}
