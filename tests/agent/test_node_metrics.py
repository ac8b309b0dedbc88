"""Tests of the metrics of a node, as a real agent process exports them."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure.agent.config import AgentConfig
from perdure.agent.machine_reports import machine_reports
from perdure.agent.progress import SaveStalls
from perdure.base.metrics.endpoint import serving_metrics
from perdure.base.metrics.table import AGENT_METRICS, BOTH
from perdure.contract import NodeCredentials
from perdure.events import AsyncExporter, FileExporter
from perdure_training.node_api.progress_file import (
    REPORTED,
    OwnStepTimes,
    ProgressFile,
    RankProgress,
    SaveStall,
    StepTimes,
    progress_path,
    read_progress,
)
from tests.agent.harness import RunningAgent, Workflows, rank_exit, running_agent
from tests.support.temporal_server import DevServer, free_port
from tests.support.waiting import eventually

SECRET = "hunter2"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: sockets live in it."""
    return tmp_path_factory.mktemp("n")


async def scrape(agent: RunningAgent, port: int | None = None) -> tuple[str, dict[tuple[str, ...], float]]:
    """The text, and the values by name and the metric's own labels."""
    connector = aiohttp.UnixConnector(str(agent.run_dir / "agent.sock")) if port is None else None
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"http://127.0.0.1:{port or 80}/metrics") as answer,
    ):
        assert answer.status == 200
        text = await answer.text()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = dict(one.labels)
            namespace, name, role, node = (labels.pop(key) for key in ("job_namespace", "job_name", "role", "node"))
            assert (f"job/{namespace}/{name}", role, node) == (agent.config.job_id, "worker", "0")
            found[(one.name, *labels.values())] = one.value
    return text, found


async def test_a_node_exports_its_training_its_lease_and_its_machine(
    temporal_server: DevServer, workflows: Workflows, folder: Path
) -> None:
    port = free_port()
    labels = {"cost-center": "4711"}
    async with running_agent(temporal_server, workflows, folder, labels=labels, metrics_port=port) as agent:
        await workflows.expect(workflows.group, "joined")
        await agent.launcher_hello()
        await agent.handler_hello()
        await agent.ready(0)
        await agent.desire(world=agent.world(1))
        await agent.enter(1)
        path = progress_path(agent.run_dir / "progress", 0)
        writer = ProgressFile(path, generation=1, pid=4712, source=REPORTED)
        writer.write(40, time=time.time(), total=1000, loss=0.5, mfu=0.4)
        environment = {"PERDURE_PROGRESS_DIR": str(path.parent), "RANK": "0", "PERDURE_GENERATION": "1"}
        SaveStall(environment).add(2.5)
        OwnStepTimes(environment).write(StepTimes(0.2, 0.1, 0.01, readings=1))
        await workflows.expect(workflows.group, "stepping")
        device = {"index": 0, "name": "NVIDIA H100", "utilization_percent": 97.0, "temperature_celsius": 61.0}
        await agent.post("/v1/launcher/usage", cpu_cores=1.5, memory_bytes=1000, devices=[device])

        async def stepped() -> bool:
            return ("perdure_node_step",) in (await scrape(agent))[1]

        await eventually(stepped)
        text, found = await scrape(agent)
        assert found[("perdure_node_step",)] == 40
        assert found[("perdure_node_total_steps",)] == 1000
        assert found[("perdure_node_loss",)] == 0.5
        assert found[("perdure_node_mfu_ratio",)] == 0.4
        assert found[("perdure_node_generation",)] == 1
        assert found[("perdure_node_checkpoint_stall_seconds_total",)] == 2.5
        assert found[("perdure_node_step_compute_seconds",)] == 0.2
        assert found[("perdure_node_step_wait_seconds",)] == 0.1
        assert found[("perdure_node_lease_held",)] == 0
        assert found[("perdure_node_cpu_cores",)] == 1.5
        assert found["perdure_gpu_utilization_ratio", "0"] == 0.97
        assert found[("perdure_host_memory_total_bytes",)] > 0
        assert 'label_cost_center="4711"' in text
        known = {metric.name for metric in (*AGENT_METRICS, *BOTH)}
        assert {name for name, *_ in found} <= known

        failed = rank_exit(error=f"RuntimeError: password={SECRET}")
        await agent.ready(1, [failed])
        await workflows.expect(workflows.job, "failure")

        async def counted() -> bool:
            return (await scrape(agent, port))[1].get(("perdure_node_failures_total", "RANKS")) == 1

        await eventually(counted)
        text, found = await scrape(agent, port)
        assert found[("perdure_node_rank_exits_total",)] == 1
        assert SECRET not in text
        assert agent.node.token not in text


async def test_a_port_that_is_taken_does_not_end_the_agent(
    temporal_server: DevServer, workflows: Workflows, folder: Path
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        async with running_agent(temporal_server, workflows, folder, metrics_port=port) as agent:
            await workflows.expect(workflows.group, "joined")
            assert (await scrape(agent))[1][("perdure_node_lease_held",)] == 0


def test_the_stall_of_saves_grows_over_processes_and_survives_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    environment = {"PERDURE_PROGRESS_DIR": str(tmp_path), "RANK": "0", "PERDURE_GENERATION": "1"}
    stalls = SaveStalls()

    def process(pid: int, *seconds: float) -> None:
        ProgressFile(path, generation=1, pid=pid, source=REPORTED)
        stall = SaveStall(environment)
        for one in seconds:
            stall.add(one)
        read = read_progress(path)
        assert read
        stalls.follow([read])
        stalls.follow([read])

    process(1, 1.0, 2.0)
    assert stalls.most == 3.0
    process(2, 0.5)
    assert stalls.most == 3.5
    other = RankProgress(source=0, generation=1, pid=9, step=1, total=None, loss=None, time=0.0, save_stall=9.0)
    read = read_progress(path)
    assert read
    stalls.follow([read, other])
    assert stalls.most == 9.0
    with path.open("r+b") as file:
        file.seek(56)
        file.write(b"\xff" * 8)
    broken = read_progress(path)
    assert broken
    assert broken.save_stall == 0.0


def test_a_process_outside_of_a_job_keeps_no_stall() -> None:
    SaveStall({}).add(1.0)
    SaveStall({"PERDURE_PROGRESS_DIR": "/nonexistent", "RANK": "0"}).add(1.0)


async def test_what_endpoints_on_the_machine_tell_is_on_the_bus_beside_its_own_figures(folder: Path) -> None:
    async def dcgm() -> bytes:
        return b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 61\ngo_goroutines 12\n'

    exporter = AsyncExporter(FileExporter(folder / "metrics.jsonl"))
    async with serving_metrics(dcgm, 0) as port:
        config = AgentConfig(
            node=NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t"),
            job_id="job/default/a",
            job_first_run_id="run",
            group_id="group",
            task_queue="queue",
            address="127.0.0.1",
            nodes="1",
            run_dir=folder,
            monitors=(f"http://127.0.0.1:{port}/metrics#DCGM_FI_DEV_",),
        )
        await machine_reports(config, exporter, interval=timedelta(minutes=1)).emit()
    exporter.close()
    event = json.loads((folder / "metrics.jsonl").read_text())
    assert (event["target"], event["name"]) == ("agent", "metrics")
    assert event["attributes"]['DCGM_FI_DEV_GPU_TEMP{gpu="0"}'] == 61
    assert event["attributes"]["perdure_host_memory_total_bytes"] > 0
    assert "go_goroutines" not in event["attributes"]
