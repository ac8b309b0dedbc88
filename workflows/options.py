"""Activity options of every kind of call, each made from the spec's `timing` and given its reason here."""

from __future__ import annotations

from datetime import timedelta

from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

HISTORY_LIMIT = 9_000
"""Events after which a job or a group continues as new although something is in flight: the server refuses all further
signals to a run that was sent 10,000."""

SHORT_ACTIVITY = timedelta(minutes=5)
"""Longest attempt of a backend's short activity: a slow API server with its own retries inside."""

FOREVER = timedelta(days=3650)
"""Leases and watches end by cancellation, lapse or continue-as-new, not by their age."""

MANY_NODES = 8
"""From so many on, nodes are created together: each activity costs the server a dozen writes. Fewer are created one by
one, which reads better in the Temporal UI."""

NODES_TOGETHER = 32
"""Per activity: so few that several workers share a thousand nodes, and that one lost attempt costs little."""

BACKEND_HEARTBEAT = timedelta(seconds=10)
"""What a worker that died was doing with a backend is done elsewhere after this long; after the leases' timeout, where
that is longer."""

BACKEND_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=500), backoff_coefficient=2, maximum_interval=timedelta(seconds=30)
)
"""Indefinite: what a backend cannot do now it may do later; what it never will it reports by a non-retryable error."""

CREATE_CANCELLATION = ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
"""A node that is no longer desired is deleted only once its creation has ended: never before it is made."""

WATCH_ONCE = RetryPolicy(maximum_attempts=1)
"""A watch that failed is begun again by its group, which knows what exists by then."""

WATCH_PAUSE = timedelta(milliseconds=500)
"""Before a watch that failed is begun again; twice as long after each that failed soon."""

LONGEST_WATCH_PAUSE = timedelta(seconds=30)

OVERLOOKED = timedelta(seconds=15)
"""How long a watch may take to tell of a node that was made: it tells within a second, unless its worker has died."""

LEASE_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=1)
)
"""Quick and indefinite: an agent that restarts takes the next attempt, and the job need not know."""

COMMAND_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), backoff_coefficient=2, maximum_interval=timedelta(seconds=2)
)
"""Quick: a recovery waits for it. Ends when the command is superseded."""

CONNECT_ONCE = RetryPolicy(maximum_attempts=1)
"""A node that wants to join is waited for: it should be known soon that it cannot."""

CONNECT_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=2), backoff_coefficient=2, maximum_interval=timedelta(seconds=30)
)
"""Indefinite, and without a line of history: a route may come."""

CONNECT_TIMEOUT = timedelta(seconds=15)
"""Longest attempt to reach another node; the agent itself gives up sooner."""

PATIENT_COMMAND = timedelta(seconds=15)
"""How long a command that was not taken in time waits at its next try: longer than the SDK's poll backoff of 10 s, so
that after an outage it is taken; short enough to say again that it was not."""

COMMAND_PAUSE = timedelta(seconds=5)
"""Before an agent that did not take a command is asked again: by then its lease says whether it is away."""

LOST_SIGNAL_RETRY = timedelta(seconds=5)
"""Before a group tries again to reach a job that did not take its message: it may be between two runs."""

SIGNAL_TIMEOUT = timedelta(seconds=3)
"""For one attempt of a signal between a job and a group: a worker that dies with it costs a repair no more."""

SIGNAL_RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=100), backoff_coefficient=2, maximum_attempts=5)
"""For some seconds; then the sender tries again with what is newest by then, after `LOST_SIGNAL_RETRY`."""

SHUTDOWN_REPORT_TIMEOUT = timedelta(seconds=15)
"""How long a node that ends itself may take to report that it has, beyond the grace of its processes."""

LOG_PATIENCE = timedelta(seconds=10)
"""How long a reader waits for a piece of a node's log: longer than agents take to poll again after an outage."""

UPLOAD_LIMIT = timedelta(minutes=15)
"""From the start of an upload to that of its job: 8 MB over a slow line, and a client that vanished is noticed."""

UPLOAD_PART = timedelta(seconds=20)
"""For one part of an upload to be kept, the API server's repeats included: a user waits."""

SETTLE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(minutes=1)
)
"""Indefinite: a job that has started takes its code when its first node is created, and workers may be away."""
