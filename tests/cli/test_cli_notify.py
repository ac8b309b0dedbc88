"""Tests of `perdure notify`, and of what `perdure status` shows of notifications, with a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.receiver import Receiver, answers, receiving_in_thread
from tests.support.waiting import wait_for


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving_in_thread() as receiver:
        yield receiver


def job_file(folder: Path, name: str, **urls: str) -> Path:
    file = folder / "job.yaml"
    targets = {target: {"webhook": {"url": url}} for target, url in urls.items()}
    roles = {"worker": {"nodes": 1, "command": ["true"]}}
    file.write_text(json.dumps({"name": name, "notifications": targets, "roles": roles}))
    return file


def test_a_sample_is_sent_to_all_and_a_receiver_that_refuses_is_named(
    command_line: CommandLine, receiver: Receiver, tmp_path: Path, job_name: str
):
    receiver.behaviors["/refuses"] = [answers(401)]
    file = job_file(tmp_path, job_name, good=receiver.url("/good"), refuses=receiver.url("/refuses"))
    done = command_line.run("notify", str(file))
    assert done.code == 3
    assert "good  delivered" in done.out
    assert "refuses  failed  127.0.0.1 answered 401" in done.out
    [sample] = receiver.accepted("/good")
    assert (sample.body["test"], sample.body["job"]["name"]) == (True, job_name)


def test_a_job_without_notifications_has_no_sample(command_line: CommandLine, tmp_path: Path, job_name: str):
    done = command_line.run("notify", str(job_file(tmp_path, job_name)))
    assert done.code == 2
    assert "has no notifications" in done.err


def test_status_shows_what_was_delivered_and_why_not(
    command_line: CommandLine, receiver: Receiver, tmp_path: Path, job_name: str
):
    receiver.behaviors["/refuses"] = [answers(410)]
    file = job_file(tmp_path, job_name, good=receiver.url("/good"), refuses=receiver.url("/refuses"))
    assert command_line.run("submit", str(file), "--wait").code == 0

    def delivered() -> str:
        text = command_line.run("status", job_name).out
        return text if "1 delivered" in text and "1 given up" in text else ""

    text = wait_for(delivered, within=60)
    assert "good: 1 delivered" in text
    assert "refuses: 1 given up; 127.0.0.1 answered 410" in text
