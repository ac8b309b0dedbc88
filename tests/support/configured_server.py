"""A real Temporal server on PostgreSQL, configured as docs/install-kubernetes.md says: a process for each service.

What stands in the guide is read from it. Left out are TLS and tokens, which `authorizing_server` has; what Temporal's
chart adds is here: ports and passwords.
"""

from __future__ import annotations

import asyncio
import configparser
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from tests.docs.pages import PAGES
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.temporal_server import SEARCH_ATTRIBUTES
from tests.support.waiting import eventually

[_GUIDE] = [page for page in PAGES if page.name == "docs/install-kubernetes.md"]

_OF_THE_CHART = {"createDatabase", "manageSchema", "existingSecret", "secretKey"}
"""Fields of a store that the chart takes out before the server reads it."""

_OPTIONAL = "internal-frontend"
"""The service that runs where it is enabled; the chart runs all others."""


@cache
def values() -> Mapping[str, Any]:
    """The chart's values, as the guide has them."""
    [block] = [block for block in _GUIDE.blocks if "numHistoryShards" in block.text]
    return yaml.safe_load(block.text)["server"]


@cache
def database_settings() -> Mapping[str, str]:
    """What PostgreSQL's configuration sets, as the guide has it."""
    [block] = [block for block in _GUIDE.blocks if "max_connections" in block.text]
    parser = configparser.ConfigParser()
    parser.read_string(f"[postgresql]\n{block.text}")
    return dict(parser["postgresql"])


def services() -> tuple[str, ...]:
    """The services of the server, each of which is a Deployment."""
    optional = (_OPTIONAL,) if values().get(_OPTIONAL, {}).get("enabled") else ()
    return ("history", "matching", *optional, "frontend", "worker")


def replicas(service: str) -> int:
    """How many processes of a service run; the chart's default is one."""
    known = values()
    return known.get(service, {}).get("replicaCount", known.get("replicaCount", 1))


def stores() -> Mapping[str, Mapping[str, Any]]:
    """The connection to each store, by its name."""
    return {name: store["sql"] for name, store in values()["config"]["persistence"]["datastores"].items()}


def pool_of_a_process() -> int:
    """The most connections that one process holds: it has a pool for each store."""
    return sum(store["maxConns"] for store in stores().values())


def pools_of_all_processes() -> int:
    """The most connections that the server holds while no upgrade replaces it."""
    return pool_of_a_process() * sum(replicas(service) for service in services())


class ConfiguredServer:
    """The server's processes, one of each service."""

    def __init__(self, programs: Mapping[str, Path], folder: Path, database_port: int) -> None:
        self._programs = programs
        self._folder = folder
        self._database_port = database_port
        self._ports = {service: free_port() for service in services()}
        self._members = {service: free_port() for service in services()}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    @property
    def address(self) -> str:
        """The address of the frontend."""
        return f"127.0.0.1:{self._ports['frontend']}"

    async def client(self, namespace: str = "default") -> Client:
        """A new client, with a connection of its own."""
        return await Client.connect(self.address, namespace=namespace, data_converter=pydantic_data_converter)

    def create_schema(self) -> None:
        """Creates the databases, as the chart's jobs do."""
        for name, store in stores().items():
            tool = [
                *(str(self._programs["temporal-sql-tool"]), "--plugin", store["pluginName"]),
                *("--endpoint", "127.0.0.1", "--port", str(self._database_port), "--user", "postgres"),
                *("--database", store["databaseName"]),
            ]
            schema = f"postgresql/v12/{'visibility' if name == 'visibility' else 'temporal'}"
            steps = ("create",), ("setup-schema", "--version", "0.0"), ("update-schema", "--schema-name", schema)
            for step in steps:
                done = subprocess.run([*tool, *step], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + done.stderr

    async def start(self) -> None:
        """Starts all processes; returns when the server serves."""
        configuration = self._folder / "temporal.yaml"
        dynamic = self._folder / "dynamic.yaml"
        dynamic.write_text(yaml.safe_dump(values()["dynamicConfig"]))
        configuration.write_text(yaml.safe_dump(self._configuration(dynamic)))
        for service in services():
            await self._launch(service, configuration)

        async def serves() -> bool:
            for service, process in tuple(self._processes.items()):
                if process.returncode is not None:
                    # As Kubernetes does: with an empty database processes that start at once hinder each other.
                    await self._launch(service, configuration)
            try:
                await (await self.client("temporal-system")).count_workflows()
            except (RPCError, RuntimeError):
                return False
            return True

        await eventually(serves, what=self.said)

    async def _launch(self, service: str, configuration: Path) -> None:
        with (self._folder / f"{service}.log").open("a") as log:
            self._processes[service] = await asyncio.create_subprocess_exec(
                *(str(self._programs["temporal-server"]), "--allow-no-auth"),
                *("--config-file", str(configuration), "start", "--service", service),
                stdout=log,
                stderr=log,
            )

    async def prepare(self, namespace: str) -> None:
        """Creates a namespace with the search attributes of jobs; returns when it can be used."""
        client = await self.client(namespace)
        retention = Duration(seconds=int(timedelta(days=3).total_seconds()))
        await client.workflow_service.register_namespace(
            RegisterNamespaceRequest(namespace=namespace, workflow_execution_retention_period=retention)
        )
        kinds = {
            name: IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{kind.upper()}")
            for name, kind in SEARCH_ATTRIBUTES.items()
        }

        async def is_known() -> bool:
            try:
                await client.operator_service.add_search_attributes(
                    AddSearchAttributesRequest(namespace=namespace, search_attributes=kinds)
                )
                await client.count_workflows("JobPhase = 'RUNNING'")
            except RPCError:
                return False
            return True

        await eventually(is_known, what=self.said)

    async def end(self) -> None:
        """Kills all processes."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    def said(self) -> str:
        """The end of each process's log."""
        logs = {service: (self._folder / f"{service}.log").read_text()[-1000:] for service in self._processes}
        return "\n".join(f"{service}: {text}" for service, text in logs.items())

    def _configuration(self, dynamic: Path) -> dict[str, Any]:
        persistence = dict(values()["config"]["persistence"])
        own = {"connectAddr": f"127.0.0.1:{self._database_port}", "user": "postgres", "password": "any"}
        persistence["datastores"] = {
            name: {"sql": {field: value for field, value in store.items() if field not in _OF_THE_CHART} | own}
            for name, store in stores().items()
        }
        active = {"enabled": True, "initialFailoverVersion": 1, "rpcName": "frontend", "rpcAddress": self.address}
        return {
            "log": {"stdout": True, "level": "warn"},
            "persistence": persistence,
            "global": {"membership": {"maxJoinDuration": "30s", "broadcastAddress": "127.0.0.1"}},
            "services": {
                service: {"rpc": {"grpcPort": port, "membershipPort": self._members[service], "bindOnLocalHost": True}}
                for service, port in self._ports.items()
            },
            "clusterMetadata": {
                "enableGlobalNamespace": False,
                "failoverVersionIncrement": 10,
                "masterClusterName": "active",
                "currentClusterName": "active",
                "clusterInformation": {"active": active},
            },
            "dcRedirectionPolicy": {"policy": "noop"},
            "dynamicConfigClient": {"filepath": str(dynamic), "pollInterval": "10s"},
        }


@asynccontextmanager
async def configured_server(
    programs: Mapping[str, Path], folder: Path
) -> AsyncIterator[tuple[ConfiguredServer, PostgresServer]]:
    """Runs the server and its database while the context is open."""
    port = free_port()
    database = await asyncio.to_thread(PostgresServer, port=port, settings=database_settings())
    server = ConfiguredServer(programs, folder, port)
    try:
        await asyncio.to_thread(server.create_schema)
        await server.start()
        yield server, database
    finally:
        await server.end()
        await asyncio.to_thread(database.end)
