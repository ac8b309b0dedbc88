"""The table of all metrics of Perdure's own, from which both the exported series and docs/metrics.md are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """The process that exports a metric."""

    WORKER = "worker"
    AGENT = "agent"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """The name, which ends with the unit, and `_total` for counters."""
    source: Source
    unit: str
    labels: tuple[str, ...] = ()
    """Labels besides those that all metrics of agents have (`NODE_LABELS`)."""
    meaning: str
    alert: str = ""
    """What to alert on; empty for metrics that are read when something else is wrong."""
    buckets: tuple[float, ...] = ()
    """Bounds of a histogram; empty for other kinds."""

    @property
    def kind(self) -> Kind:
        """The type, which the name and the bounds tell."""
        if self.buckets:
            return Kind.HISTOGRAM
        return Kind.COUNTER if self.name.endswith("_total") else Kind.GAUGE

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return (*NODE_LABELS, *self.labels) if self.source is Source.AGENT else self.labels


NODE_LABELS: Final = ("job_namespace", "job_name", "role", "node")
"""Labels of all metrics of an agent."""

LABELS: Final[Mapping[str, str]] = {
    "job_namespace": "The job's namespace.",
    "job_name": "The job's name. Prometheus itself uses `job` and `namespace`.",
    "role": "The role that it is about; of a node, the role that it belongs to.",
    "node": "The node's rank (slot) in its role; it outlives incarnations.",
    "backend": "`local`, `kubernetes` or `joined`.",
    "phase": "A phase of jobs, such as `RUNNING`.",
    "cause": "The class of failure that began the incident, such as `NODE_LOST`; `REQUESTED` if a user began it.",
    "kind": "What failed, as agents report it, such as `RANKS`; of memory errors `corrected` or `uncorrected`.",
    "dataset": "The dataset's name.",
    "destination": "`job` or `group`.",
    "event": "`RENDEZVOUS`, `START`, `SUCCEEDED`, `FAILED` or `TERMINATED`.",
    "source": "What the event is about: `WORKER`, a rank, or `AGENT`, torchrun.",
    "gpu": "The driver's number of the GPU.",
    "product": "The GPU's product name.",
    "reason": "Why: of slow clocks `thermal`, `power` or `hardware`, of lost events `dropped` or `refused`.",
    "metric": "The name of another metric.",
    "folder": "`run` (the node's run directory) or `shm` (shared memory).",
    "uid": "The uid of the job's run.",
    "incarnation": "The node's incarnation.",
    "host": "The machine's name.",
}
"""The meaning of each label."""

_NOTICE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for what takes a tenth of a second if an agent reports it, and ten seconds if a lease has to lapse."""
_REPAIR = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""Bounds for what takes a second in place, minutes with a new machine, and longer if the cluster is full."""

_JOB = ("job_namespace", "job_name")
_ROLE = (*_JOB, "role")


def _worker(name: str, unit: str, labels: tuple[str, ...], meaning: str, alert: str = "") -> Metric:
    return Metric(name=name, source=Source.WORKER, unit=unit, labels=labels, meaning=meaning, alert=alert)


def _agent(name: str, unit: str, meaning: str, alert: str = "", labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=name, source=Source.AGENT, unit=unit, labels=labels, meaning=meaning, alert=alert)


WORKER_METRICS: Final = (
    _worker(
        "perdure_jobs",
        "jobs",
        ("job_namespace", "backend", "phase"),
        "Open jobs, as the server lists them. Every worker exports the same: take the maximum over workers.",
    ),
    _worker(
        "perdure_job_phase",
        "1",
        (*_JOB, "phase"),
        "1 for the phase that an open job is in, as the server lists it; every worker exports the same.",
        "`WAITING` or `RECOVERING` for longer than repairs usually take",
    ),
    _worker(
        "perdure_job_world_size",
        "ranks",
        _JOB,
        "Ranks of the job's world, as the server lists it; 0 before the first world.",
        "fewer than the job needs, for a long time",
    ),
    _worker(
        "perdure_job_generation",
        "number",
        _ROLE,
        "The newest generation that this worker has decided. It only grows: take the maximum over workers.",
    ),
    _worker(
        "perdure_job_restarts_total",
        "restarts",
        (*_ROLE, "cause"),
        "Restarts that failures cost, as this worker decided them.",
        "many within the window of the job's budget",
    ),
    _worker(
        "perdure_job_relaunches_total",
        "nodes",
        _ROLE,
        "Nodes that were replaced.",
    ),
    Metric(
        name="perdure_job_notice_seconds",
        source=Source.WORKER,
        unit="s",
        labels=("cause",),
        meaning="From the first evidence of an incident, until the job learned of it.",
        alert="the 95th percentile above 15 s",
        buckets=_NOTICE,
    ),
    Metric(
        name="perdure_job_repair_seconds",
        source=Source.WORKER,
        unit="s",
        labels=("cause",),
        meaning="From when the job learned of an incident until all ranks ran again.",
        alert="the 95th percentile above what your jobs can afford",
        buckets=_REPAIR,
    ),
    _worker(
        "perdure_jobs_ended_total",
        "jobs",
        ("job_namespace", "phase"),
        "Jobs whose end this worker has decided: `SUCCEEDED`, `FAILED` or `CANCELLED`.",
        "`FAILED` grows",
    ),
    _worker(
        "perdure_job_checkpoint_step",
        "step",
        _ROLE,
        "The step of the newest durable checkpoint. It only grows, except after a restore from an older one.",
    ),
    _worker(
        "perdure_job_checkpoint_time_seconds",
        "Unix time",
        _ROLE,
        "When the newest checkpoint became durable; its age is `time()` less this.",
        "an age of several intervals of `checkpoint.every`",
    ),
    _worker(
        "perdure_job_checkpoint_write_seconds",
        "s",
        _ROLE,
        "The longest time that a node took to copy the newest durable checkpoint to storage.",
    ),
    _worker(
        "perdure_dataset_samples_done",
        "samples",
        (*_JOB, "dataset"),
        "Samples that ranks have processed, of all epochs.",
    ),
    _worker(
        "perdure_dataset_samples_left",
        "samples",
        (*_JOB, "dataset"),
        "Samples that no rank has processed yet: the backlog of shards. None for a dataset without an end.",
    ),
    _worker(
        "perdure_dataset_samples_set_aside",
        "samples",
        (*_JOB, "dataset"),
        "Samples that no rank will process, as each try failed; `perdure status` names them.",
        "above 0",
    ),
    _worker(
        "perdure_listing_failures_total",
        "calls",
        (),
        "Listings of the open jobs that failed: the metrics that come from them are missing meanwhile.",
        "above 0",
    ),
    _worker(
        "perdure_node_scrape_failures_total",
        "calls",
        (),
        "Agents of this machine whose metrics the worker could not read.",
    ),
)

BOTH: Final = (
    _worker(
        "perdure_events_lost_total",
        "events",
        ("reason",),
        "Events of this process that did not reach their destination: `dropped` because too many waited, `refused` by "
        "the destination.",
        "above 0",
    ),
    _worker(
        "perdure_metrics_overflow_total",
        "samples",
        ("metric",),
        "Samples whose labels would have made one series too many: counters and histograms count them under `other`, "
        "gauges leave them out.",
        "above 0",
    ),
)
"""Metrics that workers and agents export; those of agents have an agent's labels as well."""

AGENT_METRICS: Final = (
    _agent(
        "perdure_node_info",
        "1",
        "Always 1. It also has the job's labels, as `label_NAME`: join them by `job_namespace` and `job_name`.",
        labels=("uid", "incarnation", "host"),
    ),
    _agent("perdure_node_generation", "number", "The newest generation that the node has entered."),
    _agent("perdure_node_ranks", "ranks", "Ranks of the node in the world that it has entered."),
    _agent(
        "perdure_node_step",
        "step",
        "The newest step of the node's slowest rank.",
        "no growth while the job is `RUNNING`",
    ),
    _agent("perdure_node_total_steps", "steps", "The planned number of steps, if the script reports it."),
    _agent(
        "perdure_node_steps_per_second",
        "1/s",
        "Throughput over the last minute, or since the generation began.",
        "half of the usual",
    ),
    _agent("perdure_node_loss", "number", "The last loss that the script reported.", "NaN, or it grows"),
    _agent(
        "perdure_node_mfu_ratio",
        "0 to 1",
        "Model FLOPs utilization, if the script reports it: `report(mfu=…)`.",
        "well below the usual",
    ),
    _agent(
        "perdure_node_last_step_time_seconds",
        "Unix time",
        "When the slowest rank made its last step.",
    ),
    _agent(
        "perdure_node_step_compute_seconds",
        "s",
        "Computation in a usual step before its first collective, of the rank that computes longest, over gloo.",
        "a tenth more than that of other nodes",
    ),
    _agent(
        "perdure_node_step_wait_seconds",
        "s",
        "The time of that rank from there to the optimizer's step: it waits for others.",
    ),
    _agent("perdure_node_stalled", "0 or 1", "1 while the ranks are stalled.", "1"),
    _agent(
        "perdure_node_lease_held",
        "0 or 1",
        "1 while the agent holds its lease: the control plane reaches the node.",
        "0 for longer than a minute",
    ),
    _agent("perdure_node_lease_age_seconds", "s", "How long the agent has held its newest lease."),
    _agent("perdure_node_leases_total", "leases", "Leases that the agent has taken since it started."),
    _agent(
        "perdure_node_outbox_messages",
        "messages",
        "Reports that have not reached their workflow yet.",
        "above 0 for longer than a minute",
        ("destination",),
    ),
    _agent(
        "perdure_node_failures_total",
        "failures",
        "Failures that the agent has reported to the job since it started.",
        labels=("kind",),
    ),
    _agent("perdure_node_rank_exits_total", "ranks", "Ranks that ended before the training did."),
    _agent(
        "perdure_node_wrong_claims_total",
        "claims",
        "Ranks and worlds that the node's processes have named to its agent and that are not theirs.",
    ),
    _agent(
        "perdure_node_torch_events_total",
        "events",
        "Events that torch itself recorded in the node's torchruns. It records no end of a rank that it starts again.",
        labels=("event", "source"),
    ),
    _agent(
        "perdure_node_torch_event_time_seconds",
        "Unix time",
        "When torch recorded the newest of these.",
        labels=("event", "source"),
    ),
    _agent(
        "perdure_node_checkpoint_step",
        "step",
        "The step of the newest checkpoint of which this node has stored its part.",
    ),
    _agent(
        "perdure_node_checkpoint_time_seconds",
        "Unix time",
        "When this node had stored that part.",
    ),
    _agent("perdure_node_checkpoint_write_seconds", "s", "How long it took to store that part."),
    _agent("perdure_node_checkpoint_bytes", "bytes", "The size of that part."),
    _agent(
        "perdure_node_checkpoint_failures_total",
        "checkpoints",
        "Checkpoints of which this node could not store its part at once.",
        "above 0",
    ),
    _agent(
        "perdure_node_checkpoint_stall_seconds_total",
        "s",
        "Time for which saves by `perdure_training.checkpoint` have stopped the training; of the rank with the most.",
        "more than the share of the training time that you allow",
    ),
    _agent(
        "perdure_node_shard_requests",
        "ranks",
        "Ranks that wait for an answer of their dataset.",
        labels=("dataset",),
    ),
    _agent("perdure_node_cpu_cores", "cores", "Processor time that the command's processes take a second."),
    _agent("perdure_node_memory_bytes", "bytes", "Memory of these processes."),
    _agent(
        "perdure_node_memory_limit_bytes",
        "bytes",
        "The limit of their control group, if there is one.",
        "memory above 95 % of it",
    ),
    _agent("perdure_gpu_info", "1", "Always 1.", labels=("gpu", "product")),
    _agent(
        "perdure_gpu_utilization_ratio",
        "0 to 1",
        "Share of the time in which something ran on the GPU.",
        "near 0 while the job is `RUNNING`",
        ("gpu",),
    ),
    _agent("perdure_gpu_memory_used_bytes", "bytes", "Memory in use, by any process.", labels=("gpu",)),
    _agent("perdure_gpu_memory_total_bytes", "bytes", "Memory of the GPU.", labels=("gpu",)),
    _agent("perdure_gpu_temperature_celsius", "°C", "Temperature of the GPU.", "above 85", ("gpu",)),
    _agent("perdure_gpu_power_watts", "W", "Power of the GPU.", labels=("gpu",)),
    _agent(
        "perdure_gpu_slowed",
        "0 or 1",
        "1 while the GPU's clocks are reduced for this reason.",
        "`thermal` or `hardware` is 1",
        ("gpu", "reason"),
    ),
    _agent(
        "perdure_gpu_memory_errors_total",
        "errors",
        "Memory errors since the driver was loaded.",
        "`uncorrected` grows",
        ("gpu", "kind"),
    ),
    _agent("perdure_host_cpu_ratio", "0 to 1", "Use of the machine's processors since the last scrape."),
    _agent("perdure_host_load1", "processes", "Load average over a minute."),
    _agent("perdure_host_memory_total_bytes", "bytes", "Memory of the machine."),
    _agent(
        "perdure_host_memory_available_bytes",
        "bytes",
        "Memory that processes of the machine can still get.",
        "below 5 % of the total",
    ),
    _agent(
        "perdure_host_disk_free_bytes",
        "bytes",
        "Free space of the file system with this folder.",
        "below what a checkpoint needs",
        ("folder",),
    ),
    _agent(
        "perdure_host_clock_steps_total",
        "steps",
        "Times that the machine's clock was set by more than a second between two scrapes, in either direction.",
        "above 0: times in events and incidents of this machine are wrong",
    ),
)

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in (*WORKER_METRICS, *BOTH, *AGENT_METRICS)}
"""All metrics by their names."""
