"""The operator's loops: it follows the objects, watches their runs, and reconciles each one after a change."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from perdure.base.backoff import Backoff
from perdure.base.errors import PerdureError
from perdure.base.kubernetes import TRANSIENT, Change, Changed, KubernetesApi, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.operator.coverage import EVERYWHERE, Coverage
from perdure.operator.metrics import OperatorMetrics
from perdure.operator.owners import Owners
from perdure.operator.ownership import Ownership
from perdure.operator.reconcile import BACKENDS, Reconciler
from perdure.operator.resource import FINALIZER, TrainingJobResource, collection
from perdure.operator.runs import Runs
from perdure.operator.scale_plans import ScalePlans
from perdure.operator.workqueue import Workqueue
from perdure.spec.job import Backend

LOOKS_PER_SECOND = 20.0
"""The limit of reconciles per second: each costs Temporal three calls and the API server one at most. The status of a
thousand running jobs is at most 50 seconds old."""
LOOKS_AT_ONCE = 8
LOOKS_AT_ONCE_OF_A_NAMESPACE = 4
"""Objects whose reconciles take long, as those whose owners are denied something, leave room for other namespaces'."""
ROUND = 3.0
"""Seconds between two queries for jobs that have changed: the server's visibility is about a second behind."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before an object is reconciled again after an error, or a namespace is tried again that could not be served;
doubles each time."""

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
        backends: Collection[Backend] = BACKENDS,
    ) -> None:
        """Creates an operator.

        Args:
            api: The API server that holds the objects.
            client: A client of the Temporal namespace where their jobs run.
            namespaces: Only objects of these namespaces; empty: of all.
            ownership: The treatment of the objects' owners.
            backends: The backends that objects may name.
        """
        self._api = api
        self._runs = Runs(client)
        self._reconciler = Reconciler(api, self._runs, Owners(api, ownership), backends=backends)
        self._plans = ScalePlans(api, client, self)
        self.coverage = Coverage(namespaces or (EVERYWHERE,))
        self.metrics = OperatorMetrics(self.coverage, lambda: len(self._resources))
        self._resources: dict[str, TrainingJobResource] = {}
        self._queue = Workqueue(
            per_second=LOOKS_PER_SECOND, tenant_of=self._namespace_of, at_once=LOOKS_AT_ONCE_OF_A_NAMESPACE
        )
        self._backoffs: dict[str, Backoff] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> None:
        """Serves the objects; a namespace that cannot be served is a state of `coverage`, and no error."""
        async with asyncio.TaskGroup() as group:
            for namespace in self.coverage.namespaces:
                group.create_task(self._serve_namespace(namespace))
                group.create_task(self._plans.follow(None if namespace == EVERYWHERE else namespace))
            group.create_task(self._plans.serve())
            group.create_task(self._notice())
            for _ in range(LOOKS_AT_ONCE):
                group.create_task(self._queue.serve(self._look))

    @contextlib.asynccontextmanager
    async def hold(self, namespace: str, name: str) -> AsyncGenerator[TrainingJobResource | None]:
        """Yields a job's object, which is not reconciled meanwhile; None where there is none."""
        known = {uid: one.metadata for uid, one in self._resources.items()}
        uid = next((uid for uid, one in known.items() if (one.namespace, one.name) == (namespace, name)), None)
        if uid is None:
            yield None
            return
        async with self._turns[uid]:
            yield self._resources.get(uid)

    def take(self, resource: TrainingJobResource) -> None:
        """Takes in a change of an object that the operator has made itself, and has it reconciled."""
        uid = resource.metadata.uid
        if uid in self._resources:
            self._know(resource)
            self._queue.plan(uid)

    async def _serve_namespace(self, namespace: str) -> None:
        """Follows the objects of a namespace. While it cannot be served, its objects are not reconciled; a later list
        finds what was missed."""
        path = collection(None if namespace == EVERYWHERE else namespace)
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                contact = functools.partial(self._hear, namespace)
                async with contextlib.aclosing(self._api.follow(path, on_contact=contact)) as changes:
                    async for change in changes:
                        self._take(change, namespace)
            except Exception as error:
                # Whatever it is, the other namespaces are served.
                self.coverage.lose(namespace, error)
                if not isinstance(error, KubernetesError):
                    logger.exception("following %s failed", path)
            for uid in self._known_in(namespace):
                # Of a namespace that is being deleted the rights may go first, and not all of them.
                if not self._resources[uid].deleting:
                    self._forget(uid)
            await asyncio.sleep(backoff.next_pause(ran=loop.time() - began))

    def _hear(self, namespace: str, error: Exception | None) -> None:
        if error is None:
            self.coverage.gain(namespace)
        else:
            self.coverage.miss(namespace, error)

    def _take(self, change: Change, namespace: str) -> None:
        match change:
            case Listed(objects):
                gone = self._known_in(namespace) - {self._see(thing, listed=True) for thing in objects}
                for uid in gone:
                    self._forget(uid)
            case Changed(thing):
                self._see(thing)
            case Removed(thing):
                self._forget(thing["metadata"]["uid"])

    def _known_in(self, namespace: str) -> set[str]:
        known = self._resources.items()
        return {uid for uid, one in known if namespace in (EVERYWHERE, one.metadata.namespace)}

    def _see(self, thing: dict[str, Any], *, listed: bool = False) -> str:
        metadata = thing["metadata"]
        uid: str = metadata["uid"]
        try:
            resource = TrainingJobResource.model_validate(thing)
        except ValidationError as error:
            # Perhaps another release wrote it. Its job is left as it is, and other objects are served.
            logger.error("%s/%s cannot be read: %s", metadata.get("namespace"), metadata.get("name"), error)
            return uid
        if uid in self._resources:
            self._know(resource, listed=listed)
        else:
            self._resources[uid] = resource
            self._queue.plan(uid)
        return uid

    def _know(self, resource: TrainingJobResource, *, listed: bool = False) -> None:
        """Takes an object from the watch or from the answer to a reconcile, unless a newer one is known; from a list in
        any case, since an API server may be set back to a backup. A watch that follows has what the list lacks.

        The operator's own writes are not news, but the answer may hold a change that the watch has not delivered yet.
        """
        uid = resource.metadata.uid
        before = self._resources[uid]
        if resource.metadata.version < before.metadata.version and not listed:
            return
        self._resources[uid] = resource
        lost_finalizer = FINALIZER in before.metadata.finalizers and FINALIZER not in resource.metadata.finalizers
        # A request to delete it is counted as a generation, too.
        if before.metadata.generation != resource.metadata.generation or lost_finalizer:
            self._queue.plan(uid)

    def _namespace_of(self, uid: str) -> str:
        resource = self._resources.get(uid)
        return "" if resource is None else resource.metadata.namespace

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
            except Exception as error:
                # Objects are reconciled by time meanwhile.
                expected = isinstance(error, PerdureError)
                logger.warning("jobs that have changed are unknown: %s", error, exc_info=not expected)
                continue
            for workflow_id, uid in waited_for.items():
                if before is not None and before.get(workflow_id) != now.get(workflow_id):
                    self._queue.plan(uid)
            before = now

    async def _look(self, uid: str) -> None:
        async with self._turns[uid]:
            await self._reconcile(uid)
        if uid not in self._resources:
            self._turns.pop(uid, None)

    async def _reconcile(self, uid: str) -> None:
        resource = self._resources.get(uid)
        if resource is None:
            return
        try:
            looked = await self._reconciler.look(resource)
        except Exception as error:
            self.metrics.count_reconcile(failed=True)
            # An error in one object must not block the others.
            pause = self._backoffs.setdefault(uid, Backoff(FIRST_PAUSE, LONGEST_PAUSE)).next_pause()
            expected = isinstance(error, (PerdureError, KubernetesError, OSError, *TRANSIENT))
            text = f"{error} {getattr(error, 'remedy', '')}".strip() or type(error).__name__
            logger.warning(
                "%s: looked at again in %.0f s: %s", resource.workflow_id, pause, text, exc_info=not expected
            )
            self._queue.plan(uid, after=pause)
            await self._doubt(resource, error)
            return
        self.metrics.count_reconcile(failed=False)
        self._backoffs.pop(uid, None)
        if uid in self._resources:
            self._know(looked.resource)
        if looked.again is not None:
            self._queue.plan(uid, after=looked.again)

    async def _doubt(self, resource: TrainingJobResource, error: Exception) -> None:
        """Shows in the object why it is not reconciled, unless the API server is the reason."""
        if not isinstance(error, PerdureError) and not (isinstance(error, KubernetesError) and error.unauthorized):
            return
        try:
            looked = await self._reconciler.doubt(resource, error)
            if resource.metadata.uid in self._resources:
                self._know(looked.resource)
        except (KubernetesError, OSError, *TRANSIENT):
            pass  # It is looked at again.
        except Exception:
            # As an object that cannot be read since it was looked at: the others are served.
            logger.exception("%s: why it is not reconciled cannot be shown", resource.workflow_id)
