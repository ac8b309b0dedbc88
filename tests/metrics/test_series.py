"""Tests that metrics stay bounded and readable, whatever labels and values are given."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.base.metrics.samples import Sample
from perdure.base.metrics.series import LONGEST_VALUE, CurrentSamples, Series, clean, job_labels, merge, text_of
from perdure.base.metrics.table import BOTH, LABELS, METRICS, NODE_LABELS, WORKER_METRICS, Kind
from tests.support.exported import values

ROOT = Path(__file__).resolve().parents[2]
ROLE = {"job_namespace": "nlp", "job_name": "llama", "role": "trainer"}
ALL = (*WORKER_METRICS, *BOTH)
NOW = timedelta()


def read(*collectors: Series | CurrentSamples) -> dict[tuple[str, ...], float]:
    """The values by the name and the label values, as Prometheus reads them."""
    return values(text_of(*collectors))


def test_counters_gauges_and_histograms_are_read_back() -> None:
    series = Series(ALL, zero_for=NOW)
    for _ in range(2):
        series.count("perdure_job_restarts_total", **ROLE, cause="NODE_LOST")
    series.set("perdure_job_generation", 3, **ROLE)
    for seconds in (0.3, 40.0, 10_000.0):
        series.observe("perdure_job_repair_seconds", seconds, cause="KILLED")
    found = read(series)
    assert found["perdure_job_restarts_total", "nlp", "llama", "trainer", "NODE_LOST"] == 2
    assert found["perdure_job_generation", "nlp", "llama", "trainer"] == 3
    assert found["perdure_job_repair_seconds_count", "KILLED"] == 3
    assert found["perdure_job_repair_seconds_sum", "KILLED"] == pytest.approx(10_040.3)
    assert found["perdure_job_repair_seconds_bucket", "KILLED", "0.5"] == 1
    assert found["perdure_job_repair_seconds_bucket", "KILLED", "60"] == 2
    assert found["perdure_job_repair_seconds_bucket", "KILLED", "3600"] == 2
    assert found["perdure_job_repair_seconds_bucket", "KILLED", "+Inf"] == 3


def test_a_new_counter_is_0_at_first_so_that_prometheus_counts_its_first_increment() -> None:
    now = [100.0]
    series = Series(ALL, zero_for=timedelta(seconds=35), clock=lambda: now[0])
    series.count("perdure_jobs_ended_total", job_namespace="nlp", phase="FAILED")
    series.observe("perdure_job_repair_seconds", 2.0, cause="KILLED")
    now[0] += 1000

    def exported() -> list[float]:
        found = read(series)
        names = (
            ("perdure_jobs_ended_total", "nlp", "FAILED"),
            ("perdure_job_repair_seconds_count", "KILLED"),
            ("perdure_job_repair_seconds_sum", "KILLED"),
            ("perdure_job_repair_seconds_bucket", "KILLED", "+Inf"),
        )
        return [found[name] for name in names]

    assert exported() == [0, 0, 0, 0]
    now[0] += 34
    assert exported() == [0, 0, 0, 0]
    now[0] += 1
    assert exported() == [1, 1, 2, 1]
    series.count("perdure_jobs_ended_total", job_namespace="nlp", phase="FAILED")
    assert exported()[0] == 2


def test_label_values_without_bound_make_no_series_without_bound() -> None:
    series = Series(ALL, most=50, zero_for=NOW)
    for number in range(10_000):
        series.count("perdure_job_restarts_total", job_namespace="n", job_name=f"job-{number}", cause="KILLED")
        series.set("perdure_job_generation", 1, job_namespace="n", job_name=f"job-{number}")
    found = read(series)
    restarts = {key: value for key, value in found.items() if key[0] == "perdure_job_restarts_total"}
    assert len(restarts) == 51
    assert sum(restarts.values()) == 10_000
    assert restarts["perdure_job_restarts_total", "other", "other", "other", "KILLED"] == 9_950
    assert sum(key[0] == "perdure_job_generation" for key in found) == 50
    assert found["perdure_metrics_overflow_total", "perdure_job_restarts_total"] == 9_950
    assert found["perdure_metrics_overflow_total", "perdure_job_generation"] == 9_950


def test_samples_without_bound_are_cut_off_and_counted() -> None:
    samples = [Sample("perdure_node_shard_requests", 1, {"dataset": f"d{number}"}) for number in range(1_000)]
    collector = CurrentSamples(lambda: samples, labels=dict.fromkeys(NODE_LABELS, "x"), most=10)
    found = read(collector)
    assert sum(key[0] == "perdure_node_shard_requests" for key in found) == 10
    assert found["perdure_metrics_overflow_total", "perdure_node_shard_requests", *"xxxx"] == 990


@pytest.mark.parametrize(
    "value",
    [
        "x" * 100_000,
        'quote " and \\ backslash',
        "line\nbreak",
        "\x1b[31mred\x07",
        "\ud800 half a letter",
        "höhe 日本",
        "",
    ],
)
def test_no_label_value_breaks_the_text(value: str) -> None:
    series = Series(ALL, zero_for=NOW)
    series.set("perdure_job_generation", 7, job_namespace="n", job_name=value)
    [(_, _, name, _)] = [key for key in read(series) if key[0] == "perdure_job_generation"]
    assert name == clean(value)
    assert len(name) <= LONGEST_VALUE
    assert all(letter.isprintable() for letter in name)


def test_a_clock_that_was_set_back_makes_no_negative_duration_and_no_falling_counter() -> None:
    series = Series(ALL, zero_for=NOW)
    series.observe("perdure_job_notice_seconds", -3600.0, cause="KILLED")
    series.count("perdure_listing_failures_total", 2)
    series.count("perdure_listing_failures_total", -1)
    found = read(series)
    assert found["perdure_job_notice_seconds_sum", "KILLED"] == 0
    assert found["perdure_job_notice_seconds_count", "KILLED"] == 1
    assert found[("perdure_listing_failures_total",)] == 2


def test_a_jobs_series_are_removed_and_others_stay() -> None:
    series = Series(ALL, zero_for=NOW)
    for name in ("a", "b"):
        series.count("perdure_job_restarts_total", job_namespace="n", job_name=name, cause="KILLED")
    series.observe("perdure_job_repair_seconds", 1, cause="KILLED")
    series.remove(job_namespace="n", job_name="a")
    found = read(series)
    assert ("perdure_job_restarts_total", "n", "a", "", "KILLED") not in found
    assert found["perdure_job_restarts_total", "n", "b", "", "KILLED"] == 1
    assert found["perdure_job_repair_seconds_count", "KILLED"] == 1


def test_the_labels_of_a_job_are_valid_and_few() -> None:
    labels = job_labels({"cost-center": "4711", "cost.center": "9", "team": "a" * 500})
    assert labels["label_cost_center"] == "4711"
    assert len(labels["label_team"]) == LONGEST_VALUE
    assert len(job_labels({f"l{number}": "x" for number in range(1_000)})) == 20


def test_merged_texts_describe_each_metric_once_and_have_each_series_once() -> None:
    texts = [
        text_of(CurrentSamples(lambda: [Sample("perdure_node_step", 5)], labels=dict.fromkeys(NODE_LABELS, node)))
        for node in "aab"
    ]
    merged = merge(texts).decode()
    assert merged.count("# TYPE perdure_node_step gauge") == 1
    assert len(re.findall(r"^perdure_node_step\{", merged, re.MULTILINE)) == 2


def test_the_table_follows_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"perdure_[a-z0-9_]+", name)
        assert (metric.kind is Kind.COUNTER) == name.endswith("_total"), name
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets), name
        assert set(metric.all_labels) <= LABELS.keys(), name


def test_what_the_table_tells_is_exported_somewhere() -> None:
    agent = ("agent/metrics.py", "agent/torch_events.py")
    sources = ("activities/job_metrics.py", "perdure/worker.py", *agent, "perdure/base/metrics")
    paths = [path for source in sources for path in ROOT.glob(source if source.endswith(".py") else f"{source}/*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in paths if path.name != "table.py")
    assert [name for name in METRICS if f'"{name}"' not in text] == []
