"""The Helm chart in tests: runs helm, and parses the rendered objects."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml

from perdure.base.kubernetes import KubernetesApi
from scripts.cluster.machine import API_ADDRESS
from tests.support.allocation import REPOSITORY
from tests.support.fronts import service_front

CHART = REPOSITORY / "deploy" / "helm" / "perdure"


class HelmFailed(Exception):
    """helm failed; the message is its output."""


async def helm_says(
    helm: Path, *words: str | Path, values: Mapping[str, Any] | None = None, kubeconfig: str = ""
) -> str:
    """Returns the output of a helm command.

    Raises:
        HelmFailed: if it fails.
    """
    with tempfile.TemporaryDirectory() as home:
        homes = {f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
        process = await asyncio.create_subprocess_exec(
            *map(str, (helm, *words, *(["--values", "-"] if values is not None else []))),
            env={**os.environ, **homes, "KUBECONFIG": kubeconfig or os.devnull},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, complaint = await process.communicate(json.dumps(values or {}).encode())
    if process.returncode:
        raise HelmFailed(out.decode() + complaint.decode())
    return out.decode()


async def rendered(helm: Path, *, site: str = "perdure", **values: Any) -> list[dict[str, Any]]:
    """The objects of a release called `perdure` in a namespace of its own."""
    text = await helm_says(helm, "template", "perdure", CHART, "--namespace", site, values=values)
    return [one for one in yaml.safe_load_all(text) if one]


async def gateways(api: KubernetesApi, namespace: str) -> list[dict[str, Any]]:
    """The gateways' pods of the release in a namespace."""
    return await api.list(f"/api/v1/namespaces/{namespace}/pods", labels="app.kubernetes.io/component=gateway")


@asynccontextmanager
async def gateway_front(api: KubernetesApi, namespace: str) -> AsyncIterator[str]:
    """Stands for the gateways' Service; yields the address for the chart's value `gateway.address`."""
    async with service_front(partial(gateways, api, namespace), 7433, address=API_ADDRESS) as port:
        yield f"{API_ADDRESS}:{port}"


class Release:
    """The chart, installed as `perdure` for as long as the context is open."""

    def __init__(self, helm: Path, kubeconfig: str, namespace: str) -> None:
        self._helm = helm
        self._kubeconfig = kubeconfig
        self._namespace = namespace

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._says("uninstall", "perdure", "--ignore-not-found", "--wait")

    async def apply(self, values: dict[str, Any], *, chart: Path = CHART) -> None:
        """Installs or upgrades; returns when the new workers serve."""
        await self._says("upgrade", "--install", "perdure", chart, "--wait", "--timeout", "120s", values=values)

    async def run(self, printed: Sequence[str], *options: str) -> None:
        """Runs a command of the documentation, for this release and with further options."""
        program, *words = printed
        assert program == "helm"
        start = words.index("--namespace")
        words[start : start + 2] = []
        await self._says(*(CHART if word == "deploy/helm/perdure" else word for word in words), *options)

    async def _says(self, *words: str | Path, values: dict[str, Any] | None = None) -> None:
        where = ("--namespace", self._namespace)
        await helm_says(self._helm, *words, *where, values=values, kubeconfig=self._kubeconfig)
