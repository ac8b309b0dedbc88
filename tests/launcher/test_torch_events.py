"""Tests that torch's own events of real torchruns arrive in the node's event file, with their times."""

from __future__ import annotations

import logging
import os
import signal
import time

import pytest

from perdure_launcher.rendezvous import torch_events
from perdure_training.events import AsyncExporter, EventEmitter
from perdure_training.node_api.layout import torchrun_events
from tests.launcher.nodes import EXITED, FINISHED, READY, TORCHRUN, Node, all_step, first_world, form_world, running
from tests.training.events.collected import Collected, lines

pytestmark = pytest.mark.timeout(400)
STATUS = "torchelastic.worker.status."


@pytest.mark.long("launchers")
@pytest.mark.usefixtures("ranks")
async def test_starts_rendezvous_and_ends_of_a_real_job_are_exported() -> None:
    # The level of the handler that the command names concerns that handler only.
    node = Node([*TORCHRUN, "--event-log-handler=console", "train.py"], env={"LOGLEVEL": "ERROR"})
    times = [time.time()]
    async with running(node):
        [ready] = await first_world([node])
        times.append(time.time())
        os.kill(node.ranks()[0], signal.SIGKILL)
        await node.agent.heard(READY, lambda body: body["after_generation"] == 1)
        times.append(time.time())
        await form_world([node], 2, port=ready.body["store_ports"][1])
        await all_step([node], 2)
        times.append(time.time())
        (node.run_directory / "stop").touch()
        await node.agent.heard(FINISHED, lambda body: body["generation"] == 2)
        await node.agent.complete_generation(2)
        await node.agent.heard(EXITED)
        times.append(time.time())
        found = lines(torchrun_events(node.run_directory))
        assert STATUS not in node.output
    assert {event["target"] for event in found} == {"torchelastic"}
    told = [event for event in found if event["name"].startswith(STATUS)]
    states = [(event["name"].removeprefix(STATUS), event["rank"], event["generation"]) for event in told]
    assert [state for state in states if state[0] in ("START", "SUCCEEDED")] == [
        ("START", 0, 1),
        ("START", 0, 2),
        ("SUCCEEDED", 0, 2),
        ("SUCCEEDED", None, 2),
    ]
    rendezvous = [event for event in told if event["name"] == f"{STATUS}RENDEZVOUS"]
    # Only newer releases of torch record it.
    assert [event["generation"] for event in rendezvous] in ([], [1, 2])
    assert all(event["attributes"]["duration_ms"] >= 0 for event in rendezvous)
    for name, generation, after, before in (("START", 1, 0, 1), ("START", 2, 2, 3), ("SUCCEEDED", 2, 3, 4)):
        [event] = [
            one for one in told if (one["name"], one["generation"], one["rank"]) == (STATUS + name, generation, 0)
        ]
        assert times[after] <= event["time"] <= times[before]
        assert (event["attributes"]["source"], event["attributes"]["local_rank"]) == ("WORKER", 0)
    metrics = [event for event in found if event["name"] == "metric"]
    assert any("_rendezvous" in event["attributes"]["metric"] for event in metrics)
    assert not any("_monitor" in event["attributes"]["metric"] for event in metrics)


@pytest.mark.parametrize("message", ["no JSON", "[]", "{}", '{"name": "x", "timestamp": "soon"}', "{" * 100_000])
def test_records_that_are_no_events_are_left_out(message: str) -> None:
    exporter = AsyncExporter(collected := Collected())
    handler = torch_events._EventHandler(EventEmitter("torchelastic", exporter))
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, message, None, None))
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, '{"name": "y", "timestamp": 1500}', None, None))
    exporter.close()
    assert [(event.name, event.time) for event in collected.events] == [("y", 1.5)]
