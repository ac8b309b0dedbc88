"""When a run continues as new although something is in flight: before the server refuses what it is sent, or ends it.

A job or a group otherwise continues as new where the server suggests it and nothing is in flight. While a job is being
repaired that may not be for long, and the server has three limits: it refuses further signals to a run that was sent
10,000, and further updates of one that had 2,000, and it terminates a workflow with a history of 50 MB.
"""

from __future__ import annotations

from temporalio import workflow

from perdure.workflows import options


def is_full(*, bounded: bool, updates: int = 0) -> bool:
    """Whether this run has to end, whatever is in flight.

    Args:
        bounded: Whether more than its events count: a run that began without that makes other commands when it is
            replayed.
        updates: Those that it has carried out.
    """
    info = workflow.info()
    if info.get_current_history_length() > options.HISTORY_LIMIT:
        return True
    return bounded and (updates > options.UPDATES_LIMIT or info.get_current_history_size() > options.HISTORY_BYTES)
