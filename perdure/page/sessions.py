"""Keeps all but their owner from the pages of `perdure ui`.

Every process and every web page on this machine can send requests to a port of loopback. So a browser is admitted by a
token that only the terminal has shown, and is known by a cookie from then on; requests for other names than this
machine's, and of other origins, are refused; and whatever changes a job also names a secret that only our own pages
contain. Pages load nothing from elsewhere and run no script but the one that is served with them.
"""

from __future__ import annotations

import hmac
import secrets

from aiohttp import web

from perdure.page.access import VISIT, Handler, Holder, derived, require_own_form

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_TOKEN = "token"


class Sessions:
    """Admits browsers that know the token; one per server."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        """What the first request must contain."""
        self.cookie = "perdure-ui"
        """The name of the cookie, which browsers share between all ports of this machine."""

    @property
    def _session(self) -> str:
        return derived(self.token, "session")

    @property
    def csrf(self) -> str:
        """What every request that changes something must contain."""
        return derived(self.token, "csrf")

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets through only requests of admitted browsers."""
        if (given := request.query.get(_TOKEN)) is not None and request.method == "GET":
            return self._admit(request, given)
        if not hmac.compare_digest(request.cookies.get(self.cookie, "").encode(), self._session.encode()):
            raise web.HTTPUnauthorized(
                text="This page needs the link that `perdure ui` has printed: it contains a token.\n"
            )
        await require_own_form(request, self.csrf)
        request[VISIT] = Holder(self.csrf)
        return await handler(request)

    def _admit(self, request: web.Request, given: str) -> web.StreamResponse:
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise web.HTTPUnauthorized(text="The token is wrong: use the link that `perdure ui` has printed last.\n")
        # Without the token, which would stay in the browser's history.
        rest = request.rel_url.without_query_params(_TOKEN)
        response = web.Response(status=303, headers={"Location": "./" + str(rest).rpartition("/")[2]})
        response.set_cookie(self.cookie, self._session, httponly=True, samesite="Strict", path="/")
        return response


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Adds to each answer what tells browsers to be strict."""
    response.headers.update(_HEADERS)
