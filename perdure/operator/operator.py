"""The operator's loops: it follows the objects, watches their runs, and reconciles each one after a change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from activities.nodes.kubernetes.api import Changed, KubernetesApi, KubernetesError, Listed, Removed
from perdure.backoff import Backoff
from perdure.client.client import Client
from perdure.errors import ControlPlaneUnreachable, PerdureError
from perdure.operator.owners import Owners
from perdure.operator.ownership import Ownership
from perdure.operator.reconcile import Reconciler
from perdure.operator.resource import TrainingJobResource, collection
from perdure.operator.runs import Runs
from perdure.operator.workqueue import Workqueue

LOOKS_PER_SECOND = 20.0
"""The limit of reconciles per second: each costs Temporal three calls and the API server one at most. The status of a
thousand running jobs is at most 50 seconds old."""
LOOKS_AT_ONCE = 8
ROUND = 3.0
"""Seconds between two queries for jobs that have changed: the server's visibility is about a second behind."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before an object is reconciled again after an error; doubles each time."""

logger = logging.getLogger("perdure.operator")


class Operator:
    """Serves all objects until it is cancelled."""

    def __init__(
        self,
        api: KubernetesApi,
        client: Client,
        *,
        namespaces: Sequence[str] = (),
        ownership: Ownership = Ownership.REQUIRE,
    ) -> None:
        """Creates an operator.

        Args:
            api: The API server that holds the objects.
            client: A client of the Temporal namespace where their jobs run.
            namespaces: Only objects of these namespaces; empty: of all.
            ownership: The treatment of the objects' owners.
        """
        self._api = api
        self._runs = Runs(client)
        self._reconciler = Reconciler(api, self._runs, Owners(api, ownership))
        self._namespaces = tuple(dict.fromkeys(namespaces))
        self._resources: dict[str, TrainingJobResource] = {}
        self._queue = Workqueue(per_second=LOOKS_PER_SECOND)
        self._backoffs: dict[str, Backoff] = {}

    async def run(self) -> None:
        """Serves the objects.

        Raises:
            KubernetesError: if the API server does not know the resource, or does not permit watching it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for namespace in self._namespaces or (None,):
                    group.create_task(self._follow(namespace))
                group.create_task(self._notice())
                for _ in range(LOOKS_AT_ONCE):
                    group.create_task(self._serve())
        except ExceptionGroup as errors:
            refused, others = errors.split(KubernetesError)
            if refused is None or others is not None:
                raise
            raise refused.exceptions[0] from None

    async def _follow(self, namespace: str | None) -> None:
        async with contextlib.aclosing(self._api.follow(collection(namespace))) as changes:
            async for change in changes:
                match change:
                    case Listed(objects):
                        listed = {uid: known for uid, known in self._resources.items() if _within(known, namespace)}
                        for thing in objects:
                            listed.pop(self._see(thing), None)
                        for uid in listed:
                            self._forget(uid)
                    case Changed(thing):
                        self._see(thing)
                    case Removed(thing):
                        self._forget(thing["metadata"]["uid"])

    def _see(self, thing: dict[str, Any]) -> str:
        resource = TrainingJobResource.model_validate(thing)
        uid = resource.metadata.uid
        if uid in self._resources:
            self._know(resource)
        else:
            self._resources[uid] = resource
            self._queue.plan(uid)
        return uid

    def _know(self, resource: TrainingJobResource) -> None:
        """Takes an object from the watch or from the answer to a reconcile, unless a newer one is known.

        The operator's own writes are not news, but the answer may hold a change that the watch has not delivered yet.
        """
        uid = resource.metadata.uid
        before = self._resources[uid]
        if resource.metadata.version < before.metadata.version:
            return
        self._resources[uid] = resource
        # A request to delete it is counted as a generation, too.
        if before.metadata.generation != resource.metadata.generation:
            self._queue.plan(uid)

    def _forget(self, uid: str) -> None:
        self._resources.pop(uid, None)
        self._backoffs.pop(uid, None)
        self._queue.forget(uid)

    async def _notice(self) -> None:
        """Schedules reconciles for jobs that have changed in Temporal; one query covers all jobs."""
        before: Mapping[str, object] | None = None
        while True:
            await asyncio.sleep(ROUND)
            waited_for = {
                resource.workflow_id: uid
                for uid, resource in self._resources.items()
                if resource.status.run_id and not resource.status.finished
            }
            if not waited_for:
                before = None
                continue
            try:
                now = await self._runs.edges()
            except PerdureError as error:
                logger.warning("%s", error)
                continue
            for workflow_id, uid in waited_for.items():
                if before is not None and before.get(workflow_id) != now.get(workflow_id):
                    self._queue.plan(uid)
            before = now

    async def _serve(self) -> None:
        while True:
            uid = await self._queue.take()
            try:
                await self._look(uid)
            finally:
                self._queue.give_back(uid)

    async def _look(self, uid: str) -> None:
        resource = self._resources.get(uid)
        if resource is None:
            return
        try:
            looked = await self._reconciler.look(resource)
        except Exception as error:
            # An error in one object must not block the others.
            pause = self._backoffs.setdefault(uid, Backoff(FIRST_PAUSE, LONGEST_PAUSE)).next_pause()
            expected = isinstance(error, PerdureError | KubernetesError | OSError | TimeoutError)
            text = f"{error} {getattr(error, 'remedy', '')}".strip() or type(error).__name__
            logger.warning(
                "%s: looked at again in %.0f s: %s", resource.workflow_id, pause, text, exc_info=not expected
            )
            self._queue.plan(uid, after=pause)
            if isinstance(error, ControlPlaneUnreachable):
                with contextlib.suppress(KubernetesError, OSError, TimeoutError):
                    await self._reconciler.doubt(resource, error)
            return
        self._backoffs.pop(uid, None)
        if uid in self._resources:
            self._know(looked.resource)
        if looked.again is not None:
            self._queue.plan(uid, after=looked.again)


def _within(resource: TrainingJobResource, namespace: str | None) -> bool:
    return namespace is None or resource.metadata.namespace == namespace
