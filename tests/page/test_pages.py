"""Tests of what pages show of jobs, and of what their buttons do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import aiohttp
import pytest

from perdure.cli import text
from perdure.cli.explain import explanation
from perdure.contract import CheckpointView, DatasetView, ScalingView
from perdure.contract.notifications import TargetReport
from perdure.page import looks, server
from perdure.page.render import Parts, spec_text
from tests.page.conftest import Visitor
from tests.page.played import HOSTILE, PlayedClient, PlayedJob, failed, interrupted
from tests.support.waiting import DEADLINE, eventually

JOB = "/jobs/default/llama/"


async def stream(visitor: Visitor, path: str) -> AsyncGenerator[Any]:
    """The events of a stream."""
    async with asyncio.timeout(DEADLINE), visitor.session.get(visitor.url(path)) as answer:
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def events(visitor: Visitor, path: str, count: int = 1) -> list[Any]:
    """The first events of a stream."""
    found: list[Any] = []
    async with aclosing(stream(visitor, path)) as coming:
        async for event in coming:
            found.append(event)
            if len(found) == count:
                break
    return found


async def problem(visitor: Visitor, path: str, *, names: str) -> None:
    """Waits until a page shows a problem."""
    async with aclosing(stream(visitor, path)) as coming:
        async for event in coming:
            if names in event["parts"].get("problem", "nothing"):
                return


async def test_the_list_has_all_jobs_with_phase_step_and_incident(visitor: Visitor) -> None:
    page = await visitor.get("/")
    assert '<a href="jobs/default/llama/" class="clamp">llama</a>' in page
    assert "RUNNING" in page
    assert "2 jobs, 2 open" in page
    assert "#1 node 1: rank 1 SIGKILL" in page
    assert re.search(r"step 1\d\d/1,000 1\d%", page)


async def test_the_page_of_a_job_tells_what_status_and_explain_tell(visitor: Visitor, client: PlayedClient) -> None:
    page = await visitor.get(JOB)
    played = client.jobs["default", "llama"]
    (incident,) = played.incidents
    story = explanation(incident, job="llama", flag="").plain
    for line in story.splitlines()[1:]:
        assert line in unescape(page)
    assert text.incident_line(incident) in page
    assert "rendezvous protected" in page
    assert "http://127.0.0.1:8233/namespaces/default/workflows/job%2Fdefault%2Fllama" in page
    assert "generation 1: 4 nodes" in page
    assert "generation 2: 4 nodes" in page
    assert 'aria-label="node 1 (gpu-1), stepping' in page
    assert "train.py" in page


async def test_changes_arrive_as_events_and_nothing_else_does(visitor: Visitor, client: PlayedClient) -> None:
    async with aclosing(stream(visitor, f"{JOB}events")) as coming:
        assert list((await anext(coming))["lists"]["incidents"]["order"]) == ["incident-1"]
        second = await anext(coming)
        assert "headline" in second["parts"], "the step has changed"
        assert "incidents" not in second["lists"]
        client.jobs["default", "llama"].scenario.rank_killed(0)
        async for event in coming:
            if incidents := event["lists"].get("incidents"):
                assert incidents["order"] == ["incident-2", "incident-1"]
                assert list(incidents["items"]) == ["incident-2"]
                break


async def test_what_happens_is_shown_at_once_however_rarely_a_page_looks(
    visitor: Visitor, client: PlayedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_INTERVAL", timedelta(minutes=1))
    async with aclosing(stream(visitor, f"{JOB}events")) as coming:
        await anext(coming)
        client.jobs["default", "llama"].scenario.rank_killed(0)
        await client.tell()
        async for event in coming:
            if "incident-2" in event["lists"].get("incidents", {}).get("order", []):
                break


async def test_an_incident_does_not_wait_for_the_nodes_of_a_busy_job(visitor: Visitor, client: PlayedClient) -> None:
    job = client.jobs["default", "llama"]
    async with aclosing(stream(visitor, f"{JOB}events")) as coming:
        await anext(coming)
        client.answers_nodes.clear()
        job.scenario.lost(1)
        await client.tell()
        async for event in coming:
            assert "created" not in event["parts"].get("nodes", "")
            if "incident-2" in event["lists"].get("incidents", {}).get("order", []):
                break
        job.scenario.ready(1).steps()
        client.answers_nodes.set()
        async for event in coming:
            if ">1.2</th>" in event["parts"].get("nodes", "").replace("\n", ""):
                break


async def test_between_events_a_job_is_not_asked(
    visitor: Visitor, client: PlayedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_FULLY", timedelta(hours=1))
    await events(visitor, f"{JOB}events")

    async def rests() -> bool:
        asked, refreshed = client.asked, client.refreshed_nodes
        await eventually(lambda: client.refreshed_nodes >= refreshed + 3)
        return client.asked == asked

    # It begins to listen beside its first looks.
    await eventually(rests)


async def test_a_failed_job_has_its_reason_in_the_list_and_is_asked_once(
    visitor: Visitor, client: PlayedClient
) -> None:
    ended = PlayedJob(failed(), name="bert")
    ended.fields = {"finished_at": datetime.now(UTC), "phase": "FAILED"}
    client.jobs["default", "bert"] = ended
    failure = text.incident_line(ended.incidents[-1])
    found = ""
    async with aclosing(stream(visitor, "/events")) as coming:
        async for event in coming:
            found = event["lists"].get("jobs", {}).get("items", {}).get("job/default/bert", found)
            if "#1" in found:
                break
    assert failure[:20] in unescape(found)
    del client.jobs["default", "llama"], client.jobs["default", "gpt"]
    await eventually(lambda count=client.listed: client.listed >= count + 2)
    asked = client.asked
    await eventually(lambda count=client.listed: client.listed >= count + 5)
    assert client.asked == asked


async def test_the_page_has_data_checkpoints_and_cost(visitor: Visitor, client: PlayedClient) -> None:
    job = client.jobs["default", "llama"]
    job.data = {"corpus<b>": DatasetView(done=1200, leased=64, total=10_000, set_aside_samples=3)}
    committed = datetime.now(UTC) - timedelta(minutes=4)
    job.fields = {
        "checkpoint": CheckpointView(url="s3://ckpt/llama", folder="step-100", step=100, committed_at=committed),
        "scaling": ScalingView(fewest=2, largest=4, global_batch=False, min_efficiency=0.7, price=2.5),
    }
    page = await visitor.get(JOB)
    assert "1,200 of 10,000 samples" in page
    assert "corpus&lt;b&gt;" in page
    assert "step 100 durable, 4m" in page
    assert "s3://ckpt/llama/step-100" in page
    assert re.search(r"0\.\d\d node-hours of training, 0\.\d\d at 2\.5 for each", page)


async def test_the_page_tells_whom_a_job_has_notified_and_what_failed(visitor: Visitor, client: PlayedClient) -> None:
    job = client.jobs["default", "llama"]
    job.fields = {"notifies": ("slack", "pager")}
    job.told = (TargetReport(name="slack", sent=3), TargetReport(name="pager", waiting=2, last_error=f"500 {HOSTILE}"))
    page = await visitor.get(JOB)
    assert "slack: 3 delivered" in page
    assert "pager: 2 waiting; 500 &lt;img" in page


def test_the_specification_is_shown_without_secrets() -> None:
    worker = {"command": ["python", "t.py", "--token", "hunter2"], "env": {"HF_TOKEN": "hunter2"}}
    shown = spec_text({"name": "a", "roles": {"worker": worker}})
    assert "hunter2" not in shown
    assert "HF_TOKEN: '[redacted]'" in shown


def test_a_page_is_sent_only_what_it_does_not_show() -> None:
    before = Parts({"a": "1", "b": "2"}, {"jobs": {"x": "1", "y": "2"}})
    after = Parts({"a": "1", "b": "3"}, {"jobs": {"y": "2", "z": "4"}})
    assert after.since(before) == {
        "parts": {"b": "3"},
        "lists": {"jobs": {"items": {"z": "4"}, "order": ["y", "z"]}},
    }
    assert after.since(after) == {"parts": {}, "lists": {}}
    assert after.since(None)["lists"]["jobs"]["items"] == {"y": "2", "z": "4"}


@pytest.mark.parametrize(("path", "shown"), [("/events", "jobs"), (f"{JOB}events", "incidents")])
async def test_a_server_that_is_away_hides_nothing(
    visitor: Visitor, client: PlayedClient, path: str, shown: str
) -> None:
    await events(visitor, path)
    client.away = True
    await problem(visitor, path, names="does not answer")
    (event,) = await events(visitor, path)
    assert event["lists"][shown]["items"]
    client.away = False
    async with aclosing(stream(visitor, path)) as coming:
        async for event in coming:
            if event["parts"].get("problem") == "":
                break


async def test_an_unknown_job_is_not_found(visitor: Visitor) -> None:
    await visitor.get("/jobs/default/none/events", status=404)
    page = await visitor.get("/jobs/default/none/", status=404)
    assert "no job named &#34;none&#34;" in page


async def test_a_button_shows_the_command_s_plan_and_then_does_it(visitor: Visitor, client: PlayedClient) -> None:
    path = f"{JOB}change/scale"
    assert "Nothing was changed" not in await visitor.get(path), "it needs a number first"
    page = await visitor.get(f"{path}?nodes=3&reason=more+room")
    status = client.jobs["default", "llama"].status
    assert text.plan("scale to 3 nodes", status) in page
    assert client.changed == []
    form = await visitor.hidden(f"{path}?nodes=3&reason=more+room")
    assert "llama will scale" in await visitor.post(path, form)
    assert client.changed == [("scale", "llama", {"nodes": "3", "reason": "more room"})]


async def test_each_button_makes_the_change_of_its_name(visitor: Visitor, client: PlayedClient) -> None:
    for name, query in (
        ("restart", ""),
        ("relaunch", "?node=1"),
        ("checkpoint", ""),
        ("suspend", ""),
        ("resume", ""),
        ("cancel", "?reason=wrong+data"),
    ):
        path = f"{JOB}change/{name}"
        await visitor.post(path, await visitor.hidden(path + query))
    assert [change[0] for change in client.changed] == [
        *("restart", "relaunch_node", "save_checkpoint", "suspend", "resume", "cancel")
    ]
    assert client.changed[1][2] == {"rank": 1}
    assert client.changed[-1][2] == {"reason": "wrong data"}


async def test_a_change_that_the_job_refuses_says_why(visitor: Visitor, client: PlayedClient) -> None:
    path = f"{JOB}change/scale"
    page = await visitor.post(path, await visitor.hidden(f"{path}?nodes=99"))
    assert "99 nodes are more than there are" in page
    assert "expected a number such as 4" in await visitor.get(f"{path}?nodes=many")
    assert client.changed == []


async def test_a_button_of_an_earlier_run_changes_nothing(visitor: Visitor, client: PlayedClient) -> None:
    path = f"{JOB}change/cancel"
    form = await visitor.hidden(path)
    page = await visitor.post(path, {**form, "uid": "89abcdef"})
    assert "nothing was changed: the page was about an earlier run" in page
    assert client.changed == []


async def test_logs_are_sent_as_text_without_controls(visitor: Visitor, client: PlayedClient) -> None:
    client.jobs["default", "llama"].lines = [HOSTILE, "x" * 10_000]
    (lines,) = await events(visitor, f"{JOB}lines")
    assert "<script>" in lines[0], "the page makes it text"
    assert "\x1b" not in lines[0]
    assert r"\u202e\u2066" in lines[0]
    assert len(lines[1]) > 10_000
    page = await visitor.get(f"{JOB}logs?node=1&since=10m")
    assert 'data-stream="lines?node=1&amp;since=10m"' in page
    (problem,) = await events(visitor, f"{JOB}lines?since=yesterday")
    assert "expected a duration" in problem


async def test_what_training_code_writes_is_text(visitor: Visitor, client: PlayedClient) -> None:
    hostile = PlayedJob(interrupted(), name=HOSTILE.replace("/", "_"))
    client.jobs["default", hostile.name] = hostile
    for path in ("/", "/jobs/default/gpt/"):
        page = await visitor.get(path)
        assert "<img" not in page
        assert "&lt;img src=x" in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert r"\u202e" in page
        assert page.count("<script") == 1, "that of the page itself"


async def test_a_page_that_is_closed_ends_no_other(visitor: Visitor) -> None:
    async with (
        aiohttp.ClientSession(cookie_jar=visitor.session.cookie_jar) as other,
        other.get(visitor.url(f"{JOB}events")) as answer,
    ):
        await answer.content.readline()
        assert await events(visitor, f"{JOB}events", 1)
        assert (await answer.content.readline()) == b"\n"
    assert await events(visitor, f"{JOB}events", 2)


async def test_a_range_of_ranks_without_an_end_keeps_no_page_waiting(visitor: Visitor) -> None:
    # A server that counted through it would answer nobody.
    assert await events(visitor, f"{JOB}lines?rank=0-{10**18}")
    await visitor.get(JOB)
