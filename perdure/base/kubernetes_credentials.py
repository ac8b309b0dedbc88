"""The credentials of a kubeconfig, many of which expire: those of a program, as cloud providers have it, within
minutes, and those in a file once another process replaces it. And the certificates of the authority that the server's
own is checked with, which clusters renew, too."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from kubernetes.aio.client.configuration import Configuration

logger = logging.getLogger(__name__)

_RENEWALS_APART = 2.0
"""Seconds between two renewals of credentials that stay refused: each may start a program."""


class Used(NamedTuple):
    """The credentials of one request."""

    token: str
    """Empty where it has none."""
    certificate: bytes
    """The client certificate of its connection; empty where it has none."""


class Credentials:
    """The credentials of one client's next requests."""

    def __init__(
        self,
        configuration: Configuration,
        renew: Callable[[], Awaitable[object]] | None,
        *,
        on_change: Callable[[], Awaitable[object]],
    ) -> None:
        """Takes over credentials.

        Args:
            configuration: Has them.
            renew: Writes new ones into the configuration; None where another part does.
            on_change: Is called once the configuration has another client certificate or another authority.
        """
        self._configuration: Any = configuration
        self._renew = renew
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._renewed_at = -math.inf
        self._doubted_at = -math.inf
        self._certificate = _certificate_of(configuration)
        self._authority = _authority_of(configuration)

    @property
    def current(self) -> Used:
        """The credentials of the next request."""
        return Used(self._configuration.api_key.get("BearerToken", ""), self._certificate)

    async def renew(self, refused: Used) -> None:
        """Replaces credentials that the server has refused, once for all requests that they were refused to."""
        if self._renew is None:
            return
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if self.current != refused or now - self._renewed_at < _RENEWALS_APART:
                return
            self._renewed_at = now
            try:
                await self._renew()
                await self._follow()
            except Exception as error:
                # Whatever a program or a half-written file raises, the request fails as refused.
                logger.warning("the credentials of the kubeconfig cannot be read again: %s", error)

    async def renew_authority(self) -> None:
        """Reads the authority again, with whose certificates the server's own does not agree: the cluster's may have
        been renewed since, in the file of a pod or of a kubeconfig."""
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if now - self._doubted_at < _RENEWALS_APART:
                return
            self._doubted_at = now
            try:
                if self._renew is not None:
                    await self._renew()
                await self._follow()
            except Exception as error:
                logger.warning("the certificates of the API server's authority cannot be read again: %s", error)

    async def _follow(self) -> None:
        """Has the client make new connections where the configuration has other certificates than those in use."""
        certificate, authority = _certificate_of(self._configuration), _authority_of(self._configuration)
        if (certificate, authority) != (self._certificate, self._authority):
            await self._on_change()
            self._certificate, self._authority = certificate, authority


def _certificate_of(configuration: Any) -> bytes:
    return Path(configuration.cert_file).read_bytes() if configuration.cert_file else b""


def _authority_of(configuration: Any) -> bytes:
    return Path(configuration.ssl_ca_cert).read_bytes() if configuration.ssl_ca_cert else b""
