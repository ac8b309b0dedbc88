"""Tests of a site's pages: who signs in, what users see and change, and what happens when the API server is away.

The API server is played, for its outages; `tests/security/cluster/test_page.py` has a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from perdure.page import users as users_module
from perdure.page.access import Right
from tests.page.conftest import Visitor
from tests.page.played import PlayedClient, PlayedJob, interrupted
from tests.page.site import PlayedApi, visitor_of
from tests.support.waiting import DEADLINE

JOB = "/jobs/default/llama/"
EVERYTHING = ("/", "/events", JOB, f"{JOB}events", f"{JOB}logs", f"{JOB}lines", f"{JOB}change/cancel")


@pytest.fixture
def api() -> PlayedApi:
    return PlayedApi()


@pytest.fixture
def client(client: PlayedClient) -> PlayedClient:
    """Two namespaces have jobs."""
    client.jobs["vision", "resnet"] = PlayedJob(interrupted(), name="resnet", namespace="vision")
    return client


@pytest.fixture
async def stranger(client: PlayedClient, api: PlayedApi) -> AsyncIterator[Visitor]:
    async with visitor_of(client, api) as visitor:
        yield visitor


async def signed_in(stranger: Visitor, name: str) -> Visitor:
    await stranger.post("/sign-in", {"token": name, "back": ""})
    return stranger


@pytest.mark.parametrize("path", EVERYTHING)
async def test_nothing_is_shown_to_strangers_but_the_way_in(stranger: Visitor, path: str) -> None:
    page = await stranger.get(path, status=401)
    assert "llama" not in page.replace(JOB[1:], "")
    assert "--audience perdure-page" in page
    await stranger.get(path, status=401, Authorization="Bearer nobody")
    assert ".plot" in await stranger.get("/static/page.css")
    await stranger.post(f"{JOB}change/cancel", {"csrf": "x"}, status=401)


async def test_a_user_signs_in_where_the_link_led_and_out_again(stranger: Visitor, api: PlayedApi) -> None:
    assert "does not accept" in await stranger.post("/sign-in", {"token": "nobody", "back": ""}, status=401)
    async with stranger.session.post(
        stranger.url("/sign-in"), data={"token": "ana", "back": "jobs/default/llama/"}
    ) as answer:
        assert answer.url.path == JOB
        assert "ana" in await answer.text()
    async with stranger.session.post(
        stranger.url("/sign-in"), data={"token": "ana", "back": "//evil.example/"}, allow_redirects=False
    ) as answer:
        assert answer.headers["Location"] == "./evil.example/", "a place below this page"
        assert "HttpOnly" in answer.headers["Set-Cookie"]
        assert "SameSite=Lax" in answer.headers["Set-Cookie"]
    form = await stranger.hidden(JOB)
    await stranger.post("/sign-out", {}, status=403)
    await stranger.post("/sign-out", {"csrf": form["csrf"]}, status=401)
    await stranger.get(JOB, status=401)
    assert api.reviews.count("TokenReview") == 2, "one for each token"


@pytest.mark.parametrize(
    ("back", "place"),
    [
        ("../x", ""),
        ("jobs/../../x", ""),
        ("..", ""),
        ("..#?", ""),
        (r"..\x", ""),
        ("%2e%2E/x", ""),
        (".%2e/x", ""),
        (".\t./x", ""),
        ("a\r\nX: y", ""),
        ("jobs/default/llama..2/?back=../x", "jobs/default/llama..2/?back=../x"),
    ],
)
async def test_after_the_sign_in_a_user_is_below_the_page(stranger: Visitor, back: str, place: str) -> None:
    form = {"token": "ana", "back": back}
    async with stranger.session.post(stranger.url("/sign-in"), data=form, allow_redirects=False) as answer:
        assert answer.status == 303
        assert answer.headers["Location"] == f"./{place}"


async def test_users_see_the_jobs_of_their_namespaces_only(stranger: Visitor) -> None:
    page = await (await signed_in(stranger, "ben")).get("/")
    assert "llama" in page
    assert "resnet" not in page
    assert "2 jobs, " in page
    async with stranger.session.get(stranger.url("/events")) as events:
        assert b"resnet" not in await events.content.readline()
    other = await stranger.get("/jobs/vision/resnet/", status=403)
    assert other.replace("resnet", "none") == await stranger.get("/jobs/vision/none/", status=403), "nor whether it is"
    await signed_in(stranger, "cleo")
    assert "llama" not in await stranger.get("/")
    assert "resnet" in await stranger.get("/jobs/vision/resnet/")


async def test_a_site_s_own_namespaces_bound_what_is_shown(client: PlayedClient, api: PlayedApi) -> None:
    """A user with rights in both namespaces sees those of this release's."""
    api.rights["ana"]["vision"] = {Right.READ, Right.CHANGE}
    async with visitor_of(client, api, namespaces=["default"]) as visitor:
        await signed_in(visitor, "ana")
        assert "resnet" not in await visitor.get("/")
        await visitor.get("/jobs/vision/resnet/", status=403)
        await visitor.get("/jobs/vision/resnet/change/suspend", status=403)


async def test_buttons_that_a_user_may_not_press_are_disabled_and_refuse(
    stranger: Visitor, client: PlayedClient
) -> None:
    page = await (await signed_in(stranger, "ben")).get(JOB)
    assert "change/" not in page
    assert 'href="logs"' not in page
    assert 'disabled title="It takes the right to update trainingjobs.perdure.dev in the namespace default"' in page
    lacking = "get pods/log, to update trainingjobs.perdure.dev, to delete trainingjobs.perdure.dev"
    assert f"a right that you do not have in the namespace default: to {lacking}." in page
    csrf = (await stranger.hidden(JOB))["csrf"]
    for path in ("change/suspend", "logs", "lines"):
        await stranger.get(f"{JOB}{path}", status=403)
    uid = client.jobs["default", "llama"].status.uid
    refused = await stranger.post(f"{JOB}change/cancel", {"csrf": csrf, "uid": uid}, status=403)
    assert "the right to delete trainingjobs.perdure.dev" in refused
    page = await (await signed_in(stranger, "dan")).get(JOB)
    assert "change/suspend" in page
    assert "change/cancel" not in page, "to end a job takes a right of its own"
    assert "namespace default: to delete trainingjobs.perdure.dev." in page
    assert client.changed == []


async def test_a_job_keeps_who_has_changed_it(stranger: Visitor, client: PlayedClient) -> None:
    await signed_in(stranger, "ana")
    form = await stranger.hidden(f"{JOB}change/suspend?reason=night")
    assert "will suspend" in await stranger.post(f"{JOB}change/suspend", form)
    await stranger.post(f"{JOB}change/suspend", {**form, "csrf": "x"}, status=403)
    await stranger.post(f"{JOB}change/suspend", form, status=403, origin="http://evil.example")
    [(_, _, request)] = client.changed
    assert request["reason"] == "ana, on the page: night"


async def test_a_form_of_another_user_changes_nothing(stranger: Visitor, client: PlayedClient) -> None:
    form = await (await signed_in(stranger, "dan")).hidden(f"{JOB}change/suspend")
    await signed_in(stranger, "ana")
    await stranger.post(f"{JOB}change/suspend", form, status=403)
    assert client.changed == []


async def test_a_proxy_may_sign_users_in(stranger: Visitor) -> None:
    page = await stranger.get(JOB, Authorization="Bearer ana")
    assert "Suspend …" in page
    assert "Sign out" not in page
    await stranger.get(JOB, status=401)


async def test_a_token_for_another_audience_is_refused(stranger: Visitor, api: PlayedApi) -> None:
    api.audiences = ["https://kubernetes.default.svc"]
    await stranger.post("/sign-in", {"token": "ana", "back": ""}, status=401)


async def test_a_user_s_name_stays_text(stranger: Visitor) -> None:
    page = await stranger.get(JOB, Authorization="Bearer mallory")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


async def test_an_outage_of_the_api_server_ends_no_visit_and_admits_no_one(
    stranger: Visitor, api: PlayedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await signed_in(stranger, "ben")).get(JOB)
    monkeypatch.setattr(users_module, "_FRESH_SECONDS", 0.0)
    api.away = True
    assert "llama" in await stranger.get(JOB)
    assert "does not say" in await stranger.get(f"{JOB}logs", status=503, Authorization="Bearer dan")
    monkeypatch.setattr(users_module, "_STALE_SECONDS", 0.0)
    await stranger.get(JOB, status=503)


async def test_a_refusal_does_not_outlast_the_api_server(
    stranger: Visitor, api: PlayedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was refused before may have been granted since: a user is not told to sign in again, or to ask for it."""
    await stranger.get(JOB, status=401, Authorization="Bearer new")
    await stranger.get(f"{JOB}logs", status=403, Authorization="Bearer ben")
    assert "Suspend …" not in await stranger.get(JOB, Authorization="Bearer ben")
    monkeypatch.setattr(users_module, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(users_module, "_REFUSED_SECONDS", 0.0)
    api.away = True
    for path, token in ((JOB, "new"), (f"{JOB}logs", "ben")):
        assert "does not say" in await stranger.get(path, status=503, Authorization=f"Bearer {token}")
    assert "llama" in await stranger.get(JOB, Authorization="Bearer ben")


async def test_the_jobs_that_a_user_may_see_are_listed_while_the_api_server_is_away(
    stranger: Visitor, client: PlayedClient, api: PlayedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "llama" in await stranger.get("/", Authorization="Bearer ben")
    monkeypatch.setattr(users_module, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(users_module, "_REFUSED_SECONDS", 0.0)
    api.away = True
    assert "llama" in await stranger.get("/", Authorization="Bearer ben")


@pytest.mark.parametrize("path", ["/events", f"{JOB}events"])
@pytest.mark.parametrize("loses", ["right", "token"])
async def test_an_open_page_ends_with_the_right_to_see_it(
    stranger: Visitor, api: PlayedApi, monkeypatch: pytest.MonkeyPatch, path: str, loses: str
) -> None:
    monkeypatch.setattr(users_module, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(users_module, "_REFUSED_SECONDS", 0.0)
    await signed_in(stranger, "ben")
    async with asyncio.timeout(DEADLINE), stranger.session.get(stranger.url(path)) as events:
        assert b"llama" in await events.content.readline()
        if loses == "right":
            api.rights["ben"].clear()
        else:
            api.rights.pop("ben")
        if path == "/events" and loses == "right":
            while b'"order": []' not in await events.content.readline():
                pass
            return
        while await events.content.readline():
            pass
    status = 403 if loses == "right" else 401
    await stranger.get(path, status=status)


async def try_tokens(stranger: Visitor) -> set[int]:
    """Tries many made-up tokens; returns the statuses of the answers."""

    async def attempt(number: int) -> int:
        headers = {"Authorization": f"Bearer t{number}"}
        async with stranger.session.get(stranger.url("/"), headers=headers) as answer:
            return answer.status

    return {await attempt(number) for number in range(700)}


async def test_an_address_that_tries_many_tokens_is_slowed_down(stranger: Visitor) -> None:
    assert await try_tokens(stranger) == {401, 429}


async def test_users_behind_the_proxy_of_one_who_tries_tokens_are_not_kept_out(
    stranger: Visitor, api: PlayedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    await signed_in(stranger, "ana")
    monkeypatch.setattr(users_module, "_FRESH_SECONDS", 0.0)
    assert 429 in await try_tokens(stranger)
    before = len(api.reviews)
    assert "llama" in await stranger.get(JOB)
    assert "TokenReview" in api.reviews[before:], "the token is reviewed as ever"
    del api.rights["ana"]
    await stranger.get(JOB, status=401)
