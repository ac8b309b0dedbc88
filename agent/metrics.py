"""The metrics of one node: `GET /metrics` on `agent.sock`, and on a port where the site opens one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from perdure.agent.checkpoint.keeper import CheckpointService
from perdure.agent.config import AgentConfig
from perdure.agent.datasets import Datasets
from perdure.agent.lease import Lease
from perdure.agent.machine_reports import machine_monitors
from perdure.agent.node import Node
from perdure.agent.outbox import Outbox
from perdure.agent.telemetry import Telemetry
from perdure.agent.torch_events import TorchEvents
from perdure.base.metrics.monitors import Reading
from perdure.base.metrics.samples import Sample
from perdure.base.metrics.series import CurrentSamples, job_labels, text_of
from perdure.contract.agents import FailureKind, Progress, RankStepTimes
from perdure.contract.names import job_of
from perdure.events import AsyncExporter
from perdure_training.node_api.bodies import DeviceUsage

_FRESH: Final = 1.0
"""Seconds for which a scrape gets the answer of the one before: the socket is open to the training code."""


class NodeMetrics:
    """Reads everything that is exported about a node. It only reads: no decision of the agent depends on it."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        node: Node,
        telemetry: Telemetry,
        lease: Lease,
        outboxes: Mapping[str, Outbox],
        checkpoints: CheckpointService,
        datasets: Datasets,
        events: Sequence[AsyncExporter],
        progress: Callable[[], Progress | None],
        stall: Callable[[], float],
        step_times: Callable[[], Sequence[RankStepTimes]],
    ) -> None:
        """Creates the object.

        Args:
            config: The agent's configuration.
            node: The node.
            telemetry: Has the launcher's newest figures.
            lease: The node's lease.
            outboxes: What has not been delivered, by destination.
            checkpoints: The node's checkpoints.
            datasets: The node's exchanges with datasets.
            events: Export the agent's events.
            progress: Returns the node's newest progress.
            stall: Returns the seconds for which saves have stopped the training.
            step_times: Returns how the steps of the ranks split.
        """
        self._node = node
        self._telemetry = telemetry
        self._lease = lease
        self._outboxes = outboxes
        self._checkpoints = checkpoints
        self._datasets = datasets
        self._events = events
        self._progress = progress
        self._stall = stall
        self._step_times = step_times
        self._readings = [Reading(monitor) for monitor in (*machine_monitors(config), TorchEvents(config.run_dir))]
        identity = config.node
        namespace, name = job_of(config.job_id)
        self._labels = {
            "job_namespace": namespace,
            "job_name": name,
            "role": identity.role,
            "node": str(identity.rank),
        }
        self._information = job_labels(config.labels)
        self._identity = {"uid": identity.uid, "incarnation": str(identity.incarnation), "host": config.host}
        self._newest = b""
        self._read_at = -math.inf

    async def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        now = asyncio.get_running_loop().time()
        if now - self._read_at >= _FRESH:
            self._read_at = now
            machine = await asyncio.gather(*(reading.samples() for reading in self._readings))
            samples = [*self._samples(), *(sample for group in machine for sample in group)]
            collector = CurrentSamples(lambda: samples, labels=self._labels, information=self._information)
            self._newest = text_of(collector)
        return self._newest

    def _samples(self) -> Iterator[Sample]:
        state = self._node.state
        yield Sample("perdure_node_info", 1, self._identity)
        yield Sample("perdure_node_generation", state.entered)
        if state.entered:
            yield Sample("perdure_node_ranks", state.processes or 1)
        stalled = state.stalled != 0 and state.stalled == state.generation
        yield Sample("perdure_node_stalled", float(stalled))
        yield Sample("perdure_node_lease_held", float(self._lease.held))
        yield from _known("perdure_node_lease_age_seconds", self._lease.age)
        yield Sample("perdure_node_leases_total", self._lease.taken)
        for destination, outbox in self._outboxes.items():
            yield Sample("perdure_node_outbox_messages", outbox.pending, {"destination": destination})
        for kind in FailureKind:
            # Also those that have not happened: Prometheus counts what grows.
            yield Sample("perdure_node_failures_total", self._node.events.failures[kind.value], {"kind": kind.value})
        yield Sample("perdure_node_rank_exits_total", self._node.events.rank_exits)
        yield Sample("perdure_node_wrong_claims_total", self._node.wrong_claims)
        for dataset, waiting in self._datasets.waiting().items():
            yield Sample("perdure_node_shard_requests", waiting, {"dataset": dataset})
        dropped, refused = sum(one.dropped for one in self._events), sum(one.refused for one in self._events)
        for reason, count in (("dropped", dropped), ("refused", refused)):
            yield Sample("perdure_events_lost_total", count, {"reason": reason})
        yield from self._training()
        yield from self._storing()
        yield from self._usage()

    def _training(self) -> Iterator[Sample]:
        progress = self._progress()
        if progress is not None:
            yield Sample("perdure_node_step", progress.step)
            yield from _known("perdure_node_total_steps", progress.total_steps)
            yield from _known("perdure_node_steps_per_second", progress.steps_per_second)
            yield from _known("perdure_node_loss", progress.loss)
            yield from _known("perdure_node_mfu_ratio", progress.mfu)
            if progress.last_step_at is not None:
                yield Sample("perdure_node_last_step_time_seconds", progress.last_step_at.timestamp())
        slowest = max(self._step_times(), key=lambda times: times.compute, default=None)
        if slowest is not None:
            yield Sample("perdure_node_step_compute_seconds", slowest.compute)
            yield Sample("perdure_node_step_wait_seconds", slowest.wait)
        yield Sample("perdure_node_checkpoint_stall_seconds_total", self._stall())

    def _storing(self) -> Iterator[Sample]:
        stored = self._checkpoints.newest
        if stored is not None:
            yield Sample("perdure_node_checkpoint_step", stored.step)
            yield Sample("perdure_node_checkpoint_time_seconds", stored.time)
            yield Sample("perdure_node_checkpoint_write_seconds", stored.took)
            yield Sample("perdure_node_checkpoint_bytes", stored.size)
        yield Sample("perdure_node_checkpoint_failures_total", self._checkpoints.failures)

    def _usage(self) -> Iterator[Sample]:
        usage = self._telemetry.newest_usage
        if usage is None:
            return
        yield from _known("perdure_node_cpu_cores", usage.cpu_cores)
        yield from _known("perdure_node_memory_bytes", usage.memory_bytes)
        yield from _known("perdure_node_memory_limit_bytes", usage.memory_limit_bytes)
        for device in usage.devices:
            yield from _of_device(device)


def _of_device(device: DeviceUsage) -> Iterable[Sample]:
    labels = {"gpu": str(device.index)}
    if device.name:
        yield Sample("perdure_gpu_info", 1, {**labels, "product": device.name})
    used = device.utilization_percent
    yield from _known("perdure_gpu_utilization_ratio", None if used is None else used / 100, labels)
    yield from _known("perdure_gpu_memory_used_bytes", device.memory_used_bytes, labels)
    yield from _known("perdure_gpu_memory_total_bytes", device.memory_total_bytes, labels)
    yield from _known("perdure_gpu_temperature_celsius", device.temperature_celsius, labels)


def _known(name: str, value: float | None, labels: Mapping[str, str] | None = None) -> Iterable[Sample]:
    return () if value is None else (Sample(name, value, labels or {}),)
