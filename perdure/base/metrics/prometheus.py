"""Reads endpoints for Prometheus, such as those of exporters on a node's machine."""

from __future__ import annotations

import io
import logging
import urllib.request
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from perdure.base.metrics.samples import Sample

logger = logging.getLogger(__name__)

_LARGEST: Final = 8 * 1024 * 1024
"""Bytes of a scrape, at most."""
_LARGEST_PART: Final = 512 * 1024
"""Bytes of the lines that are parsed, at most: samples take a hundred times their text, and an agent has little
memory. Where an exporter is expected, training code may listen: all containers of a pod share its ports."""
_LONGEST_LINE: Final = 4 * 1024


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Who answers in the place of an exporter does not choose what is read."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
"""Exporters are on this machine or near it. A proxy for the internet, which `http_proxy` names, reaches its own."""


class PrometheusMonitor:
    """Reads any endpoint for Prometheus, such as DCGM-exporter's."""

    def __init__(
        self, address: str, *, prefixes: Sequence[str] = ("",), timeout: timedelta = timedelta(seconds=3)
    ) -> None:
        """Creates the monitor.

        Args:
            address: The URL, such as `http://127.0.0.1:9400/metrics`.
            prefixes: Prefixes of the names of metrics that are read, such as `DCGM_FI_DEV_`.
            timeout: The longest time for one reading.

        Raises:
            ValueError: if the address is not an HTTP URL.
        """
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"address: expected http://HOST:PORT/PATH, found {address!r}")
        self.name = address
        self._address = address
        self._prefixes = tuple(prefixes)
        self._timeout = timeout.total_seconds()

    def read(self) -> Sequence[Sample]:
        """Returns its samples.

        Raises:
            OSError: if it does not answer.
            ValueError: if the answer is not in Prometheus' text format.
        """
        with _OPENER.open(self._address, timeout=self._timeout) as answer:
            text = self._wanted(answer.read(_LARGEST)).decode("utf-8", "replace")
        return [
            Sample(one.name, one.value, one.labels)
            for family in text_string_to_metric_families(text)
            for one in family.samples
            if one.name.startswith(self._prefixes)
        ]

    def _wanted(self, content: bytes) -> bytes:
        """Returns the lines of the metrics that are read, as far as they are bounded."""
        beginnings = (b"#", *(prefix.encode() for prefix in self._prefixes))
        lines, size = list[bytes](), 0
        for line in io.BytesIO(content):
            if len(line) > _LONGEST_LINE or not line.startswith(beginnings):
                continue
            size += len(line)
            if size > _LARGEST_PART:
                break
            lines.append(line)
        return b"".join(lines)


def endpoint_monitors(addresses: Iterable[str]) -> list[PrometheusMonitor]:
    """Returns a monitor of each address; one that cannot be used is left out and logged.

    Args:
        addresses: URLs. What follows `#` are prefixes of the names of metrics that are read, with commas between them.
    """
    found = list[PrometheusMonitor]()
    for one in addresses:
        address, _, prefixes = one.partition("#")
        try:
            found.append(PrometheusMonitor(address, prefixes=prefixes.split(",")))
        except ValueError as error:
            logger.warning("metrics are not read: %s", error)
    return found
