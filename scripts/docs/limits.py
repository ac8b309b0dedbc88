"""Generates the reference of limits and intervals, `docs/limits.md`, from the constants that hold them.

Pages link to it instead of repeating a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from perdure.activities import webhooks
from perdure.activities.nodes.kubernetes import deletion, leftovers, warnings
from perdure.activities.nodes.local import folders, retention
from perdure.agent import outbox, parts, server
from perdure.agent.workdir import LARGEST, MOST_FILES
from perdure.client import workdir
from perdure.client.logs import agents as log_agents
from perdure.contract import NotifierJob, names
from perdure.contract.base import LONGEST_TEXT
from perdure.contract.store import LONGEST_KEY
from perdure.operator import coverage, operator, reconcile
from perdure.spec.roles import MAX_NODES
from perdure.spec.timing import Timing
from perdure.spec.validate import MAX_BYTES
from perdure.workflows import carrying, options
from perdure.workflows.backend_reports import REWORDINGS
from perdure.workflows.policy.capacity import joining
from perdure.workflows.policy.record import incident_texts, observations, observed
from perdure.workflows.policy.services import store
from perdure_launcher.rank_exits import SUPERSEDED_EXIT_CODE
from perdure_launcher.supervisor.launcher import USAGE_INTERVAL
from perdure_training.events import background, files, formats, plain
from perdure_training.node_api.codec import LONGEST_TEXT as LONGEST_REPORT

_INTRODUCTION = """\
# Limits and intervals

What is not on this page is a [field of the specification](spec.md), which has its default there. What stands here holds
for each job; no field changes it. Where a field's default decides, the row names the field.
"""

_LEASE = Timing().lease
_KIB, _MIB = 1024, 1024 * 1024


def _count(number: float) -> str:
    return f"{number:,g}"


def _binary(number: int) -> str:
    return f"{number // _MIB:,} MiB" if number % _MIB == 0 else f"{number / _KIB:,.4g} KiB"


def _decimal(number: int) -> str:
    return f"{number / 1_000_000:,.4g} MB"


def _time(value: timedelta | float) -> str:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    for unit, length in (("d", 86_400), ("min", 60), ("s", 1)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


LIMITS: Mapping[str, Mapping[str, str]] = {
    "Jobs and nodes": {
        "nodes of a job": _count(MAX_NODES),
        "nodes of a NodeGroup, which has one list and one watch of the backend": _count(names.NODES_PER_GROUP),
        "nodes desired at once from which on one activity creates several": _count(options.MANY_NODES),
        "nodes that one activity creates or deletes": _count(options.NODES_TOGETHER),
        "time in which a watch reports a created node, or is started again": _time(options.OVERLOOKED),
        "a specification, as JSON without default values": _binary(MAX_BYTES),
    },
    "Leases": {
        "heartbeat of a lease (`timing.lease.heartbeat`)": _time(_LEASE.heartbeat),
        "the same in a job of 1,000 nodes": _time(_LEASE.of(1000).heartbeat),
        "silence after which a lease lapses (`timing.lease.timeout`)": _time(_LEASE.timeout),
        "the same where the job's size sets the heartbeat: two heartbeats, and": _time(_LEASE.outage),
        "time to take a lease again (`timing.lease.schedule_to_start`)": _time(_LEASE.schedule_to_start),
        "reports of first steps and of leases in jobs of 100 nodes or more are spread by, per node": _time(
            outbox._SPREAD_PER_NODE
        ),
    },
    "Pauses": {
        "usual steps that a stall lasts at least, beside `timing.stall.after`": _count(Timing().stall.steps),
        "the shortest silence of a node that becomes an observation": _time(observations.SHORTEST),
        "observations that are kept": _count(observed.KEPT),
    },
    "Histories": {
        "events from which on a job or group continues as new in any case": _count(options.HISTORY_LIMIT),
        "bytes of history from which on it does": _binary(options.HISTORY_BYTES),
        "updates from which on a job does": _count(options.UPDATES_LIMIT),
        "reasons of one pending node that are reported at once; then one a minute": _count(REWORDINGS),
        "state that a next run gets as plain JSON; larger states are compressed": _binary(carrying.LARGEST_PLAIN),
        "characters of a text for people": _count(LONGEST_TEXT),
        "texts of all incidents of a job": _binary(incident_texts.BUDGET),
    },
    "Shared store": {
        "all keys and values, the lasting ones included": _binary(store.MOST_BYTES),
        "keys of a generation": _count(store.MOST_KEYS),
        "lasting keys": _count(store.MOST_KEYS),
        "characters of a key": _count(LONGEST_KEY),
        "calls of one node, per second": _count(server.REQUESTS_PER_SECOND),
        "calls of one node at once, after a pause": _count(server.REQUESTS_AT_ONCE),
    },
    "Training events": {
        "characters of a text": _count(plain.LONGEST_TEXT),
        "items of a list or mapping": _count(plain.MOST_ITEMS),
        "bytes of a line": _count(formats.LONGEST_LINE),
        "a file, until it is renamed": _binary(files.MAX_BYTES),
        "older files that are kept": _count(files.KEPT),
        "events that wait to be exported": _count(background.CAPACITY),
        "interval of exports": _time(background.LINGER),
        "time that the end of a process waits for the last export": _time(background.CLOSE_WITHIN),
    },
    "Notifications": {
        "time in which a command must end, or an endpoint answer": _time(webhooks.TIMEOUT),
        "the same until another machine runs a command of a job of joined machines": _time(
            options.NOTIFICATION_ATTEMPT
        ),
        "nodes of each role whose machines run such commands, the first ones": _count(options.MACHINES_WITH_COMMANDS),
        "time after the job's end in which such a command must have found a machine": _time(
            NotifierJob.model_fields["after_end"].default
        ),
    },
    "Joined machines": {"tickets of a job": _count(joining.MOST_TICKETS)},
    "Working directory": {
        "the archive, compressed": _decimal(workdir.MAX_PACKED),
        "its files, unpacked": _decimal(LARGEST),
        "number of its files": _count(MOST_FILES),
        "time after which an upload that no job has followed is removed": _time(options.UPLOAD_LIMIT),
    },
    "Logs and folders": {
        "lines that `perdure logs` shows of a running pod without `--tail`": _count(log_agents.LINES),
        "interval at which agents copy logs to `outputs.logs`": _time(parts._INTERVAL),
        "time for which folders of local nodes are kept after their job (`retention` of the machine)": _time(
            folders.DEFAULT_RETENTION
        ),
        "jobs that ended last, whose folders are kept in any case": _count(retention.KEPT_JOBS),
    },
    "Kubernetes": {
        "interval at which workers remove what closed jobs have left": _time(leftovers.INTERVAL),
        "time beyond its grace period for which a pod's end is awaited": _time(deletion.OVERDUE),
        "time for which a pod that has a machine does not start before its Events are read": _time(warnings.FIRST_READ),
        "longest pause before they are read again": _time(warnings.LONGEST_PAUSE),
        "interval at which the operator asks Temporal for jobs that have changed": _time(operator.ROUND),
        "silence of the API server after which the operator's namespaces are not served": _time(coverage.STALE),
        "reconciles of jobs per second": _count(operator.LOOKS_PER_SECOND),
        "interval at which the operator reconciles a running job": _time(reconcile.REFRESH),
    },
    "Protocol of a node": {
        "characters of a text in a report": _count(LONGEST_REPORT),
        "exit code of a command whose generation is over": str(SUPERSEDED_EXIT_CODE),
        "interval of `launcher/usage`": _time(USAGE_INTERVAL),
    },
}
"""The rows of each section: what is limited, and the value."""


def reference() -> str:
    """Returns the page's content."""
    return "\n".join([_INTRODUCTION, *(_section(title, rows) for title, rows in LIMITS.items())])


def _section(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join([f"## {title}\n", "| | |", "|-|-|", *lines, ""])
