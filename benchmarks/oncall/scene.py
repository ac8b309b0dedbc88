"""One event's stage: a namespace of its own, a job in it, and what is seen of both."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.kubernetes.site import Site, eventually
from benchmarks.recovery.processes import TrialFailed
from benchmarks.recovery.processes import eventually as eventually_seen
from benchmarks.recovery.steps import StepLog, find_world
from perdure.base.errors import PerdureError
from perdure.base.kubernetes import KubernetesError, Object
from perdure.client.client import Client
from perdure.contract import JobStatus
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE

TRAIN = Path(__file__).parents[1] / "kubernetes" / "train.py"
ROLE = "worker"

START_SECONDS = 180.0
REPAIR_SECONDS = 180.0
END_SECONDS = 60.0

LONGEST_PAUSE = 2.0
"""Longest acceptable pause between two steps of about 50 ms where the event need not interrupt training; two ranks
share two cores with everything else."""

_OWN_KINDS = ("pods", "configmaps", "secrets", "services")
_GIVEN = "kube-root-ca.crt"
"""A ConfigMap that Kubernetes makes in every namespace."""


class Verdict(BaseModel):
    """What came of one event."""

    model_config = ConfigDict(frozen=True)

    event: str
    expected: str
    seconds: float | None = None
    """From the event until the expected state, or the longest pause of training if that need not be interrupted."""
    explained: str = ""
    """What `perdure explain` or `perdure status` said."""
    described: str = ""
    """The newest warning that `kubectl describe` shows of the job's objects."""
    left: tuple[str, ...] = ()
    """Objects of the namespace that outlived the job."""
    doubts: tuple[str, ...] = ()
    """Why a person on call would not be content; empty if there is no reason."""


class Scene:
    """A job of one or two pods, each with one rank, and the access to it that events need.

    Invariant: all objects in the scene's namespace that the scene did not make itself belong to the job.
    """

    def __init__(self, site: Site, client: Client, namespace: str, folder: Path) -> None:
        self.site = site
        self.client = client
        self.namespace = namespace
        self.name = "oncall"
        self.struck = time.time()
        """The time from which the event's consequences are counted."""
        self.seconds: float | None = None
        self.waits = ""
        """What the job reported while it waited."""
        self.started = False
        self._generation = 0
        self._folder = folder
        self._log = StepLog(folder)
        self._own: set[str] = set()

    def path(self, kind: str) -> str:
        """Returns the path of a collection of the namespace, such as `pods` or `policy/v1/poddisruptionbudgets`."""
        group, _, plural = kind.rpartition("/")
        return f"/{f'apis/{group}' if group else 'api/v1'}/namespaces/{self.namespace}/{plural}"

    async def make(self, kind: str, content: dict[str, Any], *, path: str = "") -> Callable[[], Awaitable[object]]:
        """Creates an object; returns what deletes it."""
        name = content["metadata"]["name"]
        self._own.add(name)
        where = path or self.path(kind)
        await self.site.api.create(where, content)
        return lambda: self.site.api.delete(f"{where}/{name}")

    async def submit(self, *, nodes: int | str = 2, role: dict[str, Any] | None = None, **fields: Any) -> None:
        """Submits the job, without waiting for it."""
        template = with_host_programs(self._folder)
        given = dict(role or {})
        template["spec"] |= given.pop("pod_spec", {})
        spec = {
            "name": self.name,
            "namespace": self.namespace,
            "backend": "kubernetes",
            "env": {"OMP_NUM_THREADS": "1", "BENCH_FOLDER": str(self._folder)},
            "limits": {"termination_grace_period": "5s"},
            "roles": {
                ROLE: {
                    "nodes": nodes,
                    "nproc_per_node": 1,
                    "image": BARE_IMAGE,
                    "resources": {"memory": "2Gi"},
                    "command": ["torchrun", str(TRAIN)],
                    "pod_template": template,
                    **given,
                }
            },
            **fields,
        }
        self.struck = time.time()
        await self.client.submit(spec)
        self.started = True

    async def train(self, *, nodes: int | str = 2, **given: Any) -> None:
        """Submits the job and waits until all its nodes step."""
        await self.submit(nodes=nodes, **given)
        await self.stepping(2, within=START_SECONDS)

    async def repaired(self, world: int = 2) -> None:
        """Waits until a world of this size steps that is newer than the one that the event struck."""

        async def newer() -> bool:
            return (await self.status()).generation > self._generation

        await eventually(newer, seconds=REPAIR_SECONDS, otherwise="the job forms no new world", pause=0.1)
        await self.stepping(world, since=time.time())

    async def stepping(self, world: int, *, within: float = REPAIR_SECONDS, since: float | None = None) -> None:
        """Waits until a world of this size steps after the event, or after another time."""
        found = await eventually_seen(
            lambda: find_world(self._log.refresh(), world_size=world, after=since or self.struck, count=10),
            seconds=within,
            otherwise=f"no world of {world} steps; {await self.tells()}",
        )
        self.seconds = found.time - self.struck

    async def undisturbed(self, seconds: float) -> None:
        """Watches training for some time after the event.

        Raises:
            TrialFailed: if it paused.
        """
        await asyncio.sleep(max(0.0, self.struck + seconds - time.time()))
        until = time.time()
        steps, longest = self._log.refresh(), 0.0
        for rank in (0, 1):
            times = [step.time for step in steps if step.rank == rank and self.struck <= step.time <= until]
            longest = max(longest, *(later - earlier for earlier, later in pairwise([self.struck, *times, until])))
        self.seconds = longest
        if longest > LONGEST_PAUSE:
            raise TrialFailed(f"training paused for {longest:.1f} s; {await self.tells()}")

    async def waits_for(self, word: str) -> None:
        """Waits until the job names what it waits for.

        Raises:
            TrialFailed: if it does not.
        """

        async def named() -> bool:
            self.waits = await self.tells()
            return word.lower() in self.waits.lower()

        with suppress(TrialFailed):
            await eventually(named, seconds=60, otherwise="", pause=0.5)
            return
        raise TrialFailed(f"the job does not say {word!r} within 60 s, but: {self.waits}")

    async def strike(self) -> None:
        """Marks now as the time of the event."""
        self._generation = (await self.status()).generation
        self.struck = time.time()

    async def pods(self, rank: int | None = None) -> list[Object]:
        labels = "perdure.dev/uid" + (f",perdure.dev/rank={rank}" if rank is not None else "")
        found = await self.site.api.list(self.path("pods"), labels=labels)
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    async def pod(self, rank: int = 1) -> Object:
        """Returns the newest pod of a node."""
        return (await eventually(lambda: self.pods(rank), seconds=60, otherwise=f"node {rank} has no pod"))[-1]

    async def delete_pod(self, rank: int = 1) -> None:
        await self.site.api.delete(f"{self.path('pods')}/{(await self.pod(rank))['metadata']['name']}")

    async def evict(self, rank: int = 1) -> None:
        """Evicts a node's pod, as a drain does.

        Raises:
            KubernetesError: if the API server refuses, for example for a disruption budget.
        """
        name = (await self.pod(rank))["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        await self.site.api.create(f"{self.path('pods')}/{name}/eviction", eviction)

    async def machine(self, rank: int = 1) -> str:
        return (await self.pod(rank))["spec"]["nodeName"]

    async def status(self) -> JobStatus:
        return await self.client.status(self.name)

    async def tells(self) -> str:
        """Returns what `perdure status` tells about the job now."""
        status = await self.status()
        return "; ".join(filter(None, (status.phase.value, status.reason, status.next_action, *status.warnings)))

    async def explained(self) -> str:
        """Returns what the newest incident tells."""
        incidents = await self.client.incidents(self.name)
        return f"{incidents[-1].title}: {incidents[-1].action}" if incidents else ""

    async def warned(self) -> str:
        """Returns the newest warning among the events of the namespace, which `kubectl describe` shows."""
        events = await self.site.api.list(self.path("events"))
        warnings = [event for event in events if event.get("type") == "Warning"]
        newest = max(warnings, key=lambda event: event["metadata"]["creationTimestamp"], default=None)
        return f"{newest['reason']}: {newest.get('message', '')}" if newest else ""

    async def end(self) -> tuple[str, ...]:
        """Cancels the job; returns the objects of its namespace that are still there a while later."""
        if self.started:
            with suppress(PerdureError, TimeoutError):
                await self.client.cancel(self.name)
                async with asyncio.timeout(END_SECONDS):
                    await self.client.wait(self.name)
        left: list[str] = []

        async def nothing_left() -> bool:
            left[:] = await self._left()
            return not left

        with suppress(TrialFailed):
            await eventually(nothing_left, seconds=END_SECONDS, otherwise="", pause=0.5)
        return tuple(left)

    async def _left(self) -> list[str]:
        found: list[str] = []
        for kind in _OWN_KINDS:
            for item in await self.site.api.list(self.path(kind)):
                name = item["metadata"]["name"]
                if name != _GIVEN and name not in self._own:
                    found.append(f"{kind}/{name}")
        return found


@asynccontextmanager
async def scene(site: Site, folder: Path) -> AsyncGenerator[Scene]:
    """Provides a scene; its namespace is deleted when the context closes."""
    namespace = f"oncall-{secrets.token_hex(3)}"
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as ends:
        content = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await site.api.create("/api/v1/namespaces", content)
        ends.push_async_callback(site.api.delete, f"/api/v1/namespaces/{namespace}")
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        await eventually(lambda: site.api.get(account), seconds=60, otherwise="the namespace has no service account")
        client = await ends.enter_async_context(Client(endpoint=site.client.endpoint, namespace=namespace))
        yield Scene(site, client, namespace, folder)


async def judge(
    site: Site, event: str, expected: str, play: Callable[[Scene], Awaitable[None]], folder: Path
) -> Verdict:
    """Plays one event; a job that does not do what is expected is a doubt, not an exception."""
    doubts: list[str] = []
    async with scene(site, folder) as stage:
        try:
            await play(stage)
        except (TrialFailed, KubernetesError, PerdureError) as failed:
            doubts.append(str(failed))
        explained, described = stage.waits, ""
        with suppress(PerdureError, KubernetesError):
            explained = explained or await stage.explained() if stage.started else ""
            described = await stage.warned()
        left = await stage.end()
        if left:
            doubts.append(f"left: {', '.join(left)}")
        return Verdict(
            event=event,
            expected=expected,
            seconds=stage.seconds,
            explained=explained,
            described=described,
            left=left,
            doubts=tuple(doubts),
        )
