"""Webhooks: one signed POST request, to no address inside the site that the site does not allow.

The URL is a user's, and the worker reaches what its users may not: metadata of a cloud's machines, the API server,
other teams' services. So each address that a name resolves to is checked, and the connection goes to that very address:
a name that resolves to another one a moment later leads nowhere else. A host such as `127.1` is no name, and the system
reads it as an address, so the border is where sockets are made: there is none for anything but a whole address that is
allowed. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hmac
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, cast

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from perdure.base.own_threads import Occupied, OwnThreads

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

TIMEOUT: Final = timedelta(seconds=20)
"""The longest request, with its answer."""

LONGEST_PAUSE: Final = timedelta(hours=1)
"""The longest pause that a server's `Retry-After` asks for with effect."""

_NAMES_AT_ONCE: Final = 200
"""Questions for the addresses of one name in progress, as many as there are deliveries: name servers that a user has
chosen may answer none, for half a minute each."""

_OF_CLOUDS: Final = (ipaddress.IPv4Network("168.63.129.16/32"), ipaddress.IPv4Network("192.0.0.0/24"))
"""Addresses that look public and are those of a machine's own cloud, where it tells the machine's secrets: Azure's, and
what is assigned to protocols, where Oracle's has been."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_AGAIN: Final = frozenset({408, 409, 425, 429})
"""Answers from 400 to 499 that another try may change."""


class DeliveryFailed(Exception):
    """The target did not take a notification. The message has no part of a URL that may be secret."""

    def __init__(self, message: str, *, final: bool = False, pause: timedelta | None = None) -> None:
        """Creates the error.

        Args:
            message: The reason.
            final: Another try changes nothing.
            pause: The pause that the server asks for.
        """
        super().__init__(message)
        self.final = final
        self.pause = pause


@dataclass(frozen=True)
class AddressPolicy:
    """Addresses that webhooks may have."""

    networks: tuple[Network, ...] = ()
    """Networks inside the site that the site allows."""
    everything: bool = False
    """Users of this worker run code on its machine, which reaches all that the worker reaches."""

    def refusal(self, address: str, *, encrypted: bool) -> str:
        """Why an address is refused; empty where it is not."""
        found = _meant(ipaddress.ip_address(address))
        if self.everything or any(found in network for network in self.networks):
            return ""
        # Deprecated, and yet routed within some sites, `fec0::/10` counts as global for the standard library.
        is_of_site = isinstance(found, ipaddress.IPv6Address) and found.is_site_local
        of_cloud = any(found in network for network in _OF_CLOUDS)
        if not found.is_global or found.is_multicast or found.is_reserved or is_of_site or of_cloud:
            return f"{address} is an address inside the site; its policy allows none (webhook_networks)"
        return "" if encrypted else "http would send it unencrypted through public networks; use https"


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 address leads to, where it stands for one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address


def _socket_of(policy: AddressPolicy, *, encrypted: bool) -> Callable[[AddrInfoType], socket.socket]:
    """Returns what makes sockets, for addresses that the policy allows only."""

    def make(found: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, place = found
        host = str(cast("tuple[Any, ...]", place)[0])
        address = _as_address(host)
        if why := policy.refusal(address, encrypted=encrypted) if address else f"{host} is no whole address":
            raise DeliveryFailed(why, final=True)
        return socket.socket(family=family, type=kind, proto=protocol)

    return make


class _Resolver(AbstractResolver):
    """Resolves names to addresses that the policy allows."""

    def __init__(self, policy: AddressPolicy, *, encrypted: bool) -> None:
        self._policy = policy
        self._encrypted = encrypted

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            found = await _names.run(host, lambda: _addresses(host, port, family))
        except Occupied as error:
            raise DeliveryFailed(f"the addresses of {host} are not known: {error}") from None
        for one in found:
            if why := self._policy.refusal(one["host"], encrypted=self._encrypted):
                # Not one of them is tried: a name with both kinds is a name that was made up for this.
                raise DeliveryFailed(f"{host}: {why}", final=True)
        return found

    async def close(self) -> None:
        pass


_names = OwnThreads("webhook-names", most=_NAMES_AT_ONCE)


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host, host=str(place[0]), port=int(place[1]), family=of_kind, proto=protocol, flags=numeric
        )
        for of_kind, _, protocol, _, place in found
    ]


async def post(url: str, body: bytes, headers: Mapping[str, str], policy: AddressPolicy) -> None:
    """Sends one request.

    Raises:
        DeliveryFailed: if the server does not accept it.
    """
    try:
        place = URL(url)
        host, encrypted = place.host or "", place.scheme == "https"
    except ValueError:
        raise DeliveryFailed("its URL is not valid", final=True) from None
    if place.scheme not in ("https", "http") or not host:
        raise DeliveryFailed("its URL is not valid: expected https://…", final=True)
    connector = aiohttp.TCPConnector(
        resolver=_Resolver(policy, encrypted=encrypted),
        use_dns_cache=False,
        socket_factory=_socket_of(policy, encrypted=encrypted),
    )
    timeout = aiohttp.ClientTimeout(total=TIMEOUT.total_seconds())
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
            session.post(place, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            _check(answer, host)
    except TimeoutError:
        raise DeliveryFailed(f"{host} did not answer within {TIMEOUT.total_seconds():.0f} s") from None
    except aiohttp.InvalidURL:
        raise DeliveryFailed("its URL is not valid", final=True) from None
    except aiohttp.ClientError as error:
        raise DeliveryFailed(f"{host}: {_kind(error)}") from None


def _as_address(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


def _kind(error: aiohttp.ClientError) -> str:
    """What failed, without the URL, which some of these errors quote."""
    if isinstance(error, aiohttp.ClientConnectorError):
        # Its own text is asyncio's, with the address once more.
        number = error.os_error.errno
        if number is not None and number in errno.errorcode:
            return f"cannot connect: {os.strerror(number)}"
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return type(error).__name__


def _check(answer: aiohttp.ClientResponse, host: str) -> None:
    status = answer.status
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise DeliveryFailed(f"{host} answered {status}: redirects are not followed; name the final URL", final=True)
    final = 400 <= status < 500 and status not in _AGAIN
    pause = retry_after(answer.headers.get("Retry-After", ""), datetime.now(UTC))
    raise DeliveryFailed(f"{host} answered {status}", final=final, pause=pause)


def retry_after(text: str, now: datetime) -> timedelta | None:
    """The pause that a server asks for, in seconds or as a date; None where it asks for none."""
    try:
        pause = timedelta(seconds=int(text)) if text.isascii() and text.isdigit() else parsedate_to_datetime(text) - now
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(pause, timedelta()), LONGEST_PAUSE)


def signature(key: str, *, id: str, timestamp: int, body: bytes) -> str:
    """The header `webhook-signature` of Standard Webhooks, version v1: HMAC-SHA256 over id, time and body.

    Args:
        key: The secret: `whsec_` and base64, or any other text, whose bytes are used as they are.
        id: The header `webhook-id`.
        timestamp: The header `webhook-timestamp`.
        body: The body.

    Raises:
        ValueError: if what follows `whsec_` is not base64.
    """
    encoded = key.removeprefix("whsec_")
    secret = base64.b64decode(encoded, validate=True) if encoded != key else key.encode()
    digest = hmac.digest(secret, b".".join((id.encode(), str(timestamp).encode(), body)), "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


async def run_command(
    command: Sequence[str], body: bytes, *, environment: Mapping[str, str], folder: str | None = None
) -> None:
    """Runs a program with the body on its standard input, in a folder or in this process's.

    Raises:
        DeliveryFailed: if it cannot be run, ends with another code than 0, or does not end in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(environment),
            cwd=folder,
        )
    except OSError as error:
        raise DeliveryFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(TIMEOUT.total_seconds()):
            await process.communicate(body)
    except TimeoutError:
        raise DeliveryFailed(f"{command[0]} did not end within {TIMEOUT.total_seconds():.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise DeliveryFailed(f"{command[0]} ended with {process.returncode}")
