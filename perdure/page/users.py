"""The users of a site's pages: those whom the cluster's API server knows, with their rights on TrainingJobs.

Users prove who they are by a token that the API server reviews: of a service account, made for these pages alone, or
whatever else the site's API server accepts, such as an identity provider's. A browser keeps the token in a cookie; a
proxy that signs users in sends it with each request. Nothing is kept here but answers of the API server, for a while.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.gateway.limits import NEWCOMERS, Limits, TooMany, network_of
from perdure.gateway.lru_cache import LruCache
from perdure.page import render
from perdure.page.access import VISIT, ApiAway, Handler, Right, derived, require_own_form
from perdure.page.answers import PREFIX, root_of

AUDIENCE: Final = "perdure-page"
"""The audience of tokens that are made for these pages, and are worth nothing elsewhere."""
COOKIE: Final = "perdure-page"
_LONGEST_TOKEN: Final = 3800
"""Characters that browsers keep in a cookie."""
_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
_FRESH_SECONDS: Final = 60.0
"""The time for which an answer holds: a user whose token or right is withdrawn can continue for as long."""
_REFUSED_SECONDS: Final = 5.0
"""The time for which a refusal holds: a right that was granted is used soon."""
_STALE_SECONDS: Final = 3600.0
"""The time for which what was granted holds while the API server does not answer: jobs are looked at most when
something is down. A refusal does not: the right may have been granted since, and the user would be told to ask for
it."""
_PATIENCE_SECONDS: Final = 2.0
_REMEMBERED: Final = 10_000

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class User:
    """A user, as the API server describes one."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class _Answers(Generic[KeyT, ValueT]):
    """Answers of the API server, each asked for once at a time.

    Args:
        ask: Asks.
    """

    def __init__(self, ask: Callable[[KeyT], Awaitable[ValueT]]) -> None:
        self._ask = ask
        self._known = LruCache[KeyT, tuple[float, ValueT]](_REMEMBERED)
        self._asking: dict[KeyT, asyncio.Future[ValueT]] = {}

    def known(self, key: KeyT) -> bool:
        """Whether it is answered without asking."""
        found = self._known.get(key)
        age = time.monotonic() - found[0] if found else 0.0
        return found is not None and age < (_FRESH_SECONDS if found[1] else _REFUSED_SECONDS)

    def granted(self, key: KeyT) -> bool:
        """Whether the last answer was not a refusal, however old it is."""
        found = self._known.get(key)
        return found is not None and bool(found[1])

    async def get(self, key: KeyT) -> ValueT:
        """The answer.

        Raises:
            ApiAway: if there is none, and the API server does not answer now.
        """
        found = self._known.get(key)
        if found and self.known(key):
            return found[1]
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS if found else None):
                value = await asyncio.shield(self._started(key))
        except (KubernetesError, aiohttp.ClientError, TimeoutError, OSError) as error:
            if found and found[1] and time.monotonic() - found[0] < _STALE_SECONDS:
                return found[1]
            raise ApiAway(
                f"the API server does not say who may see this: {error or type(error).__name__}",
                remedy="Training continues. The page needs the rights to review tokens and access, as the chart has.",
            ) from error
        return value

    def _started(self, key: KeyT) -> asyncio.Future[ValueT]:
        if key not in self._asking:
            task = self._asking[key] = asyncio.ensure_future(self._ask(key))
            task.add_done_callback(lambda ended: self._take(key, ended))
        return self._asking[key]

    def _take(self, key: KeyT, ended: asyncio.Future[ValueT]) -> None:
        self._asking.pop(key, None)
        if not ended.cancelled() and ended.exception() is None:
            self._known.put(key, (time.monotonic(), ended.result()))


class ClusterUsers:
    """Asks the API server who users are, and what they may do.

    Args:
        api: The API server.
        audience: The audience that tokens must be made for; empty: the API server's own.
    """

    def __init__(self, api: KubernetesApi, audience: str = AUDIENCE) -> None:
        self._api = api
        self.audience = audience
        self._users = _Answers(self._review)
        self._rights = _Answers(self._review_access)

    def knows(self, token: str) -> bool:
        """Whether a token is not that of a stranger: it needs no review now, or was valid when it was reviewed last."""
        return self._users.known(token) or self._users.granted(token)

    async def user_of(self, token: str) -> User | None:
        """The user whose token it is; None where the token is not valid.

        Raises:
            ApiAway: if that cannot be said now.
        """
        return await self._users.get(token)

    async def may(self, user: User, right: Right, namespace: str) -> bool:
        """Whether the user has the right in a namespace.

        Raises:
            ApiAway: if that cannot be said now.
        """
        return await self._rights.get((user, right, namespace))

    async def _review(self, token: str) -> User | None:
        spec: dict[str, Any] = {"token": token} | ({"audiences": [self.audience]} if self.audience else {})
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status = (await self._api.create(_REVIEWS, review))["status"]
        if not status.get("authenticated") or (self.audience and self.audience not in status.get("audiences", ())):
            return None
        user: dict[str, Any] = status["user"]
        extra: dict[str, list[str]] = user.get("extra") or {}
        return User(
            name=str(user.get("username", "")),
            uid=str(user.get("uid", "")),
            groups=tuple(user.get("groups") or ()),
            extra=tuple((name, tuple(values)) for name, values in sorted(extra.items())),
        )

    async def _review_access(self, question: tuple[User, Right, str]) -> bool:
        user, right, namespace = question
        asked = {"namespace": namespace, "verb": right.verb, "group": right.group, "resource": right.resource}
        review: dict[str, Any] = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "LocalSubjectAccessReview",
            "metadata": {"namespace": namespace},
            "spec": {
                "user": user.name,
                "uid": user.uid,
                "groups": list(user.groups),
                "extra": {name: list(values) for name, values in user.extra},
                "resourceAttributes": asked | ({"subresource": right.subresource} if right.subresource else {}),
            },
        }
        path = f"/apis/authorization.k8s.io/v1/namespaces/{namespace}/localsubjectaccessreviews"
        try:
            return bool((await self._api.create(path, review))["status"]["allowed"])
        except KubernetesError as error:
            if error.invalid:  # No namespace of the cluster has such a name.
                return False
            raise


@dataclass(frozen=True)
class SignedIn:
    """A request of a user of the cluster."""

    users: ClusterUsers
    token: str
    user: str
    has_signed_in: bool

    @property
    def csrf(self) -> str:
        return derived(self.token, "csrf")

    async def is_known(self) -> bool:
        """Whether the token is still valid."""
        return await self.users.user_of(self.token) is not None

    async def may(self, right: Right, namespace: str) -> bool:
        """Whether the user has the right, and the token is still valid."""
        user = await self.users.user_of(self.token)
        return user is not None and await self.users.may(user, right, namespace)


class SignIn:
    """Admits users who prove who they are.

    Args:
        users: Knows them.
        is_secure: Browsers reach the pages by TLS.
    """

    def __init__(self, users: ClusterUsers, *, is_secure: bool) -> None:
        self._users = users
        self._is_secure = is_secure
        self._strangers = Limits(NEWCOMERS)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets through only requests of known users, and those that sign in or out."""
        path = request.path.removeprefix(request.app[PREFIX])
        if path.startswith("/static/"):
            return await handler(request)
        if path == "/sign-in" and request.method == "POST":
            return await self._sign_in(request)
        by_proxy = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        token = by_proxy or request.cookies.get(COOKIE, "")
        user = await self._user_of(request, token)
        if user is None:
            return self._ask(request, "Sign in again: the token is not valid any more." if token else "")
        visit = request[VISIT] = SignedIn(self._users, token, user.name, not by_proxy)
        await require_own_form(request, visit.csrf)
        if path == "/sign-out" and request.method == "POST":
            return self._sign_out(request)
        return await handler(request)

    async def _user_of(self, request: web.Request, token: str) -> User | None:
        """Whose token it is. An address that sends many unknown ones is slowed down; users who are signed in may have
        the same address, that of a proxy, and are not."""
        if not token:
            return None
        is_known = self._users.knows(token)
        try:
            with nullcontext() if is_known else self._strangers.one_call(network_of(request.remote or "")):
                return await self._users.user_of(token)
        except TooMany:
            raise web.HTTPTooManyRequests(text="Too many tokens are tried from your address.\n") from None
        except ApiAway as error:
            raise web.HTTPServiceUnavailable(text=f"{error}. {error.remedy}\n") from None

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        token, back = str(form.get("token", "")).strip(), str(form.get("back", ""))
        if len(token) > _LONGEST_TOKEN:
            return self._ask(request, "The token is longer than a browser keeps: use a proxy that sends it.", back)
        if await self._user_of(request, token) is None:
            return self._ask(request, "The API server does not accept this token.", back)
        response = web.Response(status=303, headers={"Location": f"./{_place_below(back)}"})
        # Links from elsewhere lead to the page, which shows only; what changes something takes its own forms.
        response.set_cookie(
            COOKIE, token, httponly=True, secure=self._is_secure, samesite="Lax", path=f"{request.app[PREFIX]}/"
        )
        return response

    def _sign_out(self, request: web.Request) -> web.StreamResponse:
        response = web.Response(status=303, headers={"Location": "./"})
        response.del_cookie(COOKIE, path=f"{request.app[PREFIX]}/")
        return response

    def _ask(self, request: web.Request, problem: str, back: str | None = None) -> web.Response:
        """The page that asks for a token."""
        if back is None:
            back = str(request.rel_url).removeprefix(request.app[PREFIX]).lstrip("/") if request.method == "GET" else ""
        text = render.page(
            "sign_in.html",
            root=root_of(request),
            events="",
            title="Sign in",
            problem=problem,
            back=back,
            audience=self._users.audience,
            visit=None,
        )
        return web.Response(text=text, content_type="text/html", status=401)


def _place_below(back: str) -> str:
    """Returns the place if it is below the page, as browsers read it: they take a backslash for `/` and `%2e` for `.`,
    and leave out control characters. Otherwise the empty place, which is the page itself."""
    path = unquote(re.split("[?#]", back, maxsplit=1)[0])
    leads_out = "\\" in path or ".." in path.split("/") or not back.isprintable()
    return "" if leads_out else back.lstrip("/")
