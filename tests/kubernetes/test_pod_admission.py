"""Tests of a pod that an API server has created otherwise than it was requested; the server is played."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes.admission import alterations, is_of_others, keep_findable
from perdure.base.kubernetes_errors import KubernetesError
from tests.support.played_api import played_api

OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "job", "uid": "anchor"}
LABELS = {
    "app.kubernetes.io/managed-by": "perdure",
    "perdure.dev/uid": "0a1b2c3d",
    "perdure.dev/rank": "1",
    "team": "a",
}
REQUESTED: dict[str, Any] = {"metadata": {"name": "p", "labels": LABELS, "ownerReferences": [OWNER]}}


def made(labels: dict[str, str], owners: list[dict[str, str]]) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "nlp", "uid": "u", "labels": labels, "ownerReferences": owners}}


async def deletions(pod: dict[str, Any], expected: str = "") -> list[tuple[str, Any]]:
    """Returns the path and uid of each deletion, where the pod is refused with these words."""
    found: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        content = json.loads(await request.text())
        found.append((request.path, content["preconditions"]["uid"]))
        return web.json_response({})

    async with played_api(answer) as api:
        if not expected:
            await keep_findable(api, REQUESTED, pod)
        else:
            with pytest.raises(NodeNotYet, match=expected) as refused:
                await keep_findable(api, REQUESTED, pod)
            assert not refused.value.queued
    return found


async def test_what_others_add_and_users_labels_that_they_change_are_theirs() -> None:
    labels = LABELS | {"team": "b", "security.istio.io/tlsMode": "istio"}
    assert await deletions(made(labels, [OWNER, {**OWNER, "uid": "another"}])) == []


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (made(LABELS | {"perdure.dev/uid": "theirs"}, [OWNER]), "changes the label perdure.dev/uid of its pod"),
        (made({}, [OWNER]), "the label app.kubernetes.io/managed-by, the label perdure.dev/rank, the label perdure"),
        (made(LABELS, []), "changes the owner of its pod"),
    ],
)
async def test_a_pod_that_its_job_could_not_find_is_deleted(pod: dict[str, Any], words: str) -> None:
    assert await deletions(pod, words) == [("/api/v1/namespaces/nlp/pods/p", "u")]


POD: dict[str, Any] = {
    "spec": {
        "restartPolicy": "Never",
        "tolerations": [{"key": "gpu"}],
        "containers": [{"name": "training", "resources": {"requests": {"cpu": "4", "memory": "1Gi"}}}],
        "initContainers": [{"name": "perdure-agent", "restartPolicy": "Always", "command": ["perdure"]}],
    }
}


def with_training(**fields: Any) -> dict[str, Any]:
    spec = POD["spec"]
    return {"spec": {**spec, "containers": [{**spec["containers"][0], **fields}, {"name": "istio-proxy"}]}}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (POD, ""),
        (with_training(resources={"requests": {"cpu": "4000m", "memory": "1024Mi"}}), ""),
        (
            with_training(resources={"requests": {"cpu": "4", "memory": "1Gi"}, "limits": {"cpu": "5"}}),
            "limits.cpu of training is 5",
        ),
        (with_training(resources={"requests": {"cpu": "100m", "memory": "1Gi"}}), "requests.cpu of training is 100m"),
        (with_training(resources={"requests": {"cpu": "4"}}), "requests.memory of training is None"),
        (with_training(command=["true"]), ""),
        ({"spec": {**POD["spec"], "restartPolicy": "Always"}}, "restartPolicy is Always"),
        ({"spec": {**POD["spec"], "tolerations": []}}, "no toleration of gpu"),
        ({"spec": {**POD["spec"], "initContainers": []}}, "command of perdure-agent is None"),
    ],
)
def test_what_a_job_relies_on_and_the_cluster_has_changed_is_told(made: dict[str, Any], words: str) -> None:
    assert words in alterations(POD, made)
    assert bool(alterations(POD, made)) == bool(words)


def test_what_a_vertical_autoscaler_makes_of_a_pod_is_told_for_each_of_its_containers() -> None:
    """Its webhook changes requests, and limits in proportion, and notes it in an annotation."""
    agent = {"requests": {"memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    training = {"requests": {"cpu": "4", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    smaller = {"requests": {"cpu": "1168m", "memory": "500Mi"}, "limits": {"memory": "500Mi"}}
    raised = {"requests": {"memory": "96Mi"}, "limits": {"memory": "192Mi"}}

    def pod(of_training: dict[str, Any], of_agent: dict[str, Any]) -> dict[str, Any]:
        containers = [{"name": "training", "resources": of_training}]
        sidecars = [{"name": "perdure-agent", "restartPolicy": "Always", "resources": of_agent}]
        return {"metadata": {}, "spec": {"containers": containers, "initContainers": sidecars}}

    made = pod(smaller, raised) | {"metadata": {"annotations": {"vpaUpdates": "Pod resources updated by llama"}}}
    told = alterations(pod(training, agent), made)
    for words in (
        *("limits.memory of training is 500Mi", "requests.memory of training is 500Mi"),
        *("requests.cpu of training is 1168m", "limits.memory of perdure-agent is 192Mi"),
        "requests.memory of perdure-agent is 96Mi",
    ):
        assert words in told


def test_a_request_for_as_much_as_the_limit_is_no_change() -> None:
    limited = with_training(resources={"limits": {"nvidia.com/gpu": "8"}})
    made = with_training(resources={"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}})
    assert alterations(limited, made) == ""


TOO_MUCH = 'Invalid value: "4": must be less than or equal to cpu limit of 500m'


@pytest.mark.parametrize(
    ("field", "message", "pod", "expected"),
    [
        ("spec.containers[0].resources.requests", TOO_MUCH, POD, True),
        (
            "spec.containers[0].resources.requests",
            TOO_MUCH,
            with_training(resources={"requests": {"cpu": "4"}, "limits": {"cpu": "500m"}}),
            False,
        ),
        ("spec.containers[1].image", "Required value", POD, True),
        ("spec.restartPolicy", "Unsupported value", POD, False),
    ],
)
def test_a_value_that_the_request_did_not_set_is_not_its_fault(
    field: str, message: str, pod: dict[str, Any], expected: bool
) -> None:
    error = KubernetesError(422, "Invalid", f'Pod "p" is invalid: {field}: {message}', fields=[field])
    assert is_of_others(error, pod) is expected
