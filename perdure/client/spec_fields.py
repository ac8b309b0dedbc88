"""The options of `perdure.JobBuilder`, for type checkers and editors.

Generated from the models in `perdure.spec` by `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Required, TypedDict


class CheckpointFields(TypedDict, total=False):
    storage: str | None
    every: timedelta | Literal["auto"] | int
    save_timeout: timedelta
    keep_last: int
    keep_every: int | None
    keep_best: KeepBestFields | None
    on_unusable: Literal["stop", "start_over"]
    watch: str | None


class CommandTimingFields(TypedDict, total=False):
    schedule_to_start: timedelta
    schedule_to_start_per_node: timedelta
    start_to_close: timedelta


class KeepBestFields(TypedDict, total=False):
    metric: Required[str]
    mode: Literal["min", "max"]
    count: int


class LeaseTimingFields(TypedDict, total=False):
    heartbeat: timedelta
    timeout: timedelta
    schedule_to_start: timedelta
    heartbeat_per_node: timedelta
    outage: timedelta


class LimitsFields(TypedDict, total=False):
    active_deadline: timedelta | None
    queue_timeout: timedelta | None
    termination_grace_period: timedelta


class MatchFields(TypedDict, total=False):
    log: str | None
    exit_codes: list[int]
    signals: list[str]
    failures: list[
        Literal[
            "CANNOT_RUN",
            "COLLECTIVE_TIMEOUT",
            "COMMAND_LOST",
            "CORRUPTION",
            "CRASH",
            "DEVICE_FAULT",
            "DEVICE_OUT_OF_MEMORY",
            "EVICTED",
            "KILLED",
            "NETWORK",
            "NUMERIC",
            "OUT_OF_MEMORY",
            "PEER_LOST",
            "PREEMPTED",
            "RANK_HANG",
            "STORAGE",
            "USER_CODE",
        ]
    ]


class NetworkFields(TypedDict, total=False):
    store_ports: str | None


class NodeCountFields(TypedDict, total=False):
    min: Required[int]
    max: Required[int]
    auto: bool
    unit: int


class NotificationFields(TypedDict, total=False):
    when: list[Literal["incident", "completion", "stall", "budget"]]
    webhook: WebhookFields | None
    command: list[str] | None


class OutputsFields(TypedDict, total=False):
    logs: str | None
    archive: str | None


class ProcessTimingFields(TypedDict, total=False):
    stop_grace: timedelta
    presumed_gone: timedelta
    orphan_grace: timedelta
    log_max_bytes: int


class RayJobFields(TypedDict, total=False):
    runtime_env: Mapping[str, Any]
    rack_label: str


class RayRoleFields(TypedDict, total=False):
    resources: Mapping[str, float]
    labels: Mapping[str, str]


class ReadinessFields(TypedDict, total=False):
    port: Required[int]
    http: str | None


class RecoveryFields(TypedDict, total=False):
    on_capacity_loss: Literal["shrink", "wait", "fail"]
    replace_timeout: timedelta
    on_state_loss: Literal["wait", "older", "stop"]
    state_timeout: timedelta
    on_nan: Literal["report", "rollback", "stop"]
    report_spikes: bool
    on_hang: Literal["report", "restart", "replace"]
    on_straggler: Literal["report", "replace", "experiment"]
    warm_starts: bool


class RelaxFields(TypedDict, total=False):
    cpu: str | int | float | None
    memory: str | int | float | None
    after: timedelta


class RendezvousTimingFields(TypedDict, total=False):
    last_call: timedelta
    join_timeout: timedelta
    victim_grace: timedelta
    settle_per_node: timedelta
    enter_timeout: timedelta


class ResourcesFields(TypedDict, total=False):
    auto: bool
    cpu: str | int | float | None
    memory: str | int | float | None
    gpu: int
    gpu_type: str | None
    shm: str | int | float | None


class RetryFields(TypedDict, total=False):
    max_restarts: int
    window: timedelta
    same_loss: timedelta
    no_progress_limit: int
    fatal_exit_codes: list[int]
    rules: list[RetryRuleFields]


class RetryRuleFields(TypedDict, total=False):
    match: Required[MatchFields]
    action: Required[Literal["restart", "replace", "stop"]]
    reason: str


class RoleFields(TypedDict, total=False):
    nodes: Required[int | str | NodeCountFields]
    nproc_per_node: int | Literal["gpu", "auto"]
    scaling: ScalingFields
    command: Required[list[str]]
    env: Mapping[str, str]
    rendezvous: Literal["auto", "torchrun", "env"]
    ready: ReadinessFields | None
    depends_on: Mapping[str, Literal["completed", "ready"]]
    ends_job: bool | None
    on_failure: Literal["role", "job", "ignore"]
    restart_with: list[str]
    restart_on_scale: list[str]
    collocate: list[str]
    node_group: int
    python: str | None
    image: str | None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None
    image_pull_secrets: list[str]
    resources: Literal["auto"] | ResourcesFields
    ray: RayRoleFields
    ports: Mapping[str, int]
    tolerations: list[TolerationFields]
    topology: TopologyFields | None
    pod_template: Mapping[str, Any]


class ScalingFields(TypedDict, total=False):
    policy: Literal["max", "efficient", "deadline", "budget", "manual"]
    min_efficiency: float
    finish_by: str | None
    max_cost: float | None
    price: float | None
    max_gpu_hours: float | None
    steps: int | None
    batch: Literal["per-rank", "global"]
    settle: timedelta
    share: bool
    priority: float
    patience: timedelta
    memory_max: str | int | float | None
    relax: RelaxFields | None


class SignalTimingFields(TypedDict, total=False):
    transition_batch: timedelta


class StallTimingFields(TypedDict, total=False):
    after: timedelta
    steps: int
    pauses: int
    first_look: timedelta
    elsewhere: int
    first_step: timedelta | None
    first_steps: int
    first_step_least: timedelta


class StragglerTimingFields(TypedDict, total=False):
    restart_cost: timedelta
    between: timedelta


class TimingFields(TypedDict, total=False):
    lease: LeaseTimingFields
    signals: SignalTimingFields
    rendezvous: RendezvousTimingFields
    commands: CommandTimingFields
    processes: ProcessTimingFields
    stall: StallTimingFields
    stragglers: StragglerTimingFields
    owner_check: timedelta


class TolerationFields(TypedDict, total=False):
    key: str | None
    operator: Literal["Exists", "Equal"]
    value: str | None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None


class TopologyFields(TypedDict, total=False):
    preferred: str | None
    required: str | None


class VolumeFields(TypedDict, total=False):
    mount_path: Required[str]
    pvc: Required[str]
    read_only: bool


class WebhookFields(TypedDict, total=False):
    url: str | None
    url_secret: str | None
    format: Literal["json", "slack"]
    token: str | None
    signing_key: str | None


class WorkdirFields(TypedDict, total=False):
    path: Required[str]
    exclude: list[str]
    archive: WorkdirArchiveFields | None


class WorkdirArchiveFields(TypedDict, total=False):
    name: Required[str]
    parts: Required[int]
    digest: Required[str]


class JobFields(TypedDict, total=False):
    namespace: str
    labels: Mapping[str, str]
    backend: Literal["local", "kubernetes", "joined", "ray"]
    runtime: str | None
    preset: Literal["parameter-server"] | None
    queue: str | None
    priority_class: str | None
    workdir: WorkdirFields | None
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    volumes: list[VolumeFields]
    ray: RayJobFields
    network: NetworkFields
    recovery: RecoveryFields
    retry: RetryFields
    preflight: Literal["off", "quick", "full"]
    limits: LimitsFields
    outputs: OutputsFields
    notifications: Mapping[str, NotificationFields]
    checkpoint: CheckpointFields | None
    hold_on_failure: timedelta | None
    ttl_after_finished: timedelta | None
    timing: TimingFields
