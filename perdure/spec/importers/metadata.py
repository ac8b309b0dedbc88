"""Reads the metadata of Kubernetes objects: name, namespace, labels, and fields that only the cluster writes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .draft import Draft
from .reader import Field

_MAX_NAME = 63

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_BY_CLUSTER = (
    *("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "selfLink"),
    *("deletionGracePeriodSeconds", "managedFields"),
)
"""Fields that the API server writes, and that files made by `kubectl get -o yaml` contain."""

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def read_metadata(job: Field, draft: Draft, *, annotations: Mapping[str, str] | None = None) -> None:
    """Reads `metadata` and drops `status`.

    Args:
        job: The object.
        draft: The specification.
        annotations: The message for each annotation that the source's own system reads, by name.
    """
    metadata = job["metadata"]
    name = metadata["name"]
    if name.present:
        put_name(draft, name)
    elif (prefix := metadata["generateName"]).present:
        put_name(draft, prefix)
        prefix.warn_changed("is the whole name of the job: Perdure does not generate names")
    namespace = metadata["namespace"]
    draft.put(("namespace",), namespace.text(), namespace)
    for label, field in metadata["labels"].entries().items():
        put_label(draft, label, field)
    _drop_annotations(metadata, annotations or {})
    job["status"].drop("the state of a job that ran, and not a part of it")


def drop_metadata(metadata: Field) -> None:
    """Reads the metadata of an object that a job refers to."""
    metadata["name"].settle()
    metadata["namespace"].settle()
    for field in metadata["labels"].entries().values():
        if field.settled:
            continue
        field.drop("of labels and annotations, Perdure keeps those of the job and of its pods")
    _drop_annotations(metadata, {})


def _drop_annotations(metadata: Field, messages: Mapping[str, str]) -> None:
    for annotation, field in metadata["annotations"].entries().items():
        if annotation == _LAST_APPLIED:
            field.drop("kubectl's copy of the file")
        else:
            field.drop(messages.get(annotation, "Perdure's jobs have no annotations; pods may have some"))
    for written in _BY_CLUSTER:
        metadata[written].drop("written by the cluster, and not a part of the job")
    metadata["finalizers"].drop("Perdure's jobs are not objects of the cluster")
    metadata["ownerReferences"].drop("Perdure's jobs are not objects of the cluster")


def put_name(draft: Draft, field: Field) -> None:
    """Writes the job's name; if Perdure does not accept it, the nearest acceptable one."""
    if (text := field.text()) is None:
        return
    name = to_name(text)
    if not name:
        field.wrong("a name with letters or digits")
        return
    draft.put(("name",), name, field)
    if name != text:
        field.warn_changed(
            f"the job is called {name}: names are at most {_MAX_NAME} lowercase letters, digits and hyphens"
        )


def to_name(text: str) -> str:
    """The nearest name that a job may have; empty if the text has no letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MAX_NAME].strip("-")


def put_label(draft: Draft, label: str, field: Field) -> None:
    """Writes one of the job's labels; Kueue's label becomes the field `queue`."""
    if label == _QUEUE_LABEL:
        draft.put(("queue",), field.text(), field)
    elif label.startswith("kueue.x-k8s.io/"):
        field.drop("of Kueue's labels, Perdure sets those that its own fields define")
    else:
        draft.put(("labels", label), field.text(), field)
