"""Reads what Kubernetes' scheduler says of a pod that it finds no machine for."""

from __future__ import annotations

from typing import Final

_NEEDED: Final = ("Insufficient cpu", "Insufficient memory")
_SHORT: Final = "Insufficient "


def most_telling(message: str, longest: int) -> str:
    """Returns the scheduler's message with at most so many characters, of a longer one first the resources that are
    short.

    In a cluster with many kinds of machines the message is longer than a text that rides with each report: a cause for
    each taint and each label, in the order of the alphabet, and then the same of preemption.
    """
    machines, separator, rest = message.partition(": ")
    if len(message) <= longest or not separator:
        return message[:longest]
    causes = rest.partition(". ")[0].rstrip(".").split(", ")
    ordered = sorted(causes, key=lambda cause: (not cause.endswith(_NEEDED), _SHORT not in cause))
    return f"{machines}: {', '.join(ordered)}."[:longest]
