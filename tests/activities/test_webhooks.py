"""Tests of webhooks against a real HTTP server: the addresses that they reach, what is final, and signatures."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path

import pytest
from aiohttp import TCPConnector
from aiohttp.abc import ResolveResult

from perdure.activities import webhooks
from perdure.activities.webhooks import (
    LONGEST_PAUSE,
    AddressPolicy,
    DeliveryFailed,
    post,
    retry_after,
    run_command,
    signature,
)
from tests.support.receiver import Receiver, answers, hangs, receiving

PUBLIC = AddressPolicy()
OWN = AddressPolicy(everything=True)
SITE = AddressPolicy(networks=(ip_network("10.20.0.0/16"), ip_network("fd00:1::/64")))


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.mark.parametrize(
    ("address", "public", "site", "own"),
    [
        ("8.8.8.8", True, True, True),
        ("2606:4700::1111", True, True, True),
        ("127.0.0.1", False, False, True),
        ("127.8.9.10", False, False, True),
        ("0.0.0.0", False, False, True),
        ("10.20.3.4", False, True, True),
        ("10.21.3.4", False, False, True),
        ("172.16.0.1", False, False, True),
        ("192.168.1.1", False, False, True),
        ("169.254.169.254", False, False, True),
        ("100.64.0.1", False, False, True),
        ("224.0.0.1", False, False, True),
        ("240.0.0.1", False, False, True),
        ("255.255.255.255", False, False, True),
        ("::1", False, False, True),
        ("::", False, False, True),
        ("fe80::1", False, False, True),
        ("fec0::1", False, False, True),
        ("168.63.129.16", False, False, True),
        ("192.0.0.192", False, False, True),
        ("::127.0.0.1", False, False, True),
        ("64:ff9b:1::7f00:1", False, False, True),
        ("fd00:1::5", False, True, True),
        ("fd00:2::5", False, False, True),
        ("ff02::1", False, False, True),
        ("::ffff:127.0.0.1", False, False, True),
        ("::ffff:10.20.0.1", False, True, True),
        ("64:ff9b::7f00:1", False, False, True),
        ("64:ff9b::a9fe:a9fe", False, False, True),
        ("2002:7f00:1::", False, False, True),
        ("2002:a14:1::", False, True, True),
    ],
)
def test_addresses_inside_a_site_are_reached_only_where_its_policy_has_them(
    address: str, public: bool, site: bool, own: bool
):
    reached = [policy.refusal(address, encrypted=True) == "" for policy in (PUBLIC, SITE, OWN)]
    assert reached == [public, site, own]


def test_nothing_is_sent_through_public_networks_unencrypted():
    assert "use https" in PUBLIC.refusal("8.8.8.8", encrypted=False)
    assert SITE.refusal("10.20.0.1", encrypted=False) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::1]", "0"])
async def test_no_name_or_spelling_of_this_machine_is_reached(receiver: Receiver, host: str):
    with pytest.raises(DeliveryFailed) as failed:
        await post(f"http://{host}:{receiver.port}/", b"{}", {}, PUBLIC)
    assert failed.value.final
    assert not receiver.requests


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0177.0.0.1", "127.0.1", "127.0.0.1"])
async def test_what_a_client_takes_for_an_address_without_resolving_it_is_checked_where_it_connects(
    receiver: Receiver, host: str, monkeypatch: pytest.MonkeyPatch
):
    """As aiohttp did until its release 3.14: it hands such a host to the system, which reads it as an address."""

    async def unresolved(connector: TCPConnector, host: str, port: int, traces: object = None) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host=host, port=port, family=0, proto=0, flags=0)]

    monkeypatch.setattr(TCPConnector, "_resolve_host", unresolved)
    with pytest.raises(DeliveryFailed, match=r"address") as failed:
        await post(f"http://{host}:{receiver.port}/", b"{}", {}, PUBLIC)
    assert failed.value.final
    assert not receiver.requests


async def test_a_name_is_checked_by_the_address_that_is_connected_to(receiver: Receiver):
    with pytest.raises(DeliveryFailed) as failed:
        await post(f"http://localhost:{receiver.port}/", b"{}", {}, PUBLIC)
    assert failed.value.final
    assert "inside the site" in str(failed.value)
    loopback = AddressPolicy(networks=(ip_network("127.0.0.0/8"), ip_network("::1/128")))
    await post(f"http://localhost:{receiver.port}/", b"{}", {}, loopback)
    assert len(receiver.requests) == 1


async def test_redirects_are_not_followed(receiver: Receiver):
    receiver.behaviors["/moved"] = [answers(307, Location=receiver.url("/inner"))]
    with pytest.raises(DeliveryFailed, match="redirects are not followed") as failed:
        await post(receiver.url("/moved"), b"{}", {}, OWN)
    assert failed.value.final
    assert [one.path for one in receiver.requests] == ["/moved"]


@pytest.mark.parametrize(
    ("status", "final"), [(200, None), (204, None), (400, True), (404, True), (410, True), (408, False), (500, False)]
)
async def test_which_answers_another_try_may_change(receiver: Receiver, status: int, final: bool | None):
    receiver.behaviors["/"] = [answers(status)]
    if final is None:
        await post(receiver.url("/"), b"{}", {}, OWN)
        return
    with pytest.raises(DeliveryFailed, match=f"answered {status}") as failed:
        await post(receiver.url("/"), b"{}", {}, OWN)
    assert failed.value.final is final


async def test_a_server_that_is_busy_names_the_pause(receiver: Receiver):
    receiver.behaviors["/"] = [answers(429, Retry_After="7")]
    with pytest.raises(DeliveryFailed) as failed:
        await post(receiver.url("/"), b"{}", {}, OWN)
    assert (failed.value.final, failed.value.pause) == (False, timedelta(seconds=7))


async def test_a_server_that_hangs_is_left_and_tried_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(webhooks, "TIMEOUT", timedelta(milliseconds=200))
    receiver.behaviors["/secret-path"] = [hangs]
    with pytest.raises(DeliveryFailed, match="did not answer within") as failed:
        await post(receiver.url("/secret-path"), b"{}", {}, OWN)
    assert not failed.value.final
    assert "secret-path" not in str(failed.value)


async def test_a_server_that_is_away_is_tried_again_and_no_error_quotes_the_path(receiver: Receiver):
    with pytest.raises(DeliveryFailed, match=r"^127\.0\.0\.1: cannot connect: Connection refused$") as failed:
        await post("http://127.0.0.1:1/secret-path", b"{}", {}, OWN)
    assert not failed.value.final
    assert "secret-path" not in str(failed.value)


@pytest.mark.parametrize("url", ["", "hooks.example/x", "ftp://hooks.example/x", "http://", "https://[x"])
async def test_a_secret_that_holds_no_url_is_final(url: str):
    with pytest.raises(DeliveryFailed, match="URL is not valid") as failed:
        await post(url, b"{}", {}, OWN)
    assert failed.value.final


def test_pauses_that_servers_ask_for():
    now = datetime(2026, 11, 27, 8, 0, tzinfo=UTC)
    assert retry_after("120", now) == timedelta(minutes=2)
    assert retry_after("Fri, 27 Nov 2026 08:01:00 GMT", now) == timedelta(minutes=1)
    assert retry_after("Fri, 27 Nov 2026 07:00:00 GMT", now) == timedelta()
    assert retry_after("999999999", now) == LONGEST_PAUSE
    assert [retry_after(text, now) for text in ("", "soon", "-5")] == [None, None, None]


def test_signatures_are_those_of_standard_webhooks():
    # As `Webhook.sign` of the package standardwebhooks 1.0 makes it.
    key = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLasw"
    made = signature(key, id="msg_p5jXN8AQM9LWM0D4loKWxJek", timestamp=1614265330, body=b'{"test": 2432232314}')
    assert made == "v1,V5xCPQDdTB0l0m2VMsjB/ZVwuDV5WIe462vC5sKC8ds="
    with pytest.raises(ValueError, match="base64"):
        signature("whsec_?", id="a", timestamp=0, body=b"")


async def test_a_command_gets_the_body_and_its_failure_is_told(tmp_path: Path):
    file = tmp_path / "body"
    program = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
    await run_command([sys.executable, "-c", program, str(file)], b'{"a": 1}', environment={})
    assert file.read_bytes() == b'{"a": 1}'
    with pytest.raises(DeliveryFailed, match="ended with 3"):
        await run_command([sys.executable, "-c", "raise SystemExit(3)"], b"", environment={})
    with pytest.raises(DeliveryFailed, match="cannot be run"):
        await run_command([str(tmp_path / "missing")], b"", environment={})


async def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(webhooks, "TIMEOUT", timedelta(milliseconds=200))
    with pytest.raises(DeliveryFailed, match="did not end within"):
        await run_command([sys.executable, "-c", "import signal; signal.pause()"], b"", environment={})
