"""Tests of what a pod's object, or the refusal of one, says about its node: pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.kubernetes.backend import refuse
from perdure.activities.nodes.kubernetes.facts import WAITING, event_of, is_repeated, machine_is_silent
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.pod import INCARNATION, RANK
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import LossCause, NodeEvent, NodeEventKind
from tests.kubernetes.test_pod_manifest import request


def pod_with(status: dict[str, Any], *, gates: Sequence[dict[str, str]] = (), **metadata: Any) -> Pod:
    return Pod.model_validate(
        {
            "metadata": {"name": "p", "uid": "u", "labels": {RANK: "1", INCARNATION: "2"}, **metadata},
            "spec": {"nodeName": "gpu-17", "containers": [{"name": "training"}], "readinessGates": gates},
            "status": status,
        }
    )


BY_KUBELET = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "ended"}]


def training_with(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "training", "ready": "running" in state, "state": state}]}


@pytest.mark.parametrize(
    ("status", "kind", "text", "cause"),
    [
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            "GONE",
            "evicted it (Evicted: low",
            "EVICTED",
        ),
        ({"phase": "Failed", "reason": "Preempting"}, "GONE", "made room for another pod (Preempting)", "PREEMPTED"),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": BY_KUBELET},
            "GONE",
            "evicted it (Evicted: low on memory)",
            "EVICTED",
        ),
        (
            {"phase": "Failed", "reason": "Terminated", "message": "node shutdown", "conditions": BY_KUBELET},
            "GONE",
            "its machine shut down (Terminated: node shutdown)",
            "WANTED",
        ),
        (
            {"phase": "Failed", "reason": "Odd", "message": "no one knows"},
            "GONE",
            "its pod failed (Odd: no one knows)",
            "UNKNOWN",
        ),
        (
            {
                "phase": "Failed",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
                **training_with(terminated={"exitCode": 143, "reason": "Error"}),
            },
            "GONE",
            "preempted by a pod of higher priority",
            "PREEMPTED",
        ),
        (
            {
                "phase": "Failed",
                "initContainerStatuses": [
                    {
                        "name": "fetch",
                        "state": {"terminated": {"exitCode": 6, "reason": "Error", "message": "a\nno host"}},
                    }
                ],
            },
            "GONE",
            "its init container fetch ended with exit code 6 (Error: no host)",
            "UNKNOWN",
        ),
        (training_with(terminated={"exitCode": 0, "reason": "Completed"}), "GONE", "ended with exit code 0", "UNKNOWN"),
        (
            training_with(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            "GONE",
            "it ran out of memory; its limit is that of its machine",
            "JOB",
        ),
        ({"phase": "Failed", "reason": "NodeLost"}, "GONE", "its machine was lost", "MACHINE"),
        (
            {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Pod was rejected"},
            "GONE",
            "its machine had no room for it any more (OutOfnvidia.com/gpu: Pod was rejected)",
            "WANTED",
        ),
        ({"phase": "Failed", "reason": "TopologyAffinityError"}, "GONE", "resources that are near", "UNKNOWN"),
        (training_with(running={"startedAt": "2026-01-01T00:00:00Z"}), "RUNNING", "", "UNKNOWN"),
        (
            training_with(waiting={"reason": "ImagePullBackOff", "message": "back-off"}),
            "PENDING",
            "cannot be pulled",
            "UNKNOWN",
        ),
        (
            training_with(waiting={"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}),
            "PENDING",
            'training: a secret or configuration that it needs is missing (CreateContainerConfigError: secret "key"',
            "UNKNOWN",
        ),
        (training_with(waiting={"reason": "PodInitializing"}), "PENDING", "", "UNKNOWN"),
        ({}, "PENDING", "", "UNKNOWN"),
    ],
)
def test_what_a_pod_says_of_its_node(status: dict[str, Any], kind: str, text: str, cause: str):
    event = event_of(pod_with(status))
    assert (event.kind, event.rank, event.incarnation) == (NodeEventKind(kind), 1, 2)
    assert text in event.reason
    assert bool(event.reason) == bool(text)
    assert event.out_of_memory is ("ran out of memory" in text)
    assert (event.cause, event.host) == (cause, "gpu-17" if kind == "GONE" else "")


def test_a_pod_that_its_kubelet_ends_has_ended_once_the_kubelet_says_why():
    """The kubelet reports the exits of all containers first, and the pod's phase and reason a moment later."""
    training = training_with(terminated={"exitCode": 137, "reason": "Error"})
    prepared = {"name": "perdure-prepare", "state": {"terminated": {"exitCode": 0}}}

    def with_agent(**state: Any) -> dict[str, Any]:
        return {"initContainerStatuses": [prepared, {"name": "perdure-agent", "state": state}], "phase": "Running"}

    ended = training | with_agent(terminated={"exitCode": 137})
    assert event_of(pod_with(ended)).kind is NodeEventKind.RUNNING
    evicted = ended | {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on resource",
        "conditions": BY_KUBELET,
    }
    gone = event_of(pod_with(evicted))
    assert (gone.kind, gone.cause) == (NodeEventKind.GONE, LossCause.EVICTED)
    assert gone.reason == "its machine evicted it (Evicted: The node was low on resource)"

    alone = event_of(pod_with(training | with_agent(running={})))
    assert (alone.kind, alone.reason) == (NodeEventKind.GONE, "its container ended with exit code 137 (Error)")
    assert event_of(pod_with(ended), removed=True).kind is NodeEventKind.GONE
    assert event_of(pod_with(ended, deletionTimestamp="2026-01-01T00:00:00Z")).kind is NodeEventKind.GONE


def test_only_an_image_s_name_can_never_become_right():
    """A registry comes back, and a user creates the Secret."""
    waits = {word: event_of(pod_with(training_with(waiting={"reason": word}))) for word in WAITING}
    assert {word for word, event in waits.items() if event.refused} == {"InvalidImageName"}


def test_an_image_without_python_has_none_in_the_next_pod_either():
    message = "neither python3 nor python is on PATH in this image; choose one with Python and PyTorch"
    ended = event_of(pod_with(training_with(terminated={"exitCode": 127, "reason": "Error", "message": message})))
    assert (ended.kind, ended.refused, ended.cause) == (NodeEventKind.GONE, True, LossCause.JOB)
    other = event_of(pod_with(training_with(terminated={"exitCode": 127, "reason": "Error", "message": "foo"})))
    assert not other.refused


def test_the_two_words_for_an_image_that_is_not_pulled_are_told_once():
    def waiting(word: str, message: str) -> NodeEvent:
        return event_of(pod_with(training_with(waiting={"reason": word, "message": message})))

    first = waiting("ErrImagePull", "not found")
    assert is_repeated(waiting("ImagePullBackOff", "Back-off pulling"), first)
    assert not is_repeated(waiting("CreateContainerConfigError", 'secret "key" not found'), first)
    assert not is_repeated(event_of(pod_with(training_with(running={}))), first)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            'pods "p" is forbidden: exceeded quota: gpus, requested: cpu=1,pods=1, used: cpu=3,pods=9, limited: pods=9',
            (NodeNotYet, "quota gpus is used up: it requests cpu=1,pods=1, and the limit is pods=9", True),
        ),
        (
            'pods "p" is forbidden: error looking up service account nlp/trainer: serviceaccount "trainer" not found',
            (NodeNotYet, "its service account does not exist", False),
        ),
        (
            'pods "p" is forbidden: violates PodSecurity "restricted:latest"',
            (NodeNotYet, "change the rule that forbids it", False),
        ),
        (
            'pods "p" is forbidden: ValidatingAdmissionPolicy "freeze" with binding "b" denied request: no pods today',
            (NodeNotYet, "no pods today; change the rule", False),
        ),
        ('admission webhook "w.example" denied the request: no', (NodeNotYet, "change the rule", False)),
        ('pods is forbidden: User "w" cannot create resource "pods"', (NodeNotYet, "grant the worker", False)),
    ],
)
async def test_what_forbids_a_pod_is_waited_for(message: str, expected: tuple[Any, str, bool]):
    kind, text, queued = expected
    with pytest.raises(kind, match=re.escape(text)) as told:
        refuse(KubernetesError(403, "Forbidden", message), request())
    assert told.value.queued == queued


async def test_a_policy_that_answers_as_if_the_pod_were_invalid_is_waited_for():
    message = "pods \"p\" is forbidden: ValidatingAdmissionPolicy 'freeze' with binding 'b' denied request: not today"
    with pytest.raises(NodeNotYet, match="not today"):
        refuse(KubernetesError(422, "Invalid", message, causes=[""]), request())


@pytest.mark.parametrize(
    "error",
    [
        KubernetesError(422, "Invalid", "Pod is invalid: spec.dnsPolicy: Unsupported value", fields=["spec.dnsPolicy"]),
        KubernetesError(400, "BadRequest", 'Pod in version "v1" cannot be handled as a Pod'),
        KubernetesError(404, "NotFound", 'namespaces "nlp" not found'),
    ],
)
async def test_what_only_another_specification_changes_is_refused_for_good(error: KubernetesError):
    with pytest.raises(NodeRefused):
        refuse(error, request())


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_a_webhook_that_names_a_field_is_waited_for(status: int):
    denial = KubernetesError(
        status, "Invalid", 'admission webhook "w.example" denied the request: no', fields=["spec.containers"]
    )
    with pytest.raises(NodeNotYet, match="change the rule"):
        refuse(denial, request())


def ready(pod: str, containers: str, **others: str) -> dict[str, Any]:
    statuses = {"Ready": pod, "ContainersReady": containers, **others}
    return {"conditions": [{"type": kind, "status": status} for kind, status in statuses.items()]}


def test_a_machine_that_does_not_answer_is_no_loss():
    status = training_with(running={"startedAt": "2026-01-01T00:00:00Z"})
    silent = pod_with(status | ready("False", "True"))
    assert machine_is_silent(silent)
    assert event_of(silent).kind is NodeEventKind.RUNNING
    assert "gpu-17 does not answer" in event_of(silent).reason
    assert not machine_is_silent(pod_with(status | ready("True", "True")))


def test_a_sidecar_that_is_started_again_makes_no_machine_silent():
    """The kubelet reports the whole pod as unready then, and training, which runs, as ready."""
    status = training_with(running={"startedAt": "2026-01-01T00:00:00Z"})
    restarting = pod_with(status | ready("False", "False"))
    assert not machine_is_silent(restarting)
    assert event_of(restarting).reason == ""


def test_a_readiness_gate_that_is_not_met_makes_no_machine_silent():
    """A load balancer's controller, for example, adds one to pods and sets its condition."""
    gates = [{"conditionType": "example.com/target"}]
    status = training_with(running={"startedAt": "2026-01-01T00:00:00Z"})
    assert not machine_is_silent(pod_with(status | ready("False", "True"), gates=gates))
    met = ready("False", "True", **{"example.com/target": "True"})
    assert machine_is_silent(pod_with(status | met, gates=gates))


TAINTS = ", ".join(f"{count} node(s) had untolerated taint {{pool-{count}: reserved}}" for count in range(1, 9))
LONG = (
    f"0/64 nodes are available: {TAINTS}, 3 Insufficient ephemeral-storage, 12 Insufficient cpu, 9 Insufficient "
    "memory, 7 node(s) didn't match Pod's node affinity/selector. preemption: 0/64 nodes are available: 12 No "
    "preemption victims found for incoming pod, 52 Preemption is not helpful for scheduling."
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("0/2 nodes are available: 2 Insufficient cpu.", "0/2 nodes are available: 2 Insufficient cpu."),
        (
            LONG,
            "0/64 nodes are available: 12 Insufficient cpu, 9 Insufficient memory, 3 Insufficient ephemeral-storage, 1",
        ),
        ("x" * 400, "x" * 200),
        ("no separator " * 40, "no separator "),
        ("", ""),
    ],
)
def test_of_a_long_message_of_the_scheduler_the_resources_that_are_short_come_first(message: str, expected: str):
    pending = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    event = event_of(pod_with({"phase": "Pending", "conditions": [pending]}))
    assert event.reason.startswith(
        f"no machine can take it (Unschedulable: {expected}" if message else "no machine can"
    )
    assert len(event.reason) <= 300
