"""Authenticates callers: by a grant, and by the token of the very pod or machine that the grant was signed for.

Neither is enough alone: grants are in pods' manifests, and other programs of a pod's service account have tokens. A
pod's token is that of its service account, which the API server reviews; a machine has made its own, whose digest is in
its grant.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from pydantic import SecretBytes

from perdure.base.credentials.grants import Grant, NotGranted, PodName
from perdure.base.credentials.names import AUDIENCE, GRANT_HEADER, TOKEN_HEADER
from perdure.base.credentials.tickets import digest_of
from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.gateway.limits import STRANGERS, Limits
from perdure.gateway.lru_cache import LruCache

logger = logging.getLogger(__name__)

_REVIEW_PATH: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
_SERVICE_ACCOUNT: Final = "system:serviceaccount:"

_VALID_SECONDS: Final = 60.0
"""The time for which a reviewed token is accepted without another review: the agent of a deleted pod can continue
for as long."""
_STALE_SECONDS: Final = 3600.0
"""The time for which it is accepted while the API server does not answer: leases must outlast an outage of it."""
_PATIENCE_SECONDS: Final = 1.0
"""How long a call waits for the review of a token that was valid before. A stuck API server must not hold up
heartbeats."""
_INVALID_SECONDS: Final = 5.0
_TOLD_EVERY: Final = 60.0
"""Seconds between two lines of the log about one outage: each call of each agent meets it."""
_ASKED_WITHIN: Final = 300.0
"""Seconds after a review has begun in which a missing answer is told: without agents that call nothing is missing."""
_REMEMBERED: Final = 20_000
"""Reviews and grants kept; each takes about 1 KB."""


class Unauthenticated(Exception):
    """The caller has not proven who it is; the message is for it and for the log."""


class PlaceLost(Unauthenticated):
    """A machine that joined does not have its place any more."""


class Unavailable(Exception):
    """The caller cannot be authenticated now."""


def bearer_of(headers: Mapping[str, str]) -> str:
    """Returns the token that a call carries.

    Raises:
        Unauthenticated: if there is none.
    """
    token = headers.get(TOKEN_HEADER, "").removeprefix("Bearer ")
    if not token:
        raise Unauthenticated(f"no token in {TOKEN_HEADER}")
    return token


class TokenReviewer(Protocol):
    """Finds the pod that a service account token is bound to."""

    async def pod_of(self, token: str) -> PodName:
        """Returns the pod.

        Raises:
            Unauthenticated: if the token is not valid, or is not bound to a pod.
            Unavailable: if the token cannot be reviewed now.
        """
        ...


class NoTokenReviewer:
    """The reviewer of a gateway without a cluster, which serves machines that join and no pods."""

    async def pod_of(self, token: str) -> PodName:
        raise Unauthenticated("this gateway serves no pods: it was started without a cluster")


class ApiTokenReviewer:
    """Asks the API server, which also knows whether the token's pod still exists."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    async def pod_of(self, token: str) -> PodName:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            status = (await self._api.create(_REVIEW_PATH, review))["status"]
        except (KubernetesError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"the API server reviews no tokens: {error}") from error
        if not status.get("authenticated") or AUDIENCE not in status.get("audiences", ()):
            raise Unauthenticated("the service account token is not valid for this gateway, or its pod is gone")
        user: dict[str, Any] = status["user"]
        extra: dict[str, list[str]] = user.get("extra") or {}
        names = extra.get(_POD_NAME) or []
        account = str(user.get("username", ""))
        if len(names) != 1 or not account.startswith(_SERVICE_ACCOUNT):
            raise Unauthenticated("the token is not bound to a pod")
        return PodName(namespace=account.removeprefix(_SERVICE_ACCOUNT).split(":")[0], name=names[0])


@dataclass
class _Review:
    pod: PodName | None
    """None where the token is not valid."""
    reason: str
    at: float


class Callers:
    """Authenticates callers.

    Invariants: a grant is accepted only with a valid token of its own pod; a token is reviewed at most once at a time;
    nothing that a caller sends is logged.
    """

    def __init__(self, keys: Sequence[SecretBytes], reviewer: TokenReviewer) -> None:
        self._keys = keys
        self._reviewer = reviewer
        self._grants = LruCache[str, Grant](_REMEMBERED)
        self._reviews = LruCache[bytes, _Review](_REMEMBERED)
        self._strangers = Limits(STRANGERS)
        self._under_review: dict[bytes, asyncio.Task[_Review]] = {}
        self._unanswered_since: float | None = None
        self._asked_at = -math.inf
        self._told_at = -math.inf

    @property
    def silence(self) -> float:
        """The seconds for which the API server has answered no review, although it was asked; 0 if none is due."""
        now = time.monotonic()
        if self._unanswered_since is None or now - self._asked_at >= _ASKED_WITHIN:
            return 0.0
        return now - self._unanswered_since

    def grant(self, headers: Mapping[str, str]) -> Grant:
        """Returns the grant that a call carries. The caller is not authenticated yet.

        Raises:
            Unauthenticated: if there is none, or it is not genuine.
        """
        text = headers.get(GRANT_HEADER, "")
        if not text:
            raise Unauthenticated(f"no grant in {GRANT_HEADER}")
        if known := self._grants.get(text):
            return known
        try:
            grant = Grant.verify(text, self._keys)
        except NotGranted as error:
            raise Unauthenticated(str(error)) from error
        self._grants.put(text, grant)
        return grant

    async def authenticate(self, grant: Grant, headers: Mapping[str, str], *, address: str) -> None:
        """Checks that the caller is the pod or the machine that the grant is for.

        Args:
            grant: Carried by the call.
            headers: Of the call.
            address: Where the caller connects from.

        Raises:
            Unauthenticated: if the token is missing, wrong, or another pod's.
            Unavailable: if the token cannot be reviewed now.
            TooMany: if the address sends too many unknown tokens.
        """
        token = bearer_of(headers)
        if grant.machine:
            if not hmac.compare_digest(grant.machine, digest_of(token)):
                raise Unauthenticated("grant and token are of different machines")
            return
        review = await self._review_of(token, address)
        if review.pod is None:
            raise Unauthenticated(review.reason)
        if review.pod != grant.pod:
            raise Unauthenticated("grant and service account token are of different pods")

    async def _review_of(self, token: str, address: str) -> _Review:
        digest = hashlib.sha256(token.encode()).digest()
        known = self._reviews.get(digest)
        age = time.monotonic() - known.at if known else 0.0
        if known and age < (_VALID_SECONDS if known.pod else _INVALID_SECONDS):
            return known
        if known and known.pod and age < _STALE_SECONDS:
            return await self._review_again(digest, token, known)
        with self._strangers.one_call(address):
            # A caller that hangs up does not end the review that others wait for.
            return await asyncio.shield(self._started_review(digest, token))

    async def _review_again(self, digest: bytes, token: str, known: _Review) -> _Review:
        """Reviews a token that has been valid; the last review holds while the API server does not answer."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await asyncio.shield(self._started_review(digest, token))
        except (TimeoutError, Unavailable) as error:
            if time.monotonic() - self._told_at >= _TOLD_EVERY:
                self._told_at = time.monotonic()
                logger.warning("%s; accepting those that it has reviewed", error or "the API server is slow")
            return known

    def _started_review(self, digest: bytes, token: str) -> asyncio.Task[_Review]:
        task = self._under_review.get(digest)
        if task is None:
            task = self._under_review[digest] = asyncio.create_task(self._review(digest, token))
            task.add_done_callback(lambda ended: self._forget(digest, ended))
        return task

    async def _review(self, digest: bytes, token: str) -> _Review:
        self._asked_at = time.monotonic()
        if self._unanswered_since is None:
            self._unanswered_since = self._asked_at
        try:
            pod, reason = await self._reviewer.pod_of(token), ""
        except Unauthenticated as error:
            pod, reason = None, str(error)
        self._unanswered_since = None
        review = _Review(pod, reason, time.monotonic())
        self._reviews.put(digest, review)
        return review

    def _forget(self, digest: bytes, ended: asyncio.Task[_Review]) -> None:
        self._under_review.pop(digest, None)
        if not ended.cancelled():
            # All callers that waited may have hung up; asyncio would log that the error was not read.
            ended.exception()
