"""Tests of the exporter to OpenTelemetry's collectors, against one that decodes its requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from perdure_training.events import EventEmitter, to_collector
from perdure_training.events.otlp import OtlpSettings
from tests.support.collector import Collector, attributes, collecting
from tests.support.ports import free_port
from tests.training.events.collected import run

SOON = timedelta(seconds=60)
"""The time after which a test gives up."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def variables(collector: Collector, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, **more}


def exporter(environment: dict[str, str]) -> Any:
    made = to_collector(environment, resource={"perdure.node": "trainer-0"})
    assert made is not None
    return made


def test_events_arrive_as_log_records_with_their_times_and_values(collector: Collector):
    environment = variables(
        collector,
        OTEL_EXPORTER_OTLP_HEADERS="Authorization=Bearer%20abc,x-tenant=nlp",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test,service.name=other",
        OTEL_SERVICE_NAME="training",
    )
    emitter = EventEmitter("mine", made := exporter(environment), rank=3, generation=7)
    with pytest.raises(ValueError, match="disk"), emitter.span("save", step=2**40, tries=[1, {"a": None}]) as span:
        raise ValueError("disk \ud800")
    emitter.instant("loss", time=1795464123.180702, loss=0.5, fine=True)
    assert made.flush(SOON)
    begin, end, loss = collector.records
    [headers] = collector.headers
    assert (headers["authorization"], headers["x-tenant"]) == ("Bearer abc", "nlp")
    resource = attributes(collector.requests[0].resource_logs[0].resource.attributes)
    assert resource["service.name"] == "training"
    assert (resource["deployment.environment"], resource["perdure.node"]) == ("test", "trainer-0")
    assert [record.event_name for record in collector.records] == ["mine.save", "mine.save", "mine.loss"]
    assert attributes(begin.attributes)["perdure.event.id"] == attributes(end.attributes)["perdure.event.id"] == span.id
    assert attributes(begin.attributes)["step"] == 2**40
    assert attributes(begin.attributes)["tries"] == [1, {"a": None}]
    assert (begin.severity_text, end.severity_text) == ("INFO", "ERROR")
    assert attributes(end.attributes)["error"] == "ValueError: disk ?"
    assert abs(loss.time_unix_nano - 1795464123180702000) < 1000
    found = attributes(loss.attributes)
    assert (found["loss"], found["fine"], found["perdure.rank"], found["perdure.generation"]) == (0.5, True, 3, 7)


def test_many_events_are_sent_in_several_requests(collector: Collector):
    emitter = EventEmitter("mine", made := exporter(variables(collector)))
    for number in range(300):
        emitter.instant("x", number=number, text="x" * 10_000)
    assert made.flush(SOON)
    assert [attributes(record.attributes)["number"] for record in collector.records] == list(range(300))
    assert len(collector.requests) >= 3


def test_secrets_are_replaced_before_they_are_sent(collector: Collector):
    environment = variables(collector, MY_TOKEN="swordfish-12")
    EventEmitter("mine", made := exporter(environment)).instant("x", text="401 for swordfish-12")
    assert made.flush(SOON)
    assert attributes(collector.records[0].attributes)["text"] == "401 for [redacted]"


def test_a_collector_that_answers_500_loses_events_that_are_counted_and_told_to_it_later(
    collector: Collector, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    emitter = EventEmitter("mine", made := exporter(variables(collector)))
    collector.status = 500
    emitter.instant("lost")
    assert made.flush(SOON)
    assert made.refused == 1
    collector.status = 200
    emitter.instant("kept")
    assert made.flush(SOON)
    made.close()
    kept, lost = collector.records
    assert (kept.event_name, lost.event_name) == ("mine.kept", "events.lost")
    assert attributes(lost.attributes)["refused"] == 1
    assert "it answered 500" in caplog.records[0].message


def test_a_busy_collector_is_sent_the_same_again(collector: Collector):
    emitter = EventEmitter("mine", made := exporter(variables(collector)))
    collector.status, collector.answer_headers = 503, {"Retry-After": "0"}
    collector.gate.clear()
    emitter.instant("kept")
    assert not made.flush(timedelta(0))
    collector.reached.wait()
    collector.gate.set()
    collector.status = 200
    assert made.flush(SOON)
    made.close()
    assert [record.event_name for record in collector.records] == ["mine.kept"]
    assert made.refused == 0


def test_what_a_collector_rejects_is_counted(collector: Collector):
    emitter = EventEmitter("mine", made := exporter(variables(collector)))
    collector.answer = {"partialSuccess": {"rejectedLogRecords": "2", "errorMessage": "too old"}}
    for _ in range(3):
        emitter.instant("x")
    assert made.flush(SOON)
    assert made.refused == 2


def test_a_redirect_is_not_followed_with_the_credential(collector: Collector):
    emitter = EventEmitter("mine", made := exporter(variables(collector)))
    collector.status, collector.answer_headers = 307, {"Location": "http://127.0.0.1:1/v1/logs"}
    emitter.instant("x")
    assert made.flush(SOON)
    assert made.refused == 1


def test_no_collector_loses_what_is_counted():
    made = exporter({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": f"http://u:swordfish@127.0.0.1:{free_port()}/v1/logs"})
    EventEmitter("mine", made).instant("x")
    assert made.flush(SOON)
    assert made.refused == 1


def test_a_rank_is_neither_slowed_nor_kept_by_a_collector_that_hangs(collector: Collector):
    script = """
from datetime import timedelta
from perdure_training.events import TrainerEvents
events = TrainerEvents()
for number in range(50_000):
    events.metrics(step=number)
[exporter] = __import__("perdure_training.events.process").events.process.own_place().exporters
print(exporter.dropped >= 50_000 - 16_384 - 2000, exporter.flush(timedelta(milliseconds=1)))
"""
    collector.gate.clear()
    output = run(
        script,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint,
        PERDURE_EVENTS="otlp",
        PERDURE_PROGRESS_DIR="/nonexistent/progress",
        PERDURE_RUN_ID="abc",
        RANK="0",
    )
    assert output == "True False\n"


def test_a_rank_may_have_a_file_and_a_collector(collector: Collector, tmp_path: Any):
    run(
        "from perdure_training.events import TrainerEvents; TrainerEvents().start()",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint,
        PERDURE_EVENTS="file,otlp",
        PERDURE_PROGRESS_DIR=str(tmp_path / "progress"),
        PERDURE_RUN_ID="abc",
        RANK="2",
    )
    assert (tmp_path / "events" / "local-rank-0.jsonl").read_text().count("start") == 1
    assert [attributes(record.attributes)["perdure.rank"] for record in collector.records] == [2]
    resource = attributes(collector.requests[0].resource_logs[0].resource.attributes)
    assert resource["perdure.job.uid"] == "abc"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_LOGS_EXPORTER": "none"},
    ],
)
def test_nothing_is_sent_unless_it_is_configured(environment: dict[str, str]):
    assert to_collector(environment) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "u:swordfish@x:4318"}, "LOGS_ENDPOINT: expected http:// or https://"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "LOGS_PROTOCOL: expected http/json, found 'grpc'"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "LOGS_TIMEOUT: expected milliseconds, found '10s'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(changes: dict[str, str], text: str, caplog: pytest.LogCaptureFixture):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", **changes}
    with pytest.raises(ValueError, match=text):
        OtlpSettings.from_environment(environment)
    assert to_collector(environment) is None
    assert text in caplog.records[0].message
