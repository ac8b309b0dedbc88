"""Tests of how the operator carries out ScalePlans, with made-up answers of the API server and of jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, cast

import pytest

from perdure.base.errors import ControlPlaneUnreachable, Refused
from perdure.base.kubernetes import Change, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import Accepted, RelaunchRequest, ScaleRequest
from perdure.operator import scale_plans
from perdure.operator.resource import SCALED_ROLES, TrainingJobResource
from perdure.operator.scale_plans import REQUESTS, ScalePlans

WORKER = {"nodes": "2:4", "command": ["torchrun", "train.py"], "image": "x"}
PLAN = {
    "apiVersion": "elastic.iml.github.io/v1alpha1",
    "kind": "ScalePlan",
    "metadata": {"name": "plan", "namespace": "nlp", "uid": "plan-uid"},
    "spec": {"ownerJob": "llama", "replicaResourceSpecs": {"worker": {"replicas": 3}}},
}
MORE = (ScaleRequest(nodes="3", role="worker"), ScaleRequest(nodes="2", role="ps"), RelaunchRequest(rank=0, role="ps"))


class Site:
    """An API server, a job and its object, which remember what they are asked for."""

    def __init__(
        self,
        answers: Sequence[Exception | None] = (),
        *,
        job: str = "llama",
        written: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.changes: list[tuple[str, ScaleRequest | RelaunchRequest]] = []
        self.followed = 0
        self._answers = list(answers)
        self._job = job
        self.plan = {**PLAN, **written}
        self.translates = False
        """Whether plans are read for the job as they are."""
        self.deletes = False
        """Whether the plan is deleted while the job is asked."""
        self.refusals: list[Exception] = []
        """Answers of the API server when it is told that the plan has failed."""
        self._asked, self._removed = asyncio.Event(), asyncio.Event()
        self.plans = ScalePlans(cast("Any", self), cast("Any", self), self)
        self.ended = asyncio.Event()

    async def follow(self, path: str) -> AsyncGenerator[Change]:
        assert path == "/apis/elastic.iml.github.io/v1alpha1/namespaces/nlp/scaleplans"
        self.followed += 1
        if self.followed == 1:
            raise KubernetesError(404, "NotFound", "the server could not find the requested resource")
        yield Listed((self.plan,))
        if self.deletes:
            await self._asked.wait()
            yield Removed(self.plan)
            # The reader takes the next change once it has taken in this one.
            self._removed.set()
        await asyncio.Event().wait()

    async def patch(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        if self.refusals and content.get("status", {}).get("phase") == "Failed":
            raise self.refusals.pop(0)
        self.patches.append((path, content))
        return self.object if "trainingjobs" in path else PLAN

    async def create(self, path: str, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["reason"] in ("Succeeded", "Failed"):
            self.ended.set()

    async def change(self, name: str, request: ScaleRequest | RelaunchRequest, *, namespace: str, key: str) -> Accepted:
        assert (name, namespace) == ("llama", "nlp")
        self.changes.append((key, request))
        self._asked.set()
        if self.deletes:
            await self._removed.wait()
        answer = self._answers.pop(0) if self._answers else None
        if answer is not None:
            raise answer
        return Accepted(message="")

    @property
    def object(self) -> dict[str, Any]:
        return {
            "metadata": {"name": self._job, "namespace": "nlp", "uid": "1"},
            "spec": {"roles": {"worker": WORKER, "ps": {**WORKER, "nodes": 1, "ends_job": False}}},
            "status": {"runId": "run"},
        }

    @asynccontextmanager
    async def hold(self, namespace: str, name: str) -> AsyncGenerator[TrainingJobResource | None]:
        found = TrainingJobResource.model_validate(self.object)
        yield found if (namespace, name) == ("nlp", found.metadata.name) else None

    def take(self, resource: TrainingJobResource) -> None:
        assert resource.metadata.name == "llama"

    async def carry_out(self, requests: Sequence[ScaleRequest | RelaunchRequest]) -> tuple[str, str]:
        """Returns the phase of the plan in the end, and the message of its Event."""

        async def translate(*_: Any, **__: Any) -> tuple[ScaleRequest | RelaunchRequest, ...]:
            return tuple(requests)

        with pytest.MonkeyPatch.context() as patch:
            if not self.translates:
                patch.setattr(scale_plans, "translate", translate)
            patch.setattr(scale_plans, "FIRST_PAUSE", 0.01)
            working = [self.plans.follow("nlp"), self.plans.serve(), self.ended.wait()]
            tasks = [asyncio.create_task(one) for one in working]
            try:
                await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
                assert self.ended.is_set(), "plans are served until this one has ended"
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return self.patches[-1][1]["status"]["phase"], self.events[-1]["message"]


async def test_the_object_states_each_number_after_the_job_has_accepted_it() -> None:
    site = Site()
    assert await site.carry_out(MORE) == (
        "Succeeded",
        "scale worker to 3 nodes; scale ps to 2 nodes; replace node 0 of ps",
    )
    assert site.followed == 2, "the definition was installed later"
    assert [(key[-1], request.role) for key, request in site.changes] == [("0", "worker"), ("1", "ps"), ("2", "ps")]
    first = site.changes[0][1]
    assert isinstance(first, ScaleRequest)
    assert first.nodes == "2:3", "of a range it is the upper limit, as for kubectl scale"
    written, status, leading, other, _ = (content for _, content in site.patches)
    assert REQUESTS in written["metadata"]["annotations"]
    assert status["status"]["phase"] == "Scaling"
    assert leading["spec"] == {"replicas": 3}
    assert json.loads(other["metadata"]["annotations"][SCALED_ROLES])["ps"] == {
        "stated": "1",
        "nodes": 2,
        "plan": "plan",
    }


async def test_what_was_carried_out_before_a_refusal_is_told() -> None:
    site = Site([None, Refused("llama refuses: ports are taken")])
    assert await site.carry_out(MORE) == (
        "Failed",
        "llama refuses: ports are taken. Carried out before that: scale worker to 3 nodes",
    )
    assert len(site.changes) == 2
    assert [content["spec"] for _, content in site.patches if "spec" in content] == [{"replicas": 3}]


async def test_a_plan_waits_for_a_control_plane_that_is_away() -> None:
    site = Site([ControlPlaneUnreachable("away"), None])
    assert (await site.carry_out(MORE[:1]))[0] == "Succeeded"
    assert [key for key, _ in site.changes] == ["scale-plan-plan-uid-0"] * 2


async def test_a_plan_of_another_system_is_left_alone() -> None:
    site = Site(job="other")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await site.carry_out(MORE)
    assert (site.patches, site.events, site.changes) == ([], [], [])


FORGED = (
    "no JSON",
    "[" * 5000,
    json.dumps([{"nodes": "3", "role": "unknown"}]),
    json.dumps([{"nodes": "2:4", "role": "worker"}]),
    json.dumps([{"nodes": "9" * 5000, "role": "worker"}]),
    json.dumps([{"nodes": "3", "role": "worker", "scaling": {"policy": "idle"}}]),
    json.dumps([{"rank": 0, "role": "unknown"}]),
)


@pytest.mark.parametrize("forged", FORGED)
async def test_a_plan_that_comes_with_requests_of_its_author_is_read_itself(forged: str) -> None:
    metadata = {**PLAN["metadata"], "annotations": {REQUESTS: forged}}  # type: ignore[dict-item]
    site = Site(written={"metadata": metadata})
    assert (await site.carry_out(MORE))[0] == "Succeeded"
    assert len(site.changes) == 3


@pytest.mark.parametrize("forged", FORGED)
async def test_a_plan_whose_requests_its_author_has_changed_is_refused(forged: str) -> None:
    metadata = {**PLAN["metadata"], "annotations": {REQUESTS: forged}}  # type: ignore[dict-item]
    site = Site(written={"metadata": metadata, "status": {"phase": "Scaling"}})
    phase, message = await site.carry_out(MORE)
    assert phase == "Failed"
    assert REQUESTS in message
    assert site.changes == []


async def test_what_an_earlier_operator_has_written_is_sent() -> None:
    written = json.dumps([{"nodes": "3", "role": "worker"}])
    metadata = {**PLAN["metadata"], "annotations": {REQUESTS: written}}  # type: ignore[dict-item]
    site = Site(written={"metadata": metadata, "status": {"phase": "Scaling"}})
    assert await site.carry_out(()) == ("Succeeded", "scale worker to 3 nodes")


async def test_a_pod_s_number_of_thousands_of_digits_is_refused() -> None:
    spec = {"ownerJob": "llama", "createPods": [f"llama-edljob-worker-{'9' * 5000}"]}
    site = Site(written={"spec": spec})
    site.translates = True
    phase, message = await site.carry_out(())
    assert (phase, "createPods" in message) == ("Failed", True)


async def test_an_error_that_nobody_expected_ends_neither_the_plans_nor_the_operator() -> None:
    site = Site([RuntimeError("unexpected"), None])
    assert (await site.carry_out(MORE[:1]))[0] == "Succeeded"
    assert len(site.changes) == 2


@pytest.mark.parametrize(
    "refusal",
    [
        KubernetesError(403, "Forbidden", "the operator may not"),
        KubernetesError(409, "Conflict", "the plan was created again under its name"),
        ConnectionError("the API server is away"),
    ],
    ids=["forbidden", "created-again", "away"],
)
async def test_a_plan_whose_failure_cannot_be_written_ends_neither_the_plans_nor_the_operator(
    refusal: Exception,
) -> None:
    site = Site([Refused("llama refuses"), Refused("llama refuses")])
    site.refusals = [refusal]
    assert await site.carry_out(MORE[:1]) == ("Failed", "llama refuses")
    assert len(site.changes) == 2


async def test_a_plan_that_is_deleted_while_it_cannot_be_carried_out_is_forgotten() -> None:
    site = Site([ControlPlaneUnreachable("away")])
    site.deletes = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await site.carry_out(MORE[:1])
    assert len(site.changes) == 1
