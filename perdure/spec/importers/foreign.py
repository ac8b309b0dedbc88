"""Gives the way out for documents of kinds that cannot be imported: the job inside them, or their command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import format_path
from ..fields import Location
from .reader import as_list, as_mapping

_BY_COMMAND = (
    "`perdure import -- COMMAND` converts a command that starts torchrun, and docs/spec.md has the fields for its "
    "image, nodes and resources"
)
_VERSIONS = {
    ("MPIJob", "kubeflow.org/v1"): "its ranks are started by kubectl exec, those of v2beta1 by SSH, which the image "
    "must have: write the job as v2beta1",
}


def group_of(version: object) -> str:
    """The API group in a document's `apiVersion`; empty for Kubernetes' core and for anything else."""
    group, slash, _ = version.partition("/") if isinstance(version, str) else ("", "", "")
    return group if slash else ""


def hint_for_version(kind: str, version: object) -> str:
    """The way out for a kind that is imported in another version; empty if the versions say it."""
    return _VERSIONS.get((kind, str(version)), "")


def hint_for_documents(documents: Sequence[Any], kinds: Sequence[str]) -> str:
    """The way out for documents none of which is a job.

    Args:
        documents: The documents.
        kinds: The kinds of Kubernetes objects that can be imported.
    """
    if not documents:
        return ""
    for document in documents:
        for place, kind in _contained(document, re.compile(rf"^ *kind: *(?P<kind>{'|'.join(kinds)}) *$", re.MULTILINE)):
            return f"write the {kind} at {format_path(place)} into a file of its own and import that"
    return _BY_COMMAND


def _contained(value: Any, kinds: re.Pattern[str], location: Location = ()) -> Iterator[tuple[Location, str]]:
    """Yields the jobs inside a document, as mappings or as texts, each with its location and its kind."""
    if (mapping := as_mapping(value)) is not None:
        if location and (found := kinds.match(f"kind: {mapping.get('kind')}")):
            yield location, found["kind"]
            return
        for name, item in mapping.items():
            yield from _contained(item, kinds, (*location, name))
    elif (items := as_list(value)) is not None:
        for index, item in enumerate(items):
            yield from _contained(item, kinds, (*location, index))
    elif isinstance(value, str) and (found := kinds.search(value)):
        yield location, found["kind"]
