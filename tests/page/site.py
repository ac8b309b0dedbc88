"""A site's pages over played jobs, for users of a played API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
from aiohttp import web

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.page.access import Right
from perdure.page.server import Pages, application_of
from perdure.page.users import AUDIENCE, ClusterUsers, SignIn
from tests.page.conftest import Visitor
from tests.page.played import HOSTILE, PlayedClient

RIGHTS = {
    "ana": {"default": {Right.READ, Right.LOGS, Right.CHANGE, Right.END}},
    "ben": {"default": {Right.READ}},
    "cleo": {"vision": {Right.READ, Right.LOGS, Right.CHANGE, Right.END}},
    "dan": {"default": {Right.READ, Right.LOGS, Right.CHANGE}},
    HOSTILE: {"default": {Right.READ}},
}
TOKENS = {"mallory": HOSTILE}
"""Tokens that are not their users' names."""


class PlayedApi:
    """An API server that knows users by their names as tokens."""

    def __init__(self) -> None:
        self.rights = {name: {where: set(them) for where, them in one.items()} for name, one in RIGHTS.items()}
        self.audiences = [AUDIENCE]
        self.away = False
        self.reviews: list[str] = []

    async def create(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        if self.away:
            raise KubernetesError(503, "ServiceUnavailable", "etcd is away")
        spec = content["spec"]
        self.reviews.append(content["kind"])
        if content["kind"] == "TokenReview":
            name = TOKENS.get(spec["token"], spec["token"])
            known = name in self.rights
            user = {"username": name, "groups": ["users"], "extra": {"x": ["y"]}}
            return {"status": {"authenticated": known, "user": user, "audiences": self.audiences} if known else {}}
        asked = spec["resourceAttributes"]
        assert path == f"/apis/authorization.k8s.io/v1/namespaces/{asked['namespace']}/localsubjectaccessreviews"
        assert (spec["groups"], spec["extra"]) == (["users"], {"x": ["y"]})
        right = next(one for one in Right if (one.verb, one.resource) == (asked["verb"], asked["resource"]))
        return {"status": {"allowed": right in self.rights.get(spec["user"], {}).get(asked["namespace"], set())}}


@asynccontextmanager
async def site_pages(client: PlayedClient, api: PlayedApi, *, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """A site's pages; yields their address."""
    pages = Pages(client, everywhere=True, for_others=True, **options)
    guard = SignIn(ClusterUsers(cast(KubernetesApi, api)), is_secure=False).guard
    runner = web.AppRunner(application_of(pages, guard, ""), shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def visitor_of(client: PlayedClient, api: PlayedApi, **options: Any) -> AsyncIterator[Visitor]:
    """A visitor who has not signed in."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with site_pages(client, api, **options) as address, aiohttp.ClientSession(cookie_jar=jar) as session:
        yield Visitor(address, session)
