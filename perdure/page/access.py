"""Who a request comes from, and what that user may see and change: the one border between pages and identities."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from aiohttp import web

from perdure.base.errors import PerdureError, Refused

_AT_ONCE = 16
"""Rights of a user that are looked up at a time: where the API server is away, each takes seconds."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Right(Enum):
    """A right on the jobs of a namespace, as Kubernetes' rights on its objects."""

    READ = ("list", "trainingjobs", "")
    LOGS = ("get", "pods", "log")
    CHANGE = ("update", "trainingjobs", "")
    END = ("delete", "trainingjobs", "")

    @property
    def verb(self) -> str:
        return self.value[0]

    @property
    def resource(self) -> str:
        return self.value[1]

    @property
    def subresource(self) -> str:
        return self.value[2]

    @property
    def group(self) -> str:
        return "perdure.dev" if self.resource == "trainingjobs" else ""

    def __str__(self) -> str:
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {resource}{f'.{self.group}' if self.group else ''}"


class ApiAway(PerdureError):
    """The API server, which knows users and their rights, does not answer."""


class NotAllowed(Refused):
    """The user lacks a right."""


class Visit(Protocol):
    """The user of one request."""

    @property
    def user(self) -> str:
        """The user's name; empty where all are admitted who have the link."""
        ...

    @property
    def csrf(self) -> str:
        """A secret that every request of this user contains that changes something."""
        ...

    @property
    def has_signed_in(self) -> bool:
        """Whether the user can sign out here."""
        ...

    async def is_known(self) -> bool:
        """Whether the user is still one whom the pages are for."""
        ...

    async def may(self, right: Right, namespace: str) -> bool:
        """Whether the user has a right on the jobs of a namespace now."""
        ...


class Holder(NamedTuple):
    """Anyone who has the link of `perdure ui`: may do everything that its server does."""

    csrf: str
    user: str = ""
    has_signed_in: bool = False

    async def is_known(self) -> bool:
        return True

    async def may(self, right: Right, namespace: str) -> bool:
        return True


VISIT = web.RequestKey[Visit]("visit")


async def require(request: web.Request, right: Right, namespace: str) -> None:
    """Lets a request pass only if its user has the right.

    Raises:
        NotAllowed: if the user lacks it.
    """
    visit = request[VISIT]
    if not await visit.may(right, namespace):
        raise NotAllowed(
            f"{visit.user} may not do this in the namespace {namespace}",
            remedy=f"It takes the right to {right} there, which an administrator grants by a RoleBinding.",
        )


async def allowed(visit: Visit, right: Right, namespaces: Iterable[str]) -> frozenset[str]:
    """Those of some namespaces in which the user has the right, as far as that can be said.

    Raises:
        ApiAway: if it can be said of none.
    """
    questions = [(right, namespace) for namespace in set(namespaces)]
    answers = await _answers(visit, questions)
    unknown = next((answer for answer in answers if isinstance(answer, ApiAway)), None)
    if unknown is not None and True not in answers:
        raise unknown
    return frozenset(namespace for (_, namespace), answer in zip(questions, answers, strict=True) if answer is True)


async def held(visit: Visit, rights: Iterable[Right], namespace: str) -> frozenset[Right]:
    """Those of some rights that the user is known to have in a namespace."""
    questions = [(right, namespace) for right in set(rights)]
    answers = await _answers(visit, questions)
    return frozenset(right for (right, _), answer in zip(questions, answers, strict=True) if answer is True)


async def _answers(visit: Visit, questions: Sequence[tuple[Right, str]]) -> list[bool | ApiAway]:
    """Whether the user has each right; why that cannot be said."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def answer(right: Right, namespace: str) -> bool | ApiAway:
        async with slots:
            try:
                return await visit.may(right, namespace)
            except ApiAway as error:
                return error

    return await asyncio.gather(*(answer(*question) for question in questions))


def derived(secret: str, purpose: str) -> str:
    """A secret for one purpose, made of another one."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


async def require_own_form(request: web.Request, csrf: str) -> None:
    """Lets a request that may change something pass only if it comes from a form of these pages.

    Raises:
        HTTPForbidden: if it does not.
    """
    if request.method in ("GET", "HEAD"):
        return
    given = (await request.post()).get("csrf", "")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), csrf.encode()):
        raise web.HTTPForbidden(text="This form is of another server: load the page again.\n")
