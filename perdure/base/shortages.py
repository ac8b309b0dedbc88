"""What a Temporal server means that refuses a call because it lacks capacity, and which of its settings ends that.

Servers answer such calls with the status `RESOURCE_EXHAUSTED` and one of a few texts. It is a state of the control
plane, and says nothing about who called.
"""

from __future__ import annotations

_SETTINGS = {
    "concurrent in-flight updates": "history.maxInFlightUpdates (updates of one job at a time, as of joining machines)",
    "concurrent poller limit": "frontend.namespaceCount (long polls of a namespace at one frontend: one of each agent, "
    "and some of each worker)",
    "visibility": "frontend.namespaceRPS.visibility (lists and counts a second of a namespace)",
    "namespace rate limit": "frontend.namespaceRPS (calls a second of a namespace at one frontend)",
    "service rate limit": "frontend.rps (calls a second at one frontend)",
    "namespace max persistence qps": "frontend.persistenceNamespaceMaxQPS and history.persistenceNamespaceMaxQPS",
    "persistence qps": "frontend.persistenceMaxQPS and history.persistenceMaxQPS (calls a second to the database)",
}
"""Settings of the server's dynamic configuration, by what its texts have in common; the first that fits counts."""

_BUSY_WORKFLOW = "workflow is busy"
_UPDATES = ("concurrent in-flight updates", "workflow update was aborted")
"""The server's texts for an update above the limit of one workflow, and for those that it drops because of such a one:
it forgets everything about the workflow that it has not stored yet."""


def is_passing(cause: str) -> bool:
    """Whether the refusal is about one workflow that takes in other messages at this moment: no setting is too low."""
    return _BUSY_WORKFLOW in cause.lower()


def is_of_updates(cause: str) -> bool:
    """Whether one workflow has more updates than the server takes at a time."""
    return any(text in cause.lower() for text in _UPDATES)


def remedy(cause: str) -> str:
    """What ends the refusals, as an imperative without its end.

    Args:
        cause: The server's text.
    """
    text = cause.lower()
    setting = next((setting for known, setting in _SETTINGS.items() if known in text), None)
    if setting is None:
        return "give the Temporal server more capacity, or use it less"
    return f"raise {setting} in the server's dynamic configuration"
