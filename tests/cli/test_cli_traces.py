"""Tests of traces: of a real job with a real collector, of histories, and of collectors that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.trace import SpanKind

from perdure.base.tracing import interceptors, is_configured
from perdure.base.tracing.interceptor import Traces, incident_ids
from perdure.base.tracing.provider import Tracing
from tests.histories.recorded import read, recorded_files
from tests.support.collector import Collector, attributes, collecting
from tests.support.command_line import STEPS, CommandLine
from tests.support.replays import replay
from tests.support.waiting import wait_for

SCRIPT = f"{STEPS}; if [ ! -e tried ]; then touch tried; kill -9 $$; fi; sleep 3"
"""Trains on for a while after its step, as programs do: an agent looks for first steps a few times a second."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def tracing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("MY_TOKEN", "swordfish-12")
    made = Tracing("test")
    yield made
    collector.gate.set()
    made.end()


def named(collector: Collector, trace: bytes) -> dict[str, tuple[str, Span]]:
    """The spans of a trace by their names, each with its service."""
    return {span.name: (of["service.name"], span) for of, span in collector.spans if span.trace_id == trace}


@pytest.mark.long("commands")
def test_a_submission_and_an_incident_are_one_trace_each(bare_command_line: CommandLine, collector: Collector):
    command_line = CommandLine(
        bare_command_line.folder,
        {
            **bare_command_line.environment,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    )
    done = command_line.run("run", "--name", "traced", "--", "sh", "-c", SCRIPT)
    assert done.code == 0, done

    def roots() -> list[tuple[dict[str, Any], Span]]:
        return [(of, span) for of, span in collector.spans if not span.parent_span_id]

    def incident() -> list[Span]:
        return [span for _, span in roots() if span.name.startswith("incident ")]

    wait_for(incident)
    [root] = incident()
    # The agent exports by itself, after the worker.
    wait_for(lambda: "first step" in named(collector, root.trace_id))
    about = attributes(root.attributes)
    assert (about["perdure.job"], about["perdure.incident"]) == ("default/traced", 1)
    assert about["perdure.role"] == "worker"
    ids = incident_ids("job/default/traced", f"{about['perdure.job.uid']}-1")
    assert (int.from_bytes(root.trace_id), int.from_bytes(root.span_id)) == (ids.trace, ids.span)
    found = named(collector, root.trace_id)
    assert {name: service for name, (service, _) in found.items()}.items() >= {
        (root.name, "perdure-worker"),
        ("notice", "perdure-worker"),
        ("signal_desire", "perdure-worker"),
        ("apply_desired", "perdure-agent"),
        ("fault", "perdure-agent"),
        ("rendezvous", "perdure-agent"),
        ("first step", "perdure-agent"),
    }
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for _, span in found.values())
    assert attributes(found["fault"][1].attributes)["signal"] == 9
    [(of, start)] = [(of, span) for of, span in roots() if span.name == "start TrainingJob"]
    assert of["service.name"] == "perdure-client"
    assert {"create_node", "check_job"} <= named(collector, start.trace_id).keys()
    # What neither an incident nor a user's request causes has no spans.
    assert {span.name for _, span in roots()} == {root.name, "start TrainingJob"}
    assert not {"hold_lease", "watch_nodes"} & {span.name for _, span in collector.spans}
    # Events went to the same collector.
    sent = {"job.incident", "agent.fault_detected"}
    wait_for(lambda: sent <= {record.event_name for record in collector.records})


@pytest.mark.parametrize("path", recorded_files()[-4:], ids=lambda path: path.name)
async def test_recorded_histories_replay_with_traces(path: Any, tracing: Tracing, collector: Collector):
    await replay(read(path), interceptors=[Traces(tracing)])
    tracing.end()
    assert collector.spans == []


def test_a_collector_that_hangs_slows_neither_spans_nor_the_end(tracing: Tracing, collector: Collector):
    collector.gate.clear()
    ids, now = incident_ids("job/default/a", "1-1"), datetime.now(UTC)
    for number in range(10_000):
        tracing.first("incident", ids, now, now + timedelta(seconds=1), {"number": number}, "")
    tracing.end()
    assert collector.spans == []


def test_a_collector_that_refuses_loses_what_is_counted(
    tracing: Tracing, collector: Collector, caplog: pytest.LogCaptureFixture
):
    collector.status = 400
    now = datetime.now(UTC)
    tracing.first("incident", incident_ids("job/default/a", "1-1"), now, now, {}, "")
    tracing.end()
    assert tracing.lost == 1
    assert [record.message for record in caplog.records] == [
        "traces are being lost: the collector does not accept them"
    ]


def test_secrets_are_replaced(tracing: Tracing, collector: Collector):
    now = datetime.now(UTC)
    tracing.first("x", incident_ids("a", "1"), now, now, {"title": "401 for swordfish-12"}, "password=swordfish")
    with pytest.raises(ValueError, match="swordfish"), tracing.span("y", {}, kind=SpanKind.CLIENT):
        raise ValueError("swordfish-12")
    tracing.end()
    assert len(collector.spans) == 2
    assert "swordfish" not in str(collector.requests)


@pytest.mark.parametrize(
    "changes",
    [{"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}],
    ids=lambda changes: next(iter(changes)),
)
def test_traces_are_off_unless_they_are_configured(changes: dict[str, str]):
    assert not is_configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", **changes})


def test_nothing_is_imported_while_traces_are_off():
    script = """
import sys
import perdure.worker, agent.process
from perdure.base.tracing import interceptors
print(interceptors("agent"), [name for name in sys.modules if name.startswith("opentelemetry")])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[] []\n", done.stderr
    assert interceptors("test") == []
