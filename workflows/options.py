"""Activity options for each kind of call, derived from the spec's `timing`, with their reasons."""

from __future__ import annotations

from datetime import timedelta

from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

HISTORY_LIMIT = 9_000
"""Events after which a job or a group continues as new although something is in flight: the server refuses all further
signals to a run that was sent 10,000. A run keeps the limit with which it began: a replay under another one makes other
commands, so another number needs a `Behavior`."""

HISTORY_BYTES = 20 * 1024 * 1024
"""The same for the bytes of the history: the server terminates a workflow at 50 MB. The messages of one world of 2,000
nodes are 1.5 MB, and a job in trouble forms one after another."""

UPDATES_LIMIT = 1_500
"""The same for updates: the server refuses all further ones of a run that had 2,000, and machines join by updates."""

SHORT_ACTIVITY = timedelta(minutes=5)
"""Longest attempt of a backend's short activity, including the retries of a slow API server."""

RESIZE_ATTEMPT = timedelta(seconds=45)
"""Longest attempt to raise the memory of a node that runs: kubelets do it in seconds, or say that they cannot."""

RESIZE_PATIENCE = timedelta(seconds=90)
"""The time after which a node whose memory was not raised is replaced by one that requests more: ranks wait for it."""

FOREVER = timedelta(days=3650)
"""Leases and watches end by cancellation, by a lapse or by continue-as-new, not by their age."""

MANY_NODES = 8
"""The least number of nodes that are created together: each activity costs the server a dozen writes. Fewer nodes are
created one by one, which reads better in the Temporal UI."""

NODES_TOGETHER = 32
"""Nodes per activity: few enough that several workers share a thousand nodes, and that one lost attempt costs
little."""

BACKEND_HEARTBEAT = timedelta(seconds=10)
"""Another worker takes over a dead worker's backend activity after this time, or after the leases' timeout if that is
longer."""

BACKEND_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=500), backoff_coefficient=2, maximum_interval=timedelta(seconds=30)
)
"""Indefinite: a backend may later do what it cannot do now, and reports what it never can by a non-retryable error."""

CREATE_CANCELLATION = ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
"""A node that is no longer desired is deleted only once its creation has ended: never before it is created."""

UNPROCESSED_INTERVAL = timedelta(seconds=10)
"""Pause between two signals of a dataset with many shards that failed: a storage that is away fails them all."""

WATCH_ONCE = RetryPolicy(maximum_attempts=1)
"""The group itself begins a failed watch again, because it knows which nodes exist by then."""

WATCH_PAUSE = timedelta(milliseconds=500)
"""The pause before a failed watch is begun again; it doubles with each watch that failed soon."""

LONGEST_WATCH_PAUSE = timedelta(seconds=30)

OVERLOOKED = timedelta(seconds=15)
"""The longest time for a watch to report a node that was created. It reports it within a second, unless its worker has
died."""

LEASE_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100),
    backoff_coefficient=1.5,
    maximum_interval=timedelta(seconds=1),
    non_retryable_error_types=["TemporalTimeout:Heartbeat"],
)
"""Quick and indefinite, but the group itself schedules a lease again that was not renewed: only so it learns that its
agent is silent. An agent that restarts takes the next lease, and the job need not know."""

SHORT_LEASE = timedelta(seconds=10)
"""A lease that its agent gives back sooner is scheduled again after a pause: a program in the place of an agent that
gives each back would have the group write a hundred events a second."""

LEASE_PAUSE = timedelta(seconds=1)
"""That pause, which doubles each time."""

LONGEST_LEASE_PAUSE = timedelta(seconds=30)

COMMAND_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), backoff_coefficient=2, maximum_interval=timedelta(seconds=2)
)
"""Quick: a recovery waits for it. Ends when the command is superseded."""

UNREADABLE_ANSWER_PAUSE = timedelta(seconds=2)
"""Until a command is sent again whose answer cannot be read: an attempt that fails is tried again as late at most."""

CONNECT_ONCE = RetryPolicy(maximum_attempts=1)
"""One attempt, because a node that wants to join is waited for: a failure should be known soon."""

CONNECT_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=2), backoff_coefficient=2, maximum_interval=timedelta(seconds=30)
)
"""Indefinite, and without an event in the history: a route may become available."""

CONNECT_TIMEOUT = timedelta(seconds=15)
"""Longest attempt to reach another node; the agent itself gives up sooner."""

PATIENT_COMMAND = timedelta(seconds=15)
"""The timeout of the next attempt of a command that was not taken in time: longer than the SDK's poll backoff of 10 s,
so that it is taken after an outage; short enough to report again that it was not."""

COMMAND_PAUSE = timedelta(seconds=5)
"""The pause before a command that an agent did not take is sent again: by then its lease shows whether it is away."""

LOST_SIGNAL_RETRY = timedelta(seconds=5)
"""The pause before a group tries again to reach a job that did not take its message: it may be between two runs."""

TABLES_PATIENCE = timedelta(seconds=15)
"""The longest time for which a job of several roles that adopts its groups waits for the tables of all of them."""

SIGNAL_TIMEOUT = timedelta(seconds=3)
"""Timeout of one attempt of a signal between a job and a group: a worker that dies with it delays a repair no
longer."""

SIGNAL_RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=100), backoff_coefficient=2, maximum_attempts=5)
"""Retries for some seconds; then the sender tries again with its newest state, after `LOST_SIGNAL_RETRY`."""

SHUTDOWN_REPORT_TIMEOUT = timedelta(seconds=15)
"""The time, beyond the grace of its processes, that a node which ends itself has for its shutdown report."""

ANSWER_PATIENCE = timedelta(seconds=10)
"""The time that a user waits for an agent's answer: longer than agents take to poll again after an outage."""

UPLOAD_LIMIT = timedelta(minutes=15)
"""The time from the start of an upload to the start of its job: enough for 8 MB over a slow line; an upload whose
client vanished ends then."""

UPLOAD_PART = timedelta(seconds=20)
"""The time to store one part of an upload, including retries of the API server: a user waits."""

AWAIT_END_ATTEMPT = timedelta(seconds=15)
"""Longest attempt to learn whether a job has ended."""

AWAIT_END_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=30)
)
"""Indefinite, and without an event in the history: nodes wind down once their cluster answers, and the schedule's
overlap policy may end the wait."""

SETTLE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(minutes=1)
)
"""Indefinite: a job that has started takes its code when its first node is created, and workers may be away."""

OWNER_HEARTBEAT = timedelta(minutes=2)
"""Another worker takes over the watch for a dataset's job after this time. Nothing waits for it."""

OWNER_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(seconds=30)
)
"""Indefinite: a dataset ends when its job has ended, whenever a worker finds that out."""

OWNER_PATIENCE = timedelta(seconds=60)
"""Longest time to learn whether a job runs whose dataset, store or archive is requested: agents repeat the request."""

DATASETS_PER_GROUP = 64
"""Datasets that the nodes of one group can begin: a job has a few, and a program that names them in a loop must not
start workflows without end."""

STORE_NOTIFICATION = timedelta(seconds=5)
"""The time in which an agent takes note that the store has changed; it does nothing else. Ranks wait for it."""

STORE_NOTIFICATIONS = 1_900
"""Nodes that a store notifies at a time, beside the watch of its job: the server takes no task of a workflow that would
have 2,000 activities pending, and a job of several roles may have more nodes."""

NOTIFY_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=10), maximum_attempts=20
)
"""Some minutes of retries to hand notices to the workflow that delivers them: a job waits for that before it closes."""

NOTIFICATION_ATTEMPT = timedelta(seconds=30)
"""Longest delivery of a notification; one that was cut off with its worker is tried again after this time."""

NOTIFICATION_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(minutes=10)
)
"""Until the notification's own deadline: a server that was away is reached within 10 minutes of its return."""

MACHINES_WITH_COMMANDS = 8
"""Nodes of each role, from the first on, whose machines run commands of notifications: each is one more poller at the
server."""

COMMANDS_AFTER_END = timedelta(seconds=60)
"""The time for which machines stay after their job's end for commands of notifications that are not delivered."""

ARCHIVE_ATTEMPT = timedelta(minutes=5)
"""Longest try to write a job's archive, which has no logs: agents write these."""

ARCHIVE_PATIENCE = timedelta(days=7)
"""The time for which that is tried: a storage that is full or away is noticed and repaired within it."""

ARCHIVE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(minutes=10)
)
"""As of notifications: a storage that was away is written to within 10 minutes of its return."""
