"""Client of the Kubernetes API server: requests with retries, and lists that are watched indefinitely.

The official client authenticates and connects; objects stay plain JSON, because its typed models know the fields of
one Kubernetes release only and would drop other fields of users' `pod_template`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import importlib.metadata
import json
import logging
import os
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.utils import Backoff as RequestBackoff
from kubernetes.aio.utils import on_retry_after_error

from perdure.base.backoff import Backoff
from perdure.base.kubernetes_credentials import Credentials
from perdure.base.kubernetes_errors import Absent, KubernetesError, error_of
from perdure.base.nested_json import read_json_aside

logger = logging.getLogger(__name__)

Object = dict[str, Any]
"""A Kubernetes object, as JSON."""

_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_PAGE = 500
"""Objects of one answer where a collection may be large, as kubectl requests them. An answer has 30 s, and is in memory
as a whole."""
_SHORT_WATCH = 5.0
"""Seconds. A server ends a watch after the minutes that it was asked for; one that ends so soon is begun again after a
pause."""
_WATCH_SECONDS = 300
"""Seconds for which the server keeps a watch open; bookmarks arrive about every minute."""
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=150)
"""Read timeout of a watch: a connection that is silent for longer was cut without notice."""
_RETRIES = RequestBackoff(steps=6, duration=0.2, factor=2.0, jitter=0.5)
"""Six attempts in about eight seconds, or as the server's Retry-After says; after that Temporal retries the
activity."""
_LONGEST_WAIT = 60.0
"""The longest time in seconds for which a Retry-After is followed: a proxy that is being maintained may name an hour,
and who watches would see nothing for as long, however soon the API server is back."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0
_REFUSAL_IS_FINAL = 5.0
"""Seconds for which a watch is retried that the server refuses as unauthorized; other requests follow `_RETRIES`."""
_PATH = re.compile(r"(/[A-Za-z0-9][-A-Za-z0-9._:]*)+")
"""Paths of the API. Names in them come from requests: none may lead to another object, as `..` and `?` would."""
TRANSIENT = (aiohttp.ClientError, TimeoutError, ConnectionError)
"""Errors of the connection to the API server: the same request may succeed later."""


@dataclass(frozen=True)
class Listed:
    """All objects that exist now. Objects that were listed before and are missing here have been removed."""

    objects: tuple[Object, ...]


@dataclass(frozen=True)
class Changed:
    """An object that is new or different."""

    object: Object


@dataclass(frozen=True)
class Removed:
    """An object that has been removed, in its last state."""

    object: Object


Change = Listed | Changed | Removed


def core_path(namespace: str, collection: str) -> str:
    """Returns the path of a namespace's objects of one of Kubernetes' own kinds, such as `pods`."""
    return f"/api/v1/namespaces/{namespace}/{collection}"


class KubernetesApi:
    """A client of one cluster's API server, for one event loop."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        part: str = "perdure",
        renew: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Creates a client.

        Args:
            configuration: The API server and the credentials.
            part: The name of this part of Perdure in audit logs, and in `managedFields` of objects that it writes.
            renew: Writes new credentials into the configuration, once the server no longer accepts those in it.
        """
        self._configuration = configuration
        self._credentials = Credentials(configuration, renew, on_change=self._connect_anew)
        configuration.connection_pool_maxsize = 0  # Without limit: every watch holds a connection.
        # If no proxy is set, looking for one would make each request search for the user's netrc.
        cast("Any", configuration).client_session_kwargs = {"trust_env": bool(getproxies())}
        self._client: Any = ApiClient(configuration)
        # The API server takes the field manager's name from what is before the slash.
        self._client.user_agent = f"{part}/{importlib.metadata.version('perdure')}"
        self._former: Any = None
        """The connections that were made with the certificate before: requests are in progress there."""
        self._unwatched: set[str] = set()
        """Collections that may be listed and not watched, as the log says."""

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, *, part: str = "perdure") -> Self:
        """Connects to a cluster: that of a kubeconfig (given, or in `KUBECONFIG`), else the one that this process is a
        pod of, else that of the user's own kubeconfig.

        Raises:
            OSError: if the kubeconfig cannot be read.
        """
        configuration = Configuration()
        named = kubeconfig or os.environ.get("KUBECONFIG")
        load = cast("Any", kubernetes_config)
        if named is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            # It reads the file with the token again every minute.
            load.load_incluster_config(client_configuration=configuration)
            return cls(configuration, part=part)

        async def read_kubeconfig() -> None:
            await load.load_kube_config(config_file=named, client_configuration=configuration)

        await read_kubeconfig()
        return cls(configuration, part=part, renew=read_kubeconfig)

    async def close(self) -> None:
        if self._former is not None:
            await self._former.close()
        await self._client.close()

    async def _connect_anew(self) -> None:
        """Makes new connections from now on: the server knows a client by the certificate of its connection, and the
        client checks the server's when it connects."""
        if self._former is not None:
            await self._former.close()
        self._former = self._client.rest_client
        self._client.rest_client = RESTClientObject(self._configuration)

    async def get(self, path: str, *, insist: bool = True) -> Object | None:
        """Returns the object; None if it does not exist. `insist` is as in `patch`.

        Raises:
            KubernetesError: if it is refused.
        """
        try:
            return await self._request("GET", path, insist=insist)
        except Absent:
            return None

    async def list(
        self, path: str, *, labels: str = "", fields: str = "", limit: int | None = None, insist: bool = True
    ) -> builtins.list[Object]:
        """Returns the objects of a collection that have these labels and fields; `insist` as in `patch`."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(limit or "")}
        query = {name: value for name, value in query.items() if value}
        return (await self._request("GET", path, query=query, insist=insist))["items"]

    async def create(self, path: str, content: Object, *, dry_run: bool = False, strict: bool = False) -> Object:
        """Creates the object in the collection.

        Args:
            path: the collection's path.
            content: the object.
            dry_run: only check whether the server would create it.
            strict: refuse fields that the server does not know, rather than leaving them out.

        Raises:
            KubernetesError: if it is refused; 409 also if an earlier attempt of this call has created it.
        """
        query = ({"dryRun": "All"} if dry_run else {}) | ({"fieldValidation": "Strict"} if strict else {})
        return await self._request("POST", path, query=query, content=content)

    async def create_or_get(self, path: str, content: Object) -> Object:
        """Creates the object in the collection, or returns the one of its name, which an earlier attempt or another
        process may have created.

        Raises:
            KubernetesError: if it is refused.
        """
        try:
            return await self.create(path, content)
        except KubernetesError as error:
            found = await self.get(f"{path}/{content['metadata']['name']}") if error.reason == "AlreadyExists" else None
            if found is None:
                raise
            return found

    async def patch(
        self, path: str, content: Object, *, strategic: bool = False, dry_run: bool = False, insist: bool = True
    ) -> Object | None:
        """Merges the content into the object; returns None if it does not exist. A `resourceVersion` or `uid` in the
        content's metadata must be the object's.

        Args:
            path: the object's.
            content: the fields to change; None removes a field.
            strategic: merge lists by their items' names and follow directives, which only built-in kinds support.
            dry_run: only return the object as it would be.
            insist: request it again for some seconds if the caller seems to lack the right.

        Raises:
            KubernetesError: if it is refused; 409 where the object is another one.
        """
        kind = f"application/{'strategic-' if strategic else ''}merge-patch+json"
        try:
            query = {"dryRun": "All"} if dry_run else {}
            return await self._request("PATCH", path, query=query, content=content, content_type=kind, insist=insist)
        except Absent:
            return None

    async def delete(self, path: str, *, grace: int | None = None, uid: str = "", insist: bool = True) -> Object | None:
        """Requests the object's deletion. Returns the server's response; None if the object does not exist.

        Args:
            path: the object's.
            grace: seconds for a pod's processes to end; None for the pod's own setting.
            uid: the object's uid, to keep an object that was created again under its name.
            insist: as in `patch`.

        Raises:
            KubernetesError: if it is refused; 409 where the object is another one.
        """
        content: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace is not None:
            content["gracePeriodSeconds"] = grace
        if uid:
            content["preconditions"] = {"uid": uid}
        try:
            return await self._request("DELETE", path, content=content, insist=insist)
        except Absent:
            return None

    async def follow(
        self,
        path: str,
        *,
        labels: str = "",
        fields: str = "",
        reduce: Callable[[Object], Object] | None = None,
        on_contact: Callable[[Exception | None], None] | None = None,
    ) -> AsyncGenerator[Change]:
        """Yields all objects, then every change, across outages of the server, expired versions and its return to an
        earlier state.

        Args:
            path: The collection.
            labels: Only objects with these labels, as a selector.
            fields: Only objects with these fields, as a selector.
            reduce: Makes of each object what is needed of it, so that a collection of any size is never in memory as
                a whole; None for all of it.
            on_contact: Is called with None whenever the server tells something, if only that nothing has changed, as it
                does about every minute; and with the error whenever it does not answer, before it is tried again.

        Raises:
            KubernetesError: if the server refuses permanently: the collection does not exist or may not be read.
        """
        contact = on_contact or _ignored
        query = {"labelSelector": labels, "fieldSelector": fields}
        query = {name: value for name, value in query.items() if value}
        version = ""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        loop = asyncio.get_running_loop()
        refused_since: float | None = None
        while True:
            watching, heard = bool(version), False
            began = loop.time()
            try:
                if not watching:
                    objects, version = await self._list_all(path, query, reduce)
                    contact(None)
                    yield Listed(objects)
                    watching = True
                began = loop.time()
                async with contextlib.aclosing(self._watch(path, query, version, contact)) as events:
                    async for kind, thing in events:
                        version, heard = thing["metadata"]["resourceVersion"], True
                        refused_since = None
                        backoff.reset()
                        if kind == "DELETED":
                            yield Removed(thing)
                        elif kind != "BOOKMARK":
                            yield Changed(thing if reduce is None else reduce(thing))
                if (ran := loop.time() - began) < _SHORT_WATCH:
                    # A server, or a proxy before it, that ends watches at once would be asked again without end.
                    await asyncio.sleep(backoff.next_pause(ran=ran))
            except KubernetesError as error:
                if error.lacks_version:
                    # The server does not have the changes since this version: list again.
                    logger.info("%s: version %s is gone, listing again: %s", path, version, error)
                    version = ""
                    if (ran := loop.time() - began) < _SHORT_WATCH:
                        # A server that is behind the one that has answered the list would be asked without end.
                        await asyncio.sleep(backoff.next_pause(ran=ran))
                elif error.unauthorized and watching:
                    refused_since = refused_since or loop.time()
                    if loop.time() - refused_since > _REFUSAL_IS_FINAL:
                        self._tell_unwatched(path, error)
                        raise
                    await _pause(backoff, path, error)
                elif not error.transient:
                    raise
                else:
                    contact(error)
                    await _pause(backoff, path, error)
            except TRANSIENT as error:
                if isinstance(error, aiohttp.SocketTimeoutError) and not heard:
                    # Not even that nothing has changed: a server that was set back to a backup tells nothing before it
                    # comes to this version again.
                    version = ""
                contact(error)
                await _pause(backoff, path, error)

    def _tell_unwatched(self, path: str, error: KubernetesError) -> None:
        """Logs, once, what a missing right costs: who lists again and again seems to work."""
        if path not in self._unwatched:
            self._unwatched.add(path)
            logger.error(
                "%s may be listed and not watched, so changes are seen late, when it is listed again; grant the verb "
                "watch (docs/kubernetes.md#the-worker): %s",
                path,
                error,
            )

    async def _list_all(
        self, path: str, query: Mapping[str, str], reduce: Callable[[Object], Object] | None
    ) -> tuple[tuple[Object, ...], str]:
        """Returns all objects, and the version of the collection that they are of."""
        if reduce is None:
            listed = await self._request("GET", path, query=query)
            return tuple(listed["items"]), listed["metadata"]["resourceVersion"]
        objects: list[Object] = []
        query = {**query, "limit": str(_PAGE)}
        while True:
            listed = await self._request("GET", path, query=query)
            objects += map(reduce, listed["items"])
            metadata = listed["metadata"]
            if not (following := metadata.get("continue")):
                return tuple(objects), metadata["resourceVersion"]
            query["continue"] = following

    async def _watch(
        self, path: str, query: Mapping[str, str], version: str, contact: Callable[[None], None]
    ) -> AsyncGenerator[tuple[str, Object]]:
        seconds = str(int(_WATCH_SECONDS * random.uniform(0.8, 1.2)))
        watching = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": seconds, "resourceVersion": version}
        response = await self._send("GET", path, {**query, **watching}, None, patience=_WATCH_TIMEOUT)
        contact(None)
        try:
            async for line in _lines(response):
                event = await read_json_aside(line)
                if event["type"] == "ERROR":
                    raise error_of(event["object"])
                contact(None)
                yield event["type"], event["object"]
        finally:
            response.close()

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        content: Object | None = None,
        content_type: str = "application/json",
        insist: bool = True,
    ) -> Object:
        async def once() -> Object:
            response = await self._send(method, path, query or {}, content, content_type=content_type)
            return await read_json_aside(await response.read())

        def again(error: Exception) -> bool:
            if isinstance(error, KubernetesError):
                # Quotas count each creation in an object of their own, and many at once conflict there.
                conflicts = method == "POST" and error.reason == "Conflict"
                # Credentials that have expired, as those of a program do within minutes, have been renewed by then.
                expired = error.status == 401
                return error.transient or conflicts or expired or (error.unauthorized and insist)
            return isinstance(error, TRANSIENT)

        async def pause(seconds: float) -> None:
            await asyncio.sleep(min(seconds, _LONGEST_WAIT))

        return await on_retry_after_error(_RETRIES, again, once, pause)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: Object | None,
        *,
        content_type: str = "application/json",
        patience: aiohttp.ClientTimeout = _REQUEST_TIMEOUT,
    ) -> aiohttp.ClientResponse:
        if not _PATH.fullmatch(path):
            raise KubernetesError(400, "BadRequest", f"{path!r} is not the path of an object: a name in it is invalid")
        used = self._credentials.current
        parameters = await self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=content,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._client.call_api(*parameters, _request_timeout=patience)
        except aiohttp.ClientConnectorCertificateError:
            await self._credentials.renew_authority()
            raise
        response: aiohttp.ClientResponse = answer.response
        if response.status == 401:
            await self._credentials.renew(used)
        if response.status >= 400:
            text = await response.text()
            try:
                status = json.loads(text)
            except ValueError:
                status = {"code": response.status, "message": text.strip()[:500]}
            raise error_of({"code": response.status, **status}, response.headers)
        return response


def _ignored(error: Exception | None) -> None:
    pass


async def _pause(backoff: Backoff, path: str, error: Exception) -> None:
    """Waits before a path is watched again, as the server's Retry-After says."""
    pause = backoff.next_pause()
    if isinstance(error, KubernetesError) and error.headers.get("Retry-After", "").isdecimal():
        pause = max(pause, min(float(error.headers["Retry-After"]), _LONGEST_WAIT))
    logger.info("%s: watching again in %.1f s: %s", path, pause, error or type(error).__name__)
    await asyncio.sleep(pause * random.uniform(1, 1.5))


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields whole lines of any length: a pod may be larger than the client's buffer."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
