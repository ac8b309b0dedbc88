"""Tests of the lines of the control plane's logs: what they contain, where they come from, and what they hide."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from temporalio import activity
from temporalio.testing import ActivityEnvironment

from perdure.base.log_format import LogFormat, configured_format, formatter_of


def line(formatter: logging.Formatter, message: str, *arguments: object, **fields: Any) -> str:
    error = fields.pop("error", None)
    record = logging.LogRecord("perdure.test", logging.WARNING, "x.py", 1, message, arguments, error)
    vars(record).update(fields)
    return formatter.format(record)


def failure(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_a_line_is_one_json_object_whatever_its_message_contains():
    text = line(formatter_of(LogFormat.JSON), "a\nb \x1b[2J \ud800 %s", "é")
    assert text.isascii()
    assert text.isprintable()
    found = json.loads(text)
    assert found["message"] == "a\nb \x1b[2J \ud800 é"
    assert (found["level"], found["logger"]) == ("WARNING", "perdure.test")
    assert found["time"].endswith("+00:00")


def test_a_line_names_where_it_happened():
    formatter = formatter_of(LogFormat.JSON, context=lambda: {"job": "nlp/a", "generation": 3})
    found = json.loads(line(formatter, "x", rank=5, incident=2, generation=4))
    assert {name: found[name] for name in ("job", "generation", "rank", "incident")} == {
        "job": "nlp/a",
        "generation": 4,
        "rank": 5,
        "incident": 2,
    }
    assert "node" not in found


def test_places_that_cannot_be_found_cost_no_line():
    def fail() -> dict[str, Any]:
        raise RuntimeError("not yet")

    assert json.loads(line(formatter_of(LogFormat.JSON, context=fail), "x"))["message"] == "x"


async def test_an_activity_s_line_names_its_job():
    environment = ActivityEnvironment()
    environment.info = environment.default_info()
    formatter = formatter_of(LogFormat.JSON)

    @activity.defn
    async def log() -> str:
        return line(formatter, "x")

    found = json.loads(await environment.run(log))
    assert "job" not in found
    environment.info = type(environment.info)(
        **dict[str, Any](vars(environment.info), workflow_id="job/nlp/a/0a1b2c3d/worker/0")
    )
    assert json.loads(await environment.run(log))["job"] == "nlp/a"


@pytest.mark.parametrize("format", LogFormat)
def test_a_secret_in_an_exception_is_replaced(format: LogFormat, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", "swordfish-12")
    text = line(formatter_of(format), "failed: %s", "password=hunter2", error=failure("401 for swordfish-12"))
    assert "swordfish" not in text
    assert "hunter2" not in text
    assert text.count("[redacted]") == 2
    assert "ValueError" in text


def test_long_messages_are_cut_off():
    text = line(formatter_of(LogFormat.JSON), "x" * 10_000_000)
    assert len(text) < 40_000
    assert json.loads(text)["message"].endswith("…")


@pytest.mark.parametrize(("value", "format"), [("json", "json"), (" JSON ", "json"), ("", "text"), ("xml", "text")])
def test_the_environment_names_the_format(value: str, format: str):
    assert configured_format({"PERDURE_LOG_FORMAT": value}) == format
    assert configured_format({}) is LogFormat.TEXT
