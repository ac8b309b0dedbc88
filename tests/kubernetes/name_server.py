"""A name server for pods of the tests' cluster, which has none: it answers from EndpointSlices, as Kubernetes' own."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from perdure.base.kubernetes import KubernetesApi
from scripts.cluster.machine import API_ADDRESS

POD_TEMPLATE = {"spec": {"dnsConfig": {"nameservers": [API_ADDRESS]}}}
"""Has a pod with this machine's programs use it."""

_ADDRESS, _INTERNET = 1, 1
_NO_SUCH_NAME = 3


@asynccontextmanager
async def name_server(api: KubernetesApi) -> AsyncIterator[None]:
    """Answers pods for as long as the context is open."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Server(api), local_addr=(API_ADDRESS, 53))
    try:
        yield
    finally:
        transport.close()


class _Server(asyncio.DatagramProtocol):
    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        task = asyncio.create_task(self._answer(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, query: bytes, sender: Any) -> None:
        labels, end = _name_in(query)
        kind, _ = struct.unpack_from("!HH", query, end)
        found = await self._addresses(labels)
        records = [socket.inet_aton(address) for address in found] if kind == _ADDRESS else []
        flags = 0x8580 | (0 if found else _NO_SUCH_NAME)
        head = query[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
        # A record names the question's name, which is 12 bytes from the beginning, and must not be kept.
        answers = (struct.pack("!HHHIH", 0xC00C, _ADDRESS, _INTERNET, 0, len(data)) + data for data in records)
        self._transport.sendto(head + query[12 : end + 4] + b"".join(answers), sender)

    async def _addresses(self, labels: list[str]) -> list[str]:
        """Returns the ready pods of `HOST.SERVICE.NAMESPACE.svc`."""
        if labels[3:] != ["svc"]:
            return []
        host, service, namespace, _ = labels
        slices = await self._api.list(
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            labels=f"kubernetes.io/service-name={service}",
        )
        return [
            address
            for one in slices
            for endpoint in one.get("endpoints") or ()
            if endpoint.get("hostname") == host and endpoint["conditions"].get("ready")
            for address in endpoint["addresses"]
        ]


def _name_in(query: bytes) -> tuple[list[str], int]:
    """Returns the labels of the question's name, and where what follows them begins."""
    labels: list[str] = []
    at = 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return labels, at + 1
