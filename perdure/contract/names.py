"""All external names: workflow IDs, task queues, node names.

A job's name may be used again while the last run's nodes still wind down, so everything that belongs to one run carries
its uid: the last 8 hexadecimal digits of the first run ID of its workflow. The first digits are a clock: run IDs are
UUIDs of version 7, and two runs within a minute share their first 8 digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.contract.identity import NodeId
    from perdure.spec.job import JobSpec

WORKER_TASK_QUEUE = "perdure"
"""The task queue of workflows and short activities, unless a site names another queue."""


def watch_task_queue(worker_task_queue: str) -> str:
    """The second queue of the same workers: for long watches only, so that they cannot starve the short activities of
    slots."""
    return f"{worker_task_queue}-watch"


def history_task_queue(worker_task_queue: str) -> str:
    """The queue of those workers that keep a history."""
    return f"{worker_task_queue}-history"


def cluster_task_queue(worker_task_queue: str, backend: str) -> str:
    """The queue of those workers that can see the machines of one backend."""
    return f"{worker_task_queue}-cluster-{backend}"


TRAINING_JOB = "TrainingJob"
SCHEDULED_JOB = "ScheduledJob"
NODE_GROUP = "NodeGroup"
DATASET = "Dataset"
STORE = "Store"
ASK_NODE = "AskNode"
READ_SITE = "ReadSite"
HISTORY_RECORDER = "HistoryRecorder"
READ_HISTORY = "ReadHistory"
WORKDIR_UPLOAD = "WorkdirUpload"
CLUSTER = "Cluster"
WATCH_CLUSTER = "watch_cluster"
"""The activity whose heartbeats hold a cluster's view."""
NOTIFIER = "Notifier"
ARCHIVER = "Archiver"

REMOVAL_DENIED = "RemovalDenied"
"""The type of the error of activities that a backend's system does not let remove nodes."""

WORKDIR_MEMO = "perdure-workdir"
"""The key of a job's memo that names the archive of its code."""

NODES_PER_GROUP = 128
"""Nodes that one NodeGroup leads: 128 leases are re-held in about a second after continue-as-new."""


def job_workflow_id(namespace: str, name: str) -> str:
    return f"job/{namespace}/{name}"


def job_of(workflow_id: str) -> tuple[str, str]:
    """Returns the namespace and the name of a job, from its workflow ID."""
    namespace, _, name = workflow_id.removeprefix("job/").partition("/")
    return namespace, name


def workdir_workflow_id(namespace: str, archive: str) -> str:
    """The workflow ID of the upload of one submission's code."""
    return f"workdir/{namespace}/{archive}"


def uid_of(first_run_id: str) -> str:
    return first_run_id.replace("-", "")[-8:]


def group_index(rank: int) -> int:
    return rank // NODES_PER_GROUP


def group_workflow_id(job_id: str, uid: str, role: str, group: int) -> str:
    return f"{job_id}/{uid}/{role}/{group}"


def role_of_group(workflow_id: str) -> str:
    return workflow_id.split("/")[-2]


def dataset_workflow_id(job_id: str, uid: str, name: str) -> str:
    return f"{job_id}/{uid}/dataset/{name}"


def store_workflow_id(job_id: str, uid: str) -> str:
    return f"{job_id}/{uid}/store"


def archiver_workflow_id(job_id: str, uid: str) -> str:
    """The workflow ID of the archive of one run."""
    return f"{job_id}/{uid}/archive"


def notifier_workflow_id(namespace: str, name: str, uid: str) -> str:
    """The workflow ID of the deliveries of one run's notifications."""
    return f"notifier/{namespace}/{name}/{uid}"


def command_task_queue(uid: str) -> str:
    """The task queue from which machines of a joined job's run take the commands of its notifications."""
    return f"notify/{uid}"


def question_workflow_id(job_id: str, node: NodeId, request: str) -> str:
    """The workflow ID of one question to a node's agent; `request` distinguishes it from others."""
    return f"ask/{job_id.removeprefix('job/')}/{node.path}/{request}"


def site_workflow_id(request: str) -> str:
    """The workflow ID of one request for a site's configuration; `request` distinguishes it from others."""
    return f"site/{request}"


def recorder_workflow_id(worker_task_queue: str) -> str:
    """The workflow ID of the recording of the jobs of one task queue."""
    return f"history/{worker_task_queue}"


def cluster_workflow_id(worker_task_queue: str, backend: str) -> str:
    """The workflow ID of the watch over the machines of one backend."""
    return f"cluster/{worker_task_queue}/{backend}"


def history_workflow_id(request: str) -> str:
    """The workflow ID of one question about the past; `request` distinguishes it from others."""
    return f"ask-history/{request}"


def node_task_queue(node: NodeId) -> str:
    return f"node/{node.path}"


def probe_task_queue(node_queue: str) -> str:
    """The queue that a node's agent polls to learn whether the server refuses polls: no one puts anything there."""
    return f"{node_queue}/probe"


def node_name(job_name: str, node: NodeId) -> str:
    """The name of a pod or a node's folder; at most 63 characters, as Kubernetes' labels allow."""
    return dns_label(job_name, f"-{node.role}-{node.rank}-{node.uid}{node.incarnation}")


def run_name(job_name: str, uid: str) -> str:
    """Returns the name of the objects of a cluster that represent one run of a job. It is also a label value, so a long
    job name is shortened."""
    return dns_label(f"perdure-{job_name}", f"-{uid}")


def host_name(role: str, rank: int) -> str:
    """The name that the pod of a node has for itself, where it has one: the same in each incarnation."""
    return f"{role}-{rank}"


def host_in_cluster(job: JobSpec, uid: str, role: str, rank: int) -> str:
    """The name by which pods reach a node, whichever pod is its incarnation."""
    return f"{host_name(role, rank)}.{run_name(job.name, uid)}.{job.namespace}.svc"


def dns_label(job_name: str, suffix: str) -> str:
    """Joins both to a DNS label of at most 63 characters. The suffix makes the name unique, so it is kept whole."""
    return job_name[: 63 - len(suffix)].rstrip("-") + suffix
