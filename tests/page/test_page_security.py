"""Tests of who can open pages, and with what a browser is told to be strict."""

from __future__ import annotations

import pytest

from perdure.page.sessions import Sessions
from tests.page.conftest import Visitor, proxied, served
from tests.page.played import PlayedClient

JOB = "/jobs/default/llama/"
EVERYTHING = (
    "/",
    "/events",
    JOB,
    f"{JOB}events",
    f"{JOB}logs",
    f"{JOB}lines",
    f"{JOB}change/cancel",
    "/static/page.js",
)


@pytest.mark.parametrize("path", EVERYTHING)
async def test_nothing_is_shown_without_the_token(stranger: Visitor, path: str) -> None:
    assert "llama" not in await stranger.get(path, status=401)
    await stranger.get(f"{path}?token=wrong", status=401)
    stranger.session.cookie_jar.update_cookies({"perdure-ui": "wrong"}, stranger.link)
    await stranger.get(path, status=401)


async def test_nothing_is_changed_without_the_token(stranger: Visitor, client: PlayedClient) -> None:
    await stranger.post(f"{JOB}change/cancel", {"csrf": "x"}, status=401)
    await stranger.post(f"{JOB}change/cancel?token={stranger.link.query['token']}", {"csrf": "x"}, status=401)
    assert client.changed == []


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8234", "127.0.0.1.evil.example", "[::1"])
async def test_other_names_than_this_machine_s_are_refused(visitor: Visitor, host: str) -> None:
    await visitor.get("/", status=403, Host=host)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1"])
async def test_other_origins_change_nothing(visitor: Visitor, client: PlayedClient, origin: str) -> None:
    form = await visitor.hidden(f"{JOB}change/cancel")
    await visitor.post(f"{JOB}change/cancel", form, status=403, origin=origin)
    assert client.changed == []


async def test_a_form_without_our_secret_changes_nothing(visitor: Visitor, client: PlayedClient) -> None:
    form = await visitor.hidden(f"{JOB}change/cancel")
    for csrf in ("", "x", form["csrf"][:-1], "ü"):
        await visitor.post(f"{JOB}change/cancel", {**form, "csrf": csrf}, status=403)
    assert client.changed == []


async def test_a_look_at_a_plan_changes_nothing(visitor: Visitor, client: PlayedClient) -> None:
    await visitor.get(f"{JOB}change/cancel?reason=x")
    assert client.changed == []


async def test_browsers_are_told_to_run_and_load_nothing_of_others(visitor: Visitor) -> None:
    for path in ("/", JOB, f"{JOB}events", "/static/page.js", "/jobs/default/none/"):
        async with visitor.session.get(visitor.url(path)) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"


async def test_the_cookie_is_for_this_site_s_requests_alone(stranger: Visitor) -> None:
    async with stranger.session.get(stranger.link, allow_redirects=False) as answer:
        cookie = answer.headers["Set-Cookie"]
        assert stranger.link.query["token"] not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie


async def test_files_beside_the_static_ones_are_not_served(visitor: Visitor) -> None:
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py"):
        async with visitor.session.get(visitor.url(path)) as answer:
            assert answer.status in (403, 404)


async def test_pages_have_no_inline_scripts_and_styles(visitor: Visitor) -> None:
    for path in ("/", JOB, f"{JOB}logs", f"{JOB}change/scale?nodes=3"):
        page = await visitor.get(path)
        assert "style=" not in page
        assert "<style" not in page
        assert "onclick" not in page


async def test_a_page_that_is_read_only_has_no_buttons_and_changes_nothing(client: PlayedClient) -> None:
    async with served(client, read_only=True) as visitor:
        assert "change/" not in await visitor.get(JOB)
        await visitor.get(f"{JOB}change/cancel", status=403)
        sessions = Sessions()
        sessions.token = visitor.link.query["token"]
        uid = client.jobs["default", "llama"].status.uid
        refused = await visitor.post(f"{JOB}change/cancel", {"csrf": sessions.csrf, "uid": uid}, status=403)
        assert "--read-only" in refused
    assert client.changed == []


@pytest.mark.parametrize("strips", [True, False], ids=["stripped", "passed on"])
@pytest.mark.parametrize("keeps_name", [True, False], ids=["own name", "other name"])
async def test_a_proxy_shows_it_below_a_path(client: PlayedClient, strips: bool, keeps_name: bool) -> None:
    async with proxied(client, strips=strips, keeps_name=keeps_name) as visitor:
        page = await visitor.get(f"/perdure{JOB}")
        assert 'href="../../../static/page.css"' in page
        assert ".plot" in await visitor.get("/perdure/static/page.css")
        assert "no job named" in await visitor.get("/perdure/jobs/default/none/", status=404)
        form = await visitor.hidden(f"/perdure{JOB}change/suspend")
        assert "will suspend" in await visitor.post(f"/perdure{JOB}change/suspend", form)
        await visitor.post(f"/perdure{JOB}change/suspend", form, status=403, origin="http://evil.example")
    assert len(client.changed) == 1
