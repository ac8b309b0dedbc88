"""One event's stage: a namespace of its own, a job in it that a TrainingJob object describes, and what is seen of
both."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.kubernetes.site import eventually
from benchmarks.recovery.processes import TrialFailed
from benchmarks.recovery.processes import eventually as eventually_seen
from benchmarks.recovery.steps import StepLog, find_world
from perdure.base.errors import PerdureError
from perdure.base.kubernetes import Object
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.contract import EvidenceSource, IncidentView, JobStatus
from perdure.operator.resource import GROUP, KIND, VERSION, TrainingJobResource, collection
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.install_guide import CommandFailed

from .release import Site

TRAIN = Path(__file__).parents[1] / "kubernetes" / "train.py"
ROLE = "worker"

START_SECONDS = 300.0
REPAIR_SECONDS = 300.0
END_SECONDS = 60.0

LONGEST_PAUSE = 2.0
"""Longest acceptable pause between two steps of about 50 ms where the event need not interrupt training; two ranks
share two cores with everything else."""

_OWN_KINDS = ("pods", "configmaps", "secrets", "services", f"{GROUP}/{VERSION}/trainingjobs")
_GIVEN = "kube-root-ca.crt"
"""A ConfigMap that Kubernetes makes in every namespace."""

_WARNING = re.compile(r"^ +Warning +(\w+) +\S.*?  \S+  +(\S.*)$", re.MULTILINE)
"""A warning in a list of events: type, reason, age, component and message."""

FAILURES = (TrialFailed, CommandFailed, KubernetesError, PerdureError)
"""What makes an event differ from what is expected, rather than the benchmark fail."""


class Verdict(BaseModel):
    """What came of one event."""

    model_config = ConfigDict(frozen=True)

    event: str
    expected: str
    seconds: float | None = None
    """The longest pause of training since the event; where training waits for an administrator, the time from when
    nothing holds it back."""
    charged: int = 0
    """Restarts that the event used up of the job's budget."""
    explained: str = ""
    """What `perdure explain` or `perdure status` said."""
    described: str = ""
    """The newest warnings that `kubectl describe` shows of the TrainingJob and of the job's pods."""
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
        self.described = ""
        """What `kubectl describe` showed meanwhile."""
        self.started = False
        self._generation = 0
        self._folder = folder
        self._log = StepLog(folder)
        self._own: set[str] = set()

    async def kubectl(self, command: str) -> str:
        """Runs a command of kubectl in the scene's namespace; returns its output.

        Raises:
            CommandFailed: if it fails.
        """
        return await self.site.shell.run(f"kubectl {command}", f"--namespace={self.namespace}")

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
        """Applies the job's object; returns when the operator has started the job."""
        template = with_host_programs(self._folder)
        given = dict(role or {})
        template["spec"] |= given.pop("pod_spec", {})
        spec = {
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
        content = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": self.name}, "spec": spec}
        path = self._folder / "job.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        self.struck = time.time()
        await self.kubectl(f"apply --filename {path}")

        async def started() -> bool:
            resource = await self.resource()
            return bool(resource and resource.status.run_id)

        await eventually(started, seconds=60, otherwise="the operator does not start the job", pause=0.1)
        self.started = True

    async def resource(self) -> TrainingJobResource | None:
        found = await self.site.api.get(f"{collection(self.namespace)}/{self.name}")
        return TrainingJobResource.model_validate(found) if found else None

    async def train(self, *, nodes: int | str = 2, **given: Any) -> None:
        """Submits the job and waits until all its nodes step."""
        await self.submit(nodes=nodes, **given)
        await self.stepping(2, within=START_SECONDS)

    async def repaired(self, world: int = 2) -> None:
        """Waits until a world of this size steps that is newer than the one that the event struck."""

        async def newer() -> bool:
            return (await self.status()).generation > self._generation

        await eventually(newer, seconds=REPAIR_SECONDS, otherwise="the job forms no new world", pause=0.1)
        until = await self._stepping(world, within=REPAIR_SECONDS, since=time.time())
        self.seconds = self._longest_pause(range(world), until)

    async def stepping(self, world: int, *, within: float = REPAIR_SECONDS) -> None:
        """Waits until a world of this size steps after the event."""
        self.seconds = await self._stepping(world, within=within, since=self.struck) - self.struck

    async def _stepping(self, world: int, *, within: float, since: float) -> float:
        """Returns the time at which all ranks of such a world have stepped."""
        try:
            found = await eventually_seen(
                lambda: find_world(self._log.refresh(), world_size=world, after=since, count=10),
                seconds=within,
                otherwise=f"no world of {world} steps",
            )
        except TrialFailed as failed:
            raise TrialFailed(f"{failed}; {await self.tells()}") from None
        return found.time

    async def undisturbed(self, seconds: float) -> None:
        """Watches training for some time after the event.

        Raises:
            TrialFailed: if it paused.
        """
        await asyncio.sleep(max(0.0, self.struck + seconds - time.time()))
        self.seconds = self._longest_pause((0, 1), time.time())
        if self.seconds > LONGEST_PAUSE:
            raise TrialFailed(f"training paused for {self.seconds:.1f} s; {await self.tells()}")

    def _longest_pause(self, ranks: Iterable[int], until: float) -> float:
        """Returns the longest time between two steps of one rank, from the event until then."""
        steps, longest = self._log.refresh(), 0.0
        for rank in ranks:
            times = [step.time for step in steps if step.rank == rank and self.struck <= step.time <= until]
            longest = max(longest, *(later - earlier for earlier, later in pairwise([self.struck, *times, until])))
        return longest

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
            self.described = await self.describe()
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

    async def newer_pod(self, former: Object, rank: int = 1) -> Object:
        """Returns the pod of a node that has come after this one."""

        async def newer() -> Object | None:
            pods = await self.pods(rank)
            return pods[-1] if pods and pods[-1]["metadata"]["uid"] != former["metadata"]["uid"] else None

        return await eventually(newer, seconds=120, otherwise=f"node {rank} has no other pod", pause=0.2)

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
        """Returns what the newest incident tells, with the cluster's words about its culprit, or else its agent's."""
        incidents = await self.client.incidents(self.name)
        return _in_short(incidents[-1]) if incidents else ""

    async def describe(self) -> str:
        """Returns the newest warnings that `kubectl describe` shows of the TrainingJob and of the job's pods."""
        shown = {
            KIND: await self.kubectl(f"describe trainingjobs {self.name}"),
            "Pod": await self.kubectl("describe pods --selector perdure.dev/uid --show-events"),
        }
        warnings = {kind: newest_warning(text) for kind, text in shown.items()}
        return "; ".join(f"{kind} {warning}" for kind, warning in warnings.items() if warning)

    async def delete(self) -> None:
        """Deletes the job's object, as users do; returns when its nodes are gone."""
        await self.kubectl(f"delete trainingjobs {self.name} --ignore-not-found --timeout {END_SECONDS:.0f}s")

    async def end(self) -> tuple[str, ...]:
        """Deletes the job; returns the objects of its namespace that are still there a while later."""
        with suppress(CommandFailed):
            await self.delete()
        left: list[str] = []

        async def nothing_left() -> bool:
            left[:] = await self._left()
            return not left

        with suppress(TrialFailed):
            await eventually(nothing_left, seconds=END_SECONDS, otherwise="", pause=0.5)
        if await self.resource():
            # Without its operator the object would keep its namespace and its definition.
            await self.site.api.patch(f"{collection(self.namespace)}/{self.name}", {"metadata": {"finalizers": None}})
        return tuple(left)

    async def _left(self) -> list[str]:
        found: list[str] = []
        for kind in _OWN_KINDS:
            for item in await self.site.api.list(self.path(kind)):
                name = item["metadata"]["name"]
                if name != _GIVEN and name not in self._own:
                    found.append(f"{kind}/{name}")
        return found


def newest_warning(described: str) -> str:
    """Returns the newest warning among the events that the output of `kubectl describe` for one or more objects lists;
    empty if there is none."""
    lists = [text.partition("\n\n")[0] for text in described.split("\nEvents:")[1:]]
    found = [": ".join(warning.groups()) for text in lists for warning in _WARNING.finditer(text)]
    return found[-1] if found else ""


def _in_short(incident: IncidentView) -> str:
    signs = [evidence for evidence in incident.evidence if evidence.rank in (None, incident.culprit)]
    by_cluster = [evidence for evidence in signs if evidence.source is EvidenceSource.BACKEND]
    told = (by_cluster or signs)[-1:]
    return f"{incident.title}: {incident.action}" + "".join(f" ({evidence.text})" for evidence in told)


@dataclass(frozen=True)
class Event:
    """One event, and what is expected of a job that meets it."""

    name: str
    expected: str
    """For people."""
    play: Callable[[Scene], Awaitable[None]]
    """Has the event happen, waits for its consequences, and undoes it."""
    says: str = ""
    """A word that the explanation must have; empty where there is nothing to explain."""
    charges: int = 0
    """The restarts that it should use up of the job's budget."""


@asynccontextmanager
async def scene(site: Site, namespace: str, folder: Path) -> AsyncGenerator[Scene]:
    """Provides a scene in one of the site's namespaces; its job is deleted when the context closes."""
    folder.mkdir(parents=True, exist_ok=True)
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    await eventually(lambda: site.api.get(account), seconds=60, otherwise="the namespace has no service account")
    async with Client(endpoint=site.endpoint, namespace=namespace) as client:
        stage = Scene(site, client, namespace, folder)
        try:
            yield stage
        finally:
            await stage.end()


async def judge(site: Site, namespace: str, event: Event, folder: Path) -> Verdict:
    """Plays one event; a job that does not do what is expected is a doubt, not an exception."""
    doubts: list[str] = []
    async with scene(site, namespace, folder) as stage:
        try:
            # An earlier event may have hit the release's pods as well.
            await site.serves()
            await event.play(stage)
        except FAILURES as failed:
            doubts.append(str(failed))
        explained, described, charged = stage.waits, stage.described, 0
        with suppress(*FAILURES):
            charged = (await stage.status()).restarts_total if stage.started else 0
            explained = explained or await stage.explained()
            described = described or await stage.describe()
        if charged != event.charges:
            doubts.append(f"{charged} restarts charged instead of {event.charges}")
        if event.says not in explained:
            doubts.append(f"{event.says!r} is not in the explanation")
        left = await stage.end()
        if left:
            doubts.append(f"left: {', '.join(left)}")
        return Verdict(
            event=event.name,
            expected=event.expected,
            seconds=stage.seconds,
            charged=charged,
            explained=explained,
            described=described,
            left=left,
            doubts=tuple(doubts),
        )
