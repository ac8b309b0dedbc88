"""Derives the state of a node from its pod's object; the only reader of pod statuses.

A node has ended when its training container has; the sidecar and the object may outlast it. If the kubelet has ended
the whole pod, the node has ended when the kubelet has reported why. A node whose machine does not answer has not ended:
its processes may still run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from perdure.activities.nodes.containers import TRAINING
from perdure.activities.nodes.kubernetes.objects import ContainerState, Pod, PodEvent, Terminated
from perdure.activities.nodes.kubernetes.scheduling import most_telling
from perdure.contract import LossCause, NodeEvent, NodeEventKind


class Ending(NamedTuple):
    """The meaning of a reason for which a pod ended."""

    text: str
    cause: LossCause = LossCause.WANTED
    out_of_memory: bool = False


_BY_KUBELET = "TerminationByKubelet"

_NO_ROOM = "OutOf"
"""Begins the reasons of a kubelet that rejects a pod because others have taken what it requests, such as `OutOfcpu`."""

ENDINGS: Mapping[str, Ending] = {
    "OOMKilled": Ending("it ran out of memory; its limit is {memory}", LossCause.JOB, out_of_memory=True),
    "Evicted": Ending("its machine evicted it", LossCause.EVICTED),
    "Preempting": Ending("its machine made room for another pod", LossCause.PREEMPTED),
    "Terminated": Ending("its machine shut down"),
    "NodeLost": Ending("its machine was lost", LossCause.MACHINE),
    "NodeAffinity": Ending("its machine no longer matches its node affinity"),
    "NodeShutdown": Ending("its machine shut down"),
    _NO_ROOM: Ending("its machine had no room for it any more"),
    "UnexpectedAdmissionError": Ending("its machine rejected it", LossCause.MACHINE),
    "TopologyAffinityError": Ending("its machine cannot give it resources that are near each other", LossCause.UNKNOWN),
    "DeadlineExceeded": Ending("its activeDeadlineSeconds elapsed", LossCause.JOB),
    "ContainerStatusUnknown": Ending("its machine has lost its status", LossCause.MACHINE),
    "PreemptionByScheduler": Ending("preempted by a pod of higher priority", LossCause.PREEMPTED),
    "DeletionByTaintManager": Ending("it does not tolerate its machine's taints"),
    "EvictionByEvictionAPI": Ending("evicted, as a drain of its machine does"),
    "DeletionByPodGC": Ending("its machine was removed"),
    _BY_KUBELET: Ending("its machine ended it", LossCause.UNKNOWN),
    "WorkloadEvicted": Ending("its queue has evicted it"),
    "NotAdmitted": Ending("its queue no longer admits it"),
    "NoMatchingWorkload": Ending("its queue no longer has its group"),
    "WorkloadDeleted": Ending("its Workload in the queue was deleted"),
}
"""The meaning of each reason for which Kubernetes or Kueue ends a pod. Texts keep the original reason and message."""

_SENTENCES = ("DisruptionTarget", "TerminationTarget")
"""Conditions that say why a pod must end: Kubernetes' own, and Kueue's."""

WAITING: Mapping[str, str] = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "ErrImageNeverPull": "its image is not on its machine, and may not be pulled",
    "InvalidImageName": "its image's name is invalid",
    "CreateContainerConfigError": "a secret or configuration that it needs is missing",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
    "CrashLoopBackOff": "it crashes again and again",
    "Unschedulable": "no machine can take it",
    "SchedulingGated": "its queue has not admitted it",
}
"""The meaning of each reason for which a pod waits. Reasons that are not listed here are not reported."""

_NOT_PULLED = WAITING["ErrImagePull"]

WARNINGS: Mapping[str, str] = {
    "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached to its machine",
    "FailedMapVolume": "a volume cannot be mapped",
    "FailedCreatePodSandBox": "its machine cannot prepare its network",
    "NetworkNotReady": "its machine's network is not ready",
    "FailedPrepareDynamicResources": "a resource claim cannot be prepared",
}
"""The meaning of each Warning that a kubelet or a controller gives in an Event only, while a pod does not start."""

_WARNS = "its machine warns"
"""The meaning of other Warnings."""


class _Exit(NamedTuple):
    exit_code: int
    text: str


NO_PYTHON = _Exit(127, "neither python3 nor python is on PATH in this image")
"""The exit of a training container whose image cannot run the launcher: see `pod`."""

FINAL = frozenset({"InvalidImageName"})
"""Reasons that no change in the cluster can remove: the specification has to change."""

_LONGEST = 300


def event_of(pod: Pod, *, removed: bool = False, warning: PodEvent | None = None) -> NodeEvent:
    """Returns the event that a pod's object implies.

    Args:
        pod: the object; its last state, if it was removed.
        removed: whether the object was removed.
        warning: the latest Event about a pod that does not start, if it is a Warning.
    """
    state = _training_state(pod)
    # A pod that its machine refused, or whose init container failed, ends without a terminated training container.
    if removed or (processes_ended(pod) and not _reason_is_due(pod)):
        ended = state.terminated or Terminated(exit_code=-1)
        reason, cause, out_of_memory = _why_ended(pod, state.terminated)
        no_python = ended.exit_code == NO_PYTHON.exit_code and NO_PYTHON.text in ended.message
        return _event(
            pod,
            NodeEventKind.GONE,
            time=ended.finished_at,
            reason=reason,
            host=pod.spec.node_name,
            cause=LossCause.JOB if no_python else cause,
            refused=no_python,
            out_of_memory=out_of_memory,
        )
    if state.running is not None or state.terminated is not None:
        return _event(pod, NodeEventKind.RUNNING, reason=_silence(pod))
    why = _why_waiting(pod)
    if not why.text and warning is not None:
        meaning = WARNINGS.get(warning.reason, _WARNS)
        why = _Wait(_with_details(meaning, warning.reason, warning.message))
    cause = LossCause.JOB if why.final else LossCause.UNKNOWN
    return _event(
        pod, NodeEventKind.PENDING, reason=why.text, queued=has_no_machine(pod), refused=why.final, cause=cause
    )


def is_repeated(event: NodeEvent, reported: NodeEvent) -> bool:
    """Returns whether an event repeats another. A kubelet that cannot pull an image alternates between two reasons, and
    Warnings of one meaning name another sandbox each time."""
    meaning, reported_meaning = event.reason.partition(" (")[0], reported.reason.partition(" (")[0]
    varies = _NOT_PULLED in meaning or meaning == _WARNS or meaning in WARNINGS.values()
    same_words = event.reason == reported.reason or (varies and meaning == reported_meaning)
    return event.kind is reported.kind and same_words


def is_unexplained(pod: Pod) -> bool:
    """Returns whether the pod has a machine and does not start, without a reason in its object."""
    starting = bool(pod.spec.node_name) and not pod.metadata.deletion_timestamp
    return starting and not processes_ended(pod) and not training_has_started(pod) and not _why_waiting(pod).text


def processes_ended(pod: Pod) -> bool:
    """Returns whether no training process runs any more, as far as the pod's machine has reported."""
    return pod.status.phase in ("Failed", "Succeeded") or _training_state(pod).terminated is not None or pod.never_runs


def training_has_started(pod: Pod) -> bool:
    """Returns whether a training process has ever run, as far as the pod's machine has reported."""
    state = _training_state(pod)
    return state.running is not None or state.terminated is not None


def _reason_is_due(pod: Pod) -> bool:
    """Returns whether the kubelet has ended the whole pod, for example to evict it, and is about to report why.

    It reports the containers' exits at once, and the pod's phase and reason only once it has taken the pod down. A
    pod that is deleted has its reason already.
    """
    containers = (*pod.status.container_statuses, *pod.status.init_container_statuses)
    ended = bool(containers) and all(container.state.terminated for container in containers)
    return ended and pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None


def is_kept(pod: Pod) -> bool:
    """Returns whether no process of the pod runs any more and only finalizers keep the object, for as long as it takes
    those who have set them: perhaps for good, where their program is gone."""
    over = pod.status.phase in ("Failed", "Succeeded") or pod.never_runs
    return pod.metadata.deletion_timestamp is not None and over and bool(pod.metadata.finalizers)


def is_held(pod: Pod, finalizer: str) -> bool:
    """Returns whether this is one of the finalizers that keep a pod which has ended."""
    return is_kept(pod) and finalizer in pod.metadata.finalizers


def has_no_machine(pod: Pod) -> bool:
    """Returns whether a queue has not admitted the pod, or the scheduler has found no machine for it."""
    scheduled = pod.condition("PodScheduled")
    return scheduled is not None and scheduled.status == "False"


def machine_is_silent(pod: Pod) -> bool:
    """Returns whether the control plane has lost the pod's machine, so that its processes can be neither observed nor
    changed.

    A kubelet reports a pod as ready if its containers, sidecars included, and its readiness gates are. Only the node
    controller marks a pod unready that its kubelet reported as ready, so this needs no right to read nodes.
    """
    ready, containers = pod.condition("Ready"), pod.condition("ContainersReady")
    if ready is None or ready.status != "False" or containers is None or containers.status != "True":
        return False
    gates = (pod.condition(gate.condition_type) for gate in pod.spec.readiness_gates)
    return all(gate is not None and gate.status == "True" for gate in gates)


def _event(pod: Pod, kind: NodeEventKind, *, time: datetime | None = None, **facts: Any) -> NodeEvent:
    return NodeEvent(
        kind=kind,
        rank=pod.rank,
        incarnation=pod.incarnation,
        time=time or datetime.now(UTC),
        **facts,
    )


def _why_ended(pod: Pod, ended: Terminated | None) -> Ending:
    """Returns why the pod ended, by the most specific reason: first the component that ended it, then the container's
    exit."""
    for word, message in _words_of_ending(pod, ended):
        if ending := ENDINGS.get(_NO_ROOM if word.startswith(_NO_ROOM) else word):
            return ending._replace(text=_with_details(ending.text.format(memory=_memory_limit(pod)), word, message))
    if pod.metadata.deletion_timestamp or (ended is None and pod.status.phase != "Failed"):
        return Ending("its pod was deleted")
    if ended is None:
        text = _failed_init_container(pod) or _with_details("its pod failed", pod.status.reason, pod.status.message)
    else:
        text = _with_details(f"its container ended with exit code {ended.exit_code}", ended.reason, ended.message)
    return Ending(text, LossCause.UNKNOWN)


def _words_of_ending(pod: Pod, ended: Terminated | None) -> Iterator[tuple[str, str]]:
    status = pod.status
    if ended and ended.reason == "OOMKilled":
        yield ended.reason, ""
    for kind in _SENTENCES:
        sentence = pod.condition(kind)
        if sentence and sentence.status == "True":
            if sentence.reason == _BY_KUBELET:
                # The status tells an eviction for lack of memory or disk, which the job may have caused, from a
                # machine that shuts down.
                yield status.reason, status.message
            yield sentence.reason, sentence.message
    yield status.reason, status.message
    if ended:
        yield ended.reason, ended.message


def _failed_init_container(pod: Pod) -> str:
    for container in pod.status.init_container_statuses:
        ended = container.state.terminated
        if ended and ended.exit_code:
            text = f"its init container {container.name} ended with exit code {ended.exit_code}"
            return _with_details(text, ended.reason, ended.message)
    return ""


class _Wait(NamedTuple):
    """The reason for which a pod waits."""

    text: str = ""
    final: bool = False
    """No change in the cluster can end the wait."""


def _why_waiting(pod: Pod) -> _Wait:
    scheduled = pod.condition("PodScheduled")
    if scheduled and scheduled.status == "False":
        meaning = WAITING.get(scheduled.reason, "it waits for a machine")
        room = _LONGEST - len(_with_details(meaning, scheduled.reason, "")) - len(": ")
        return _Wait(_with_details(meaning, scheduled.reason, most_telling(scheduled.message, room)))
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = container.state.waiting
        if waiting and (meaning := WAITING.get(waiting.reason)):
            text = _with_details(f"{container.name}: {meaning}", waiting.reason, waiting.message)
            return _Wait(text, final=waiting.reason in FINAL)
    return _Wait()


def _silence(pod: Pod) -> str:
    return f"its machine {pod.spec.node_name} does not answer (NotReady)" if machine_is_silent(pod) else ""


def _training_state(pod: Pod) -> ContainerState:
    status = pod.container_status(TRAINING)
    return status.state if status else ContainerState()


def _memory_limit(pod: Pod) -> str:
    training = next((one for one in pod.spec.containers if one.name == TRAINING), None)
    return training.resources.limits.get("memory", "that of its machine") if training else "that of its machine"


def _with_details(meaning: str, word: str, message: str) -> str:
    """Returns a message for users: the meaning, and Kubernetes' own reason and message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # A log's last line holds the error; a message of the API is a single line.
    details = ": ".join(part for part in (word, lines[-1] if lines else "") if part)
    return (f"{meaning} ({details})" if details else meaning)[:_LONGEST]
