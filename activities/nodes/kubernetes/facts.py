"""What a pod's object says about its node, in one place: the only reader of pod statuses.

A node has ended when its training container has: the sidecar may outlast it, and the object too. It has not ended
because a machine does not answer: what runs there may run on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from activities.nodes.containers import TRAINING
from activities.nodes.kubernetes.objects import ContainerState, Pod, Terminated
from workflows.messages import LossCause, NodeEvent, NodeEventKind


class Ending(NamedTuple):
    """What a word for how a pod ended means."""

    text: str
    cause: LossCause = LossCause.WANTED


ENDINGS: Mapping[str, Ending] = {
    "OOMKilled": Ending("it took more memory than its limit of {memory}", LossCause.JOB),
    "Evicted": Ending("its machine evicted it", LossCause.UNKNOWN),
    "Preempting": Ending("its machine made room for another pod"),
    "Terminated": Ending("its machine shut down"),
    "NodeLost": Ending("its machine was lost", LossCause.MACHINE),
    "NodeAffinity": Ending("its machine no longer suits it"),
    "NodeShutdown": Ending("its machine shut down"),
    "UnexpectedAdmissionError": Ending("its machine did not take it", LossCause.MACHINE),
    "DeadlineExceeded": Ending("its activeDeadlineSeconds were over", LossCause.JOB),
    "ContainerStatusUnknown": Ending("its machine does not know what became of it", LossCause.MACHINE),
    "PreemptionByScheduler": Ending("preempted by a pod of higher priority"),
    "DeletionByTaintManager": Ending("its machine's taints do not tolerate it any more"),
    "EvictionByEvictionAPI": Ending("evicted, as a drain of its machine does"),
    "DeletionByPodGC": Ending("its machine is no more"),
    "TerminationByKubelet": Ending("its machine ended it"),
    "WorkloadEvicted": Ending("its queue has taken its place back"),
    "NotAdmitted": Ending("its queue no longer admits it"),
    "NoMatchingWorkload": Ending("its queue does not know its group any more"),
    "WorkloadDeleted": Ending("its place in the queue was deleted"),
}
"""By Kubernetes' or Kueue's own word for how a pod ended, what it means; the word, and the message beside it, are
kept."""

_SENTENCES = ("DisruptionTarget", "TerminationTarget")
"""Conditions by which a pod is told why it must end: Kubernetes' own, and Kueue's."""

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
"""By Kubernetes' own word for what a pod waits for, what it means. Other words are not worth telling."""

_NOT_PULLED = WAITING["ErrImagePull"]


class _Exit(NamedTuple):
    exit_code: int
    text: str


NO_PYTHON = _Exit(127, "neither python3 nor python is on PATH in this image")
"""How a training container ends whose image cannot run the launcher: see `pod`."""

FINAL = frozenset({"InvalidImageName"})
"""What no registry, no Secret and no machine can mend: only another specification can."""

_LONGEST = 300


def event_of(pod: Pod, *, removed: bool = False) -> NodeEvent:
    """The fact that a pod's object states.

    Args:
        pod: the object; the last one that there was, if it is removed.
        removed: whether the object is no more.
    """
    state = _training_state(pod)
    # A pod that its machine refused, or whose init container failed, ends without its training container's end.
    if removed or processes_ended(pod):
        ended = state.terminated or Terminated(exit_code=-1)
        signal = ended.exit_code - 128 if ended.exit_code > 128 else None
        reason, cause = _why_ended(pod, state.terminated)
        no_python = ended.exit_code == NO_PYTHON.exit_code and NO_PYTHON.text in ended.message
        return _event(
            pod,
            NodeEventKind.GONE,
            time=ended.finished_at,
            reason=reason,
            exit_code=ended.exit_code if signal is None and ended.exit_code >= 0 else None,
            signal=signal,
            host=pod.spec.node_name,
            cause=LossCause.JOB if no_python else cause,
            refused=no_python,
        )
    if state.running is not None:
        return _event(pod, NodeEventKind.RUNNING, reason=_silence(pod))
    why = _why_waiting(pod)
    cause = LossCause.JOB if why.final else LossCause.UNKNOWN
    return _event(
        pod, NodeEventKind.PENDING, reason=why.text, queued=has_no_machine(pod), refused=why.final, cause=cause
    )


def is_repeated(event: NodeEvent, told: NodeEvent) -> bool:
    """Whether an event is no news after another. A kubelet that cannot pull an image reports it in two ways in turn."""
    meaning, told_meaning = event.reason.partition(" (")[0], told.reason.partition(" (")[0]
    same_words = event.reason == told.reason or (_NOT_PULLED in meaning and meaning == told_meaning)
    return event.kind is told.kind and same_words


def processes_ended(pod: Pod) -> bool:
    """Whether nothing of the training runs any more, as far as its machine has said."""
    return pod.status.phase in ("Failed", "Succeeded") or _training_state(pod).terminated is not None or pod.never_runs


def is_held(pod: Pod, finalizer: str) -> bool:
    """Whether nothing of the pod runs any more, and the object is kept only because this finalizer is on it."""
    over = pod.status.phase in ("Failed", "Succeeded") or pod.never_runs
    return pod.metadata.deletion_timestamp is not None and over and finalizer in pod.metadata.finalizers


def has_no_machine(pod: Pod) -> bool:
    """Whether a queue has not admitted the pod, or the scheduler has found no machine for it."""
    scheduled = pod.condition("PodScheduled")
    return scheduled is not None and scheduled.status == "False"


def machine_is_silent(pod: Pod) -> bool:
    """Whether the control plane has given up on the pod's machine: what runs there cannot be known or changed.

    Only the node controller calls a pod unready whose containers are ready, so this needs no right to read nodes.
    """
    ready, containers = pod.condition("Ready"), pod.status.container_statuses
    unready = ready is not None and ready.status == "False"
    return unready and bool(containers) and all(one.ready for one in containers)


def _event(pod: Pod, kind: NodeEventKind, *, time: datetime | None = None, **facts: Any) -> NodeEvent:
    return NodeEvent(
        kind=kind,
        rank=pod.rank,
        incarnation=pod.incarnation,
        time=time or datetime.now(UTC),
        **facts,
    )


def _why_ended(pod: Pod, ended: Terminated | None) -> Ending:
    """The most telling word first: who ended it, then how its container ended."""
    for word, message in _words_of_ending(pod, ended):
        if ending := ENDINGS.get(word):
            return ending._replace(text=_told(ending.text.format(memory=_memory_limit(pod)), word, message))
    if pod.metadata.deletion_timestamp or (ended is None and pod.status.phase != "Failed"):
        return Ending("its pod was deleted")
    if ended is None:
        text = _failed_init_container(pod) or _told("its pod failed", pod.status.reason, pod.status.message)
    else:
        text = _told(f"its container ended with exit code {ended.exit_code}", ended.reason, ended.message)
    return Ending(text, LossCause.UNKNOWN)


def _words_of_ending(pod: Pod, ended: Terminated | None) -> Iterator[tuple[str, str]]:
    status = pod.status
    if ended and ended.reason == "OOMKilled":
        yield ended.reason, ""
    for kind in _SENTENCES:
        sentence = pod.condition(kind)
        if sentence and sentence.status == "True":
            yield sentence.reason, sentence.message
    yield status.reason, status.message
    if ended:
        yield ended.reason, ended.message


def _failed_init_container(pod: Pod) -> str:
    for container in pod.status.init_container_statuses:
        ended = container.state.terminated
        if ended and ended.exit_code:
            text = f"its init container {container.name} ended with exit code {ended.exit_code}"
            return _told(text, ended.reason, ended.message)
    return ""


class _Wait(NamedTuple):
    """Why a pod waits."""

    text: str = ""
    final: bool = False
    """Nothing that happens in the cluster ends it."""


def _why_waiting(pod: Pod) -> _Wait:
    scheduled = pod.condition("PodScheduled")
    if scheduled and scheduled.status == "False":
        meaning = WAITING.get(scheduled.reason, "it waits for a machine")
        return _Wait(_told(meaning, scheduled.reason, scheduled.message))
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = container.state.waiting
        if waiting and (meaning := WAITING.get(waiting.reason)):
            text = _told(f"{container.name}: {meaning}", waiting.reason, waiting.message)
            return _Wait(text, final=waiting.reason in FINAL)
    return _Wait()


def _silence(pod: Pod) -> str:
    return f"its machine {pod.spec.node_name} does not answer (NotReady)" if machine_is_silent(pod) else ""


def _training_state(pod: Pod) -> ContainerState:
    status = pod.container_status(TRAINING)
    return status.state if status else ContainerState()


def _memory_limit(pod: Pod) -> str:
    training = next((one for one in pod.spec.containers if one.name == TRAINING), None)
    return training.resources.limits.get("memory", "its machine") if training else "its machine"


def _told(meaning: str, word: str, message: str) -> str:
    """For people: what it means, and what Kubernetes said."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # The last line of a log says why it ends; a message of the API is a line.
    said = ": ".join(part for part in (word, lines[-1] if lines else "") if part)
    return (f"{meaning} ({said})" if said else meaning)[:_LONGEST]
