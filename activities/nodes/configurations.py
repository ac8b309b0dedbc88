"""Configurations of a node's agent and launcher: the same for every backend."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure.agent.config import AgentConfig, GatewayConnection
from perdure.base.credentials.grants import Grant, PodName
from perdure.contract import NodeRequest
from perdure.contract.archive import archived_events, job_archive, logs_place
from perdure.spec.capabilities import service_port
from perdure.spec.checkpoint import Checkpoint
from perdure.spec.recovery import OnNan, StateLoss
from perdure.spec.roles import RendezvousMode

MONITORS_VARIABLE = "PERDURE_MONITORS"
"""Where the worker or `perdure join` finds the endpoints that agents read: URLs with spaces between them."""


def agent_configuration(
    request: NodeRequest,
    *,
    address: str,
    host: str = "",
    run_dir: Path,
    state_dir: Path | None = None,
    gateway: GatewayConnection | None = None,
    metrics_port: int | None = None,
    copies_dir: Path | None = None,
) -> AgentConfig:
    """Returns the agent's configuration.

    Args:
        request: the node.
        address: where other nodes reach it.
        host: the name of its machine, for users.
        run_dir: the run directory that it shares with the launcher.
        state_dir: a folder of its own, where the launcher runs as another user.
        gateway: how it reaches the control plane; None where it connects to Temporal itself.
        metrics_port: where Prometheus reads its metrics; None for no port.
        copies_dir: a folder in memory of its own for what other nodes have saved; None for the machine's shared memory.
    """
    spec = request.spec
    archive = job_archive(spec, request.node.uid)
    role, port = spec.roles[request.node.role], service_port(spec, request.node.role, request.node.rank)
    return AgentConfig(
        node=request.node,
        job_id=request.job_id,
        job_first_run_id=request.job_first_run_id,
        group_id=request.group_id,
        task_queue=request.task_queue,
        address=address,
        host=host,
        nodes=str(role.nodes),
        run_dir=run_dir,
        state_dir=state_dir,
        gateway=gateway,
        timing=spec.timing,
        termination_grace=spec.limits.termination_grace_period.total_seconds(),
        outputs_logs=logs_place(spec, request.node.uid),
        keep_all_logs=spec.outputs.logs is not None,
        archived_events=archived_events(archive) if archive is not None else None,
        preflight=spec.preflight,
        ready=role.ready.model_copy(update={"port": port}) if role.ready is not None else None,
        log_patterns={number: rule.match.log for number, rule in enumerate(spec.retry.rules) if rule.match.log},
        labels=dict(spec.labels),
        metrics_port=metrics_port,
        monitors=tuple(os.environ.get(MONITORS_VARIABLE, "").split()),
        checkpoint=_checkpoint_of(request),
        awaits_state=spec.recovery.on_state_loss is not StateLoss.OLDER,
        store_ports=spec.network.store_ports,
        copies_dir=copies_dir,
    )


def launcher_configuration(request: NodeRequest, *, address: str, workdir: str | None = None) -> dict[str, Any]:
    """Returns the launcher's configuration, as specified in docs/node-protocol.md.

    Args:
        request: the node.
        address: where other nodes reach it.
        workdir: the command's working directory; None for the launcher's own.
    """
    spec = request.spec
    role = spec.roles[request.node.role]
    grace = spec.limits.termination_grace_period
    saves = min(spec.stored.save_timeout, grace / 2) if spec.stored else timedelta()
    return {
        "command": list(role.command),
        "workdir": workdir,
        "env": spec.env_of(request.node.role),
        "secrets": list(spec.secrets),
        "nodes": str(role.nodes),
        "role": request.node.role,
        "slot": request.node.rank,
        "port": service_port(spec, request.node.role, request.node.rank),
        "processes": 1 if role.ready is not None else role.nproc_per_node,
        "rendezvous": RendezvousMode.ENV if role.ready is not None else role.rendezvous,
        "run_id": request.node.uid,
        "address": address,
        "store_ports": spec.network.store_ports,
        "stop_grace_s": spec.timing.processes.stop_grace.total_seconds(),
        "warm_starts": spec.recovery.warm_starts,
        "termination_grace_s": grace.total_seconds(),
        "save_grace_s": saves.total_seconds(),
        "rolls_back": spec.recovery.on_nan is OnNan.ROLLBACK,
        "reports_spikes": spec.recovery.report_spikes,
        "watch": spec.checkpoint.watch if spec.checkpoint else None,
        "log_max_bytes": spec.timing.processes.log_max_bytes,
    }


def _checkpoint_of(request: NodeRequest) -> Checkpoint | None:
    """Returns the job's checkpoints; each of several roles has a folder of its own in their storage."""
    checkpoint = request.spec.checkpoint
    if checkpoint is None or checkpoint.storage is None or len(request.spec.roles) == 1:
        return checkpoint
    return checkpoint.model_copy(update={"storage": f"{checkpoint.storage.rstrip('/')}/{request.node.role}"})


def agent_grant(
    request: NodeRequest,
    *,
    temporal_namespace: str,
    pod: PodName | None = None,
    machine: str = "",
    created: bool = False,
) -> Grant:
    """Returns the rights of the agent at the gateway.

    Args:
        request: the node.
        temporal_namespace: that of the job.
        pod: the holder, if it is a pod.
        machine: else the digest of the token of its machine.
        created: whether a worker has created the node on that machine; otherwise the machine has joined.
    """
    return Grant(
        **dict(request.node),
        temporal_namespace=temporal_namespace,
        job_id=request.job_id,
        group_id=request.group_id,
        task_queue=request.task_queue,
        pod=pod,
        machine=machine,
        created=created,
    )
