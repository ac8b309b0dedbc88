"""Tests that numbers in the docs agree with the code."""

from __future__ import annotations

import re
from datetime import timedelta

from perdure.activities import webhooks
from perdure.activities.nodes.kubernetes import leftovers
from perdure.activities.nodes.local import folders, retention
from perdure.agent import outbox, parts
from perdure.agent import server as agent_server
from perdure.agent.workdir import LARGEST, MOST_FILES
from perdure.client import workdir
from perdure.client.logs import agents as log_agents
from perdure.contract import NotifierJob, names
from perdure.contract.base import LONGEST_TEXT
from perdure.contract.store import LONGEST_KEY
from perdure.operator import operator, reconcile
from perdure.spec.job import JobSpec
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
from tests.docs.pages import ROOT

TIMING = Timing()
ROLES = {"worker": {"nodes": 1, "command": ["true"]}}
SPEC = JobSpec.model_validate({"name": "x", "roles": ROLES})
AFTER_END = NotifierJob.model_fields["after_end"].default
WORDS = {"ten": 10, "eight": 8, "three": 3, "two": 2}


def seconds(value: timedelta) -> float:
    return value.total_seconds()


def minutes(value: timedelta) -> float:
    return value / timedelta(minutes=1)


TOLD: list[tuple[str, str, float]] = [
    ("store.md", r"lasting ones included \| ([\d,]+) KiB", store.MOST_BYTES / 1024),
    ("store.md", r"lasting keys \| ([\d,]+) each", store.MOST_KEYS),
    ("store.md", r"a key \| ([\d,]+) characters", LONGEST_KEY),
    ("store.md", r"one node \| ([\d,]+) a second", agent_server.REQUESTS_PER_SECOND),
    ("store.md", r"after a burst of ([\d,]+)", agent_server.REQUESTS_AT_ONCE),
    ("notifications.md", r"it must end with 0 within (\d+) s", seconds(webhooks.TIMEOUT)),
    ("notifications.md", r"if the first does not end it within (\d+) s", seconds(options.NOTIFICATION_ATTEMPT)),
    ("notifications.md", r"machines of the first (\w+) nodes of each role", options.MACHINES_WITH_COMMANDS),
    ("notifications.md", r"have found no machine within (\d+) s", seconds(AFTER_END)),
    ("joining.md", r"A job has at most (\d+)\s+tickets", joining.MOST_TICKETS),
    ("architecture.md", r"NodeGroup \(per role, up to (\d+) nodes\)", names.NODES_PER_GROUP),
    ("architecture.md", r"heartbeat (\d+) s,\s+timeout 6 s", seconds(TIMING.lease.heartbeat)),
    ("architecture.md", r"timeout (\d+) s, and 4 s to be taken", seconds(TIMING.lease.timeout)),
    ("architecture.md", r"and (\d+) s to be taken again", seconds(TIMING.lease.schedule_to_start)),
    ("architecture.md", r"to (\d+) s for a thousand", seconds(TIMING.lease.of(1000).heartbeat)),
    ("architecture.md", r"leases last (\d+) s and two heartbeats", seconds(TIMING.lease.outage)),
    ("architecture.md", r"not reported a created\s+node for\s+(\d+) s", seconds(options.OVERLOOKED)),
    ("architecture.md", r"and for (\d+) of its\s+usual steps", TIMING.stall.steps),
    ("architecture.md", r"reachable again after (\d+) s or more", seconds(observations.SHORTEST)),
    ("architecture.md", r"the\s+newest (\w+) are kept; a\s+pause", observed.KEPT),
    ("architecture.md", r"from ([\d,]+) events on", options.HISTORY_LIMIT),
    ("architecture.md", r"after its first (\w+)\s+reasons", REWORDINGS),
    ("architecture.md", r"plain JSON up to (\d+) KB", carrying.LARGEST_PLAIN / 1024),
    ("architecture.md", r"at most ([\d,]+) characters, and a job's incidents", LONGEST_TEXT),
    ("architecture.md", r"a job's incidents (\d+) KB", incident_texts.BUDGET / 1024),
    ("architecture.md", r"at most ([\d,]+) nodes\. Tried", MAX_NODES),
    ("architecture.md", r"(Eight) or more nodes that are desired at once", options.MANY_NODES),
    ("architecture.md", r"are created (\d+) by one activity", options.NODES_TOGETHER),
    ("architecture.md", r"at a random time within (\d+) ms per node", outbox._SPREAD_PER_NODE * 1000),
    ("events.md", r"Texts have at most ([\d,]+) characters", plain.LONGEST_TEXT),
    ("events.md", r"a list or mapping (\d+) items", plain.MOST_ITEMS),
    ("events.md", r"and a line ([\d,]+) bytes", formats.LONGEST_LINE),
    ("events.md", r"A file of (\d+) MiB", files.MAX_BYTES / 1024**2),
    ("events.md", r"and (three) older ones are kept", files.KEPT),
    ("events.md", r"a queue of ([\d,]+), drops the newest", background.CAPACITY),
    ("events.md", r"exports what waits every (\d+) ms", seconds(background.LINGER) * 1000),
    ("events.md", r"waits for (two) seconds at most", seconds(background.CLOSE_WITHIN)),
    ("node-protocol.md", r"longer than ([\d,]+) characters", LONGEST_REPORT),
    ("node-protocol.md", r"the reserved code (\d+)", SUPERSEDED_EXIT_CODE),
    ("node-protocol.md", r"`launcher/usage` is sent every (\d+) s", seconds(USAGE_INTERVAL)),
    ("node-protocol.md", r'"stop_grace_s": ([\d.]+)', seconds(TIMING.processes.stop_grace)),
    ("node-protocol.md", r'"log_max_bytes": (\d+)', TIMING.processes.log_max_bytes),
    ("operations.md", r"such as `30d`; (\d+) days by default", folders.DEFAULT_RETENTION.days),
    ("operations.md", r"not among the (\d+) that ended last", retention.KEPT_JOBS),
    ("joining.md", r"`limits.termination_grace_period` \((\d+) s\)", seconds(SPEC.limits.termination_grace_period)),
    ("joining.md", r"`timing.rendezvous.join_timeout` \((\d+) min\)", minutes(TIMING.rendezvous.join_timeout)),
    ("joining.md", r"`recovery.replace_timeout` \((\d+) min\)", minutes(SPEC.recovery.replace_timeout)),
    ("kubernetes.md", r"at most (\d+) MB compressed", workdir.MAX_PACKED / 1e6),
    ("kubernetes.md", r"and (\d+) MB in", LARGEST / 1e6),
    ("kubernetes.md", r"in ([\d,]+) files unpacked", MOST_FILES),
    ("kubernetes.md", r"after (\d+) minutes if the client has vanished", minutes(options.UPLOAD_LIMIT)),
    ("kubernetes.md", r"every (\w+) minutes, and `perdure doctor`", minutes(leftovers.INTERVAL)),
    ("kubernetes.md", r"`timing.rendezvous.join_timeout`, (\d+)m", minutes(TIMING.rendezvous.join_timeout)),
    ("kubernetes.md", r"with the last\s+([\d,]+) lines", log_agents.LINES),
    ("kubernetes.md", r"agents copy it every (\d+) s", parts._INTERVAL),
    ("kubernetes.md", r"One list and one watch per (\d+) nodes", names.NODES_PER_GROUP),
    ("kubernetes-resource.md", r"one\s+query\s+to\s+Temporal\s+every (\d+) s", operator.ROUND),
    ("kubernetes-resource.md", r"at\s+most\s+(\d+)\s+reconciles\s+of\s+jobs", operator.LOOKS_PER_SECOND),
    ("kubernetes-resource.md", r"running\s+job\s+is\s+reconciled\s+every (\d+) s", reconcile.REFRESH),
    ("spec.md", r"a specification has at most (\d+) KiB", MAX_BYTES / 1024),
    ("importing.md", r"within `retry.window` \((\d+) within an hour\)", SPEC.retry.max_restarts),
]
"""Page, where the number stands, and what it is."""


def told(page: str, pattern: str) -> float | None:
    """Returns the number that a page has there; None where nothing on it is like the pattern."""
    match = re.search(pattern.replace(" ", r"\s+"), (ROOT / "docs" / page).read_text(encoding="utf-8"))
    if match is None:
        return None
    number = match[1].replace(",", "").lower()
    return WORDS[number] if number in WORDS else float(number)


def test_each_number_is_the_codes():
    found = [(page, pattern, told(page, pattern), value) for page, pattern, value in TOLD]
    assert [row for row in found if row[2] != row[3]] == []
