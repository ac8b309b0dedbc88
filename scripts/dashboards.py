"""`python -m scripts.dashboards`: writes Grafana's dashboards: all have one layout, and tests find the queries here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana"

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_JOB: Final = 'job_namespace="$namespace", job_name="$name"'
_NODE: Final = f'{_JOB}, node=~"$node"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One graph, or one number."""

    title: str
    queries: Mapping[str, str]
    """Queries by the text of the legend."""
    unit: str = "short"
    """Grafana's name of the unit."""
    kind: str = "timeseries"
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    variables: Mapping[str, str]
    """Queries for the values of the page's variables."""
    panels: Sequence[Panel]


FLEET: Final = Dashboard(
    uid="perdure-fleet",
    title="Perdure: fleet",
    variables={},
    panels=(
        Panel(title="Open jobs", queries={"": "sum(perdure:jobs) or vector(0)"}, kind="stat"),
        Panel(title="Ranks", queries={"": "sum(perdure:job_world_size) or vector(0)"}, kind="stat"),
        Panel(
            title="Nodes without a lease",
            queries={"": "sum(1 - perdure_node_lease_held) or vector(0)"},
            kind="stat",
        ),
        Panel(
            title="Restarts in the last hour",
            queries={"": "sum(perdure:job_restarts:increase1h)"},
            kind="stat",
        ),
        Panel(title="Jobs by phase", queries={"{{phase}}": "sum by (phase) (perdure:jobs)"}),
        Panel(title="Jobs by namespace", queries={"{{job_namespace}}": "sum by (job_namespace) (perdure:jobs)"}),
        Panel(
            title="Restarts by cause",
            queries={"{{cause}}": "sum by (cause) (perdure:job_restarts:increase1h)"},
            help="In the hour before.",
        ),
        Panel(
            title="Jobs that ended",
            queries={"{{phase}}": "sum by (phase) (increase(perdure_jobs_ended_total[1h]))"},
        ),
        Panel(
            title="Seconds to notice",
            queries={
                "p95": "histogram_quantile(0.95, sum by (le) (rate(perdure_job_notice_seconds_bucket[1h])))",
                "p50": "histogram_quantile(0.5, sum by (le) (rate(perdure_job_notice_seconds_bucket[1h])))",
            },
            unit="s",
        ),
        Panel(
            title="Seconds to repair",
            queries={
                "p95": "histogram_quantile(0.95, sum by (le) (rate(perdure_job_repair_seconds_bucket[1h])))",
                "p50": "histogram_quantile(0.5, sum by (le) (rate(perdure_job_repair_seconds_bucket[1h])))",
            },
            unit="s",
        ),
        Panel(
            title="Use of GPUs",
            queries={"{{job_namespace}}": "avg by (job_namespace) (perdure_gpu_utilization_ratio)"},
            unit="percentunit",
        ),
        Panel(
            title="Wait of decisions for a worker, p95",
            queries={
                "{{task_queue}}": "histogram_quantile(0.95, sum by (le, task_queue) "
                "(rate(temporal_workflow_task_schedule_to_start_latency_bucket[5m])))"
            },
            unit="ms",
        ),
        Panel(
            title="Free slots of workers",
            queries={
                "{{worker_type}}": "min by (worker_type) (temporal_worker_task_slots_available)",
            },
        ),
        Panel(
            title="Series that do not fit, events that are lost",
            queries={
                "series": "sum(perdure_metrics_overflow_total) or vector(0)",
                "events": "sum(perdure_events_lost_total)",
            },
        ),
    ),
)

JOB: Final = Dashboard(
    uid="perdure-job",
    title="Perdure: job",
    variables={
        "namespace": "label_values(perdure_job_phase, job_namespace)",
        "name": 'label_values(perdure_job_phase{job_namespace="$namespace"}, job_name)',
    },
    panels=(
        Panel(title="Phase", queries={"{{phase}}": f"perdure:job_phase{{{_JOB}}}"}, kind="stat"),
        Panel(title="World size", queries={"": f"perdure:job_world_size{{{_JOB}}}"}, kind="stat"),
        Panel(title="Step", queries={"": f"perdure:job_step{{{_JOB}}}"}, kind="stat"),
        Panel(
            title="Generation",
            queries={"": f"max(perdure_job_generation{{{_JOB}}})"},
            kind="stat",
            help="It grows with each world.",
        ),
        Panel(title="Steps per second", queries={"slowest node": f"perdure:job_steps_per_second{{{_JOB}}}"}),
        Panel(title="Loss", queries={"node {{node}}": f"perdure_node_loss{{{_JOB}}}"}),
        Panel(
            title="Model FLOPs utilization",
            queries={"node {{node}}": f"perdure_node_mfu_ratio{{{_JOB}}}"},
            unit="percentunit",
            help="What scripts report by `report(mfu=…)`.",
        ),
        Panel(title="Steps of nodes", queries={"node {{node}}": f"perdure_node_step{{{_JOB}}}"}),
        Panel(
            title="Restarts by cause",
            queries={"{{cause}}": f"sum by (cause) (perdure_job_restarts_total{{{_JOB}}})"},
        ),
        Panel(
            title="Age of the newest checkpoint",
            queries={"durable": f"perdure:job_checkpoint_age_seconds{{{_JOB}}}"},
            unit="s",
        ),
        Panel(
            title="Time lost to saves",
            queries={
                "node {{node}}": f"rate(perdure_node_checkpoint_stall_seconds_total{{{_JOB}}}[5m])",
            },
            unit="percentunit",
            help="The share of the time for which saves stop the training.",
        ),
        Panel(
            title="Time to store a part of a checkpoint",
            queries={"node {{node}}": f"perdure_node_checkpoint_write_seconds{{{_JOB}}}"},
            unit="s",
        ),
        Panel(
            title="Backlog of datasets",
            queries={
                "{{dataset}}": f"min by (dataset) (perdure_dataset_samples_left{{{_JOB}}})",
            },
            help="Samples that no rank has processed yet.",
        ),
        Panel(
            title="Samples set aside",
            queries={
                "{{dataset}}": f"max by (dataset) (perdure_dataset_samples_set_aside{{{_JOB}}})",
            },
            help="Samples that no rank will process, as each try failed.",
        ),
        Panel(title="Stalled nodes", queries={"": f"sum(perdure_node_stalled{{{_JOB}}})"}),
        Panel(
            title="Use of GPUs",
            queries={"node {{node}}": f"avg by (node) (perdure_gpu_utilization_ratio{{{_JOB}}})"},
            unit="percentunit",
        ),
    ),
)

NODE: Final = Dashboard(
    uid="perdure-node",
    title="Perdure: node",
    variables={
        **JOB.variables,
        "node": 'label_values(perdure_node_info{job_namespace="$namespace", job_name="$name"}, node)',
    },
    panels=(
        Panel(title="Machine", queries={"{{host}}": f"perdure_node_info{{{_NODE}}}"}, kind="stat"),
        Panel(
            title="Age of the lease",
            queries={"node {{node}}": f"perdure_node_lease_age_seconds{{{_NODE}}}"},
            unit="s",
        ),
        Panel(title="Leases taken", queries={"node {{node}}": f"perdure_node_leases_total{{{_NODE}}}"}),
        Panel(
            title="Reports that wait",
            queries={"node {{node}} to {{destination}}": f"perdure_node_outbox_messages{{{_NODE}}}"},
        ),
        Panel(title="Steps per second", queries={"node {{node}}": f"perdure_node_steps_per_second{{{_NODE}}}"}),
        Panel(
            title="Ranks that ended",
            queries={"node {{node}}": f"perdure_node_rank_exits_total{{{_NODE}}}"},
        ),
        Panel(
            title="torch's own events",
            queries={"node {{node}}: {{event}} ({{source}})": f"perdure_node_torch_events_total{{{_NODE}}}"},
        ),
        Panel(
            title="Processors of the command",
            queries={"node {{node}}": f"perdure_node_cpu_cores{{{_NODE}}}"},
        ),
        Panel(
            title="Memory of the command",
            queries={"node {{node}}": f"perdure_node_memory_bytes{{{_NODE}}}"},
            unit="bytes",
        ),
        Panel(
            title="Use of the machine's processors",
            queries={"node {{node}}": f"perdure_host_cpu_ratio{{{_NODE}}}"},
            unit="percentunit",
        ),
        Panel(
            title="Memory left on the machine",
            queries={"node {{node}}": f"perdure_host_memory_available_bytes{{{_NODE}}}"},
            unit="bytes",
        ),
        Panel(
            title="Free space",
            queries={"node {{node}}, {{folder}}": f"perdure_host_disk_free_bytes{{{_NODE}}}"},
            unit="bytes",
        ),
        Panel(
            title="Use of GPUs",
            queries={"node {{node}}, GPU {{gpu}}": f"perdure_gpu_utilization_ratio{{{_NODE}}}"},
            unit="percentunit",
        ),
        Panel(
            title="Memory of GPUs",
            queries={"node {{node}}, GPU {{gpu}}": f"perdure_gpu_memory_used_bytes{{{_NODE}}}"},
            unit="bytes",
        ),
        Panel(
            title="Temperature of GPUs",
            queries={"node {{node}}, GPU {{gpu}}": f"perdure_gpu_temperature_celsius{{{_NODE}}}"},
            unit="celsius",
        ),
        Panel(
            title="Reduced clocks of GPUs",
            queries={"node {{node}}, GPU {{gpu}}: {{reason}}": f"perdure_gpu_slowed{{{_NODE}}}"},
        ),
        Panel(
            title="Memory errors of GPUs",
            queries={"node {{node}}, GPU {{gpu}}: {{kind}}": f"perdure_gpu_memory_errors_total{{{_NODE}}}"},
        ),
    ),
)

DASHBOARDS: Final = (FLEET, JOB, NODE)


def files() -> dict[Path, str]:
    """Returns the content of each file."""
    return {
        FOLDER / f"{one.uid.removeprefix('perdure-')}.json": json.dumps(_page(one), indent=1) + "\n"
        for one in DASHBOARDS
    }


def _page(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["perdure"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["perdure"], "title": "Perdure", "asDropdown": True, "keepTime": True}
        ],
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                *(_variable(name, query) for name, query in dashboard.variables.items()),
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    several = {"multi": True, "includeAll": True, "allValue": ".*"} if name == "node" else {}
    return {"name": name, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, "sort": 1, **several}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": {"x": 6 * (number % 4), "y": 7 * (number // 4), "w": 6, "h": 7},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0 if panel.title != "Loss" else None}, "overrides": []},
        "options": {"textMode": "value_and_name"} if panel.kind == "stat" else {"legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend or "__auto", "datasource": _SOURCE}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
        print(path)
