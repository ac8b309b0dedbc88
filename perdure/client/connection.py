"""Finds the control plane: from Temporal's own environment configuration, else the local default's server.

It uses Temporal's own configuration only, so that a user who can run `temporal workflow list` can run `perdure list`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self
from urllib.parse import quote

from pydantic import BaseModel
from temporalio.client import Client as TemporalClient
from temporalio.envconfig import ClientConfigProfile
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RetryConfig

from perdure.base.encryption.codec import PayloadEncryption, Plain
from perdure.base.encryption.keys import PayloadKeys
from perdure.base.errors import ControlPlaneUnreachable
from perdure.base.files import read_record
from perdure.base.state_folder import StateFolder
from perdure.base.text_variables import text_variables
from perdure.base.tracing import interceptors
from perdure.contract.names import WORKER_TASK_QUEUE
from perdure_training.node_api.addresses import host_and_port

CONNECT_TIMEOUT = timedelta(seconds=5)
"""The longest wait for a connection: a person waits, and an available server answers in milliseconds."""

CALL_TIMEOUT = timedelta(seconds=5)
"""The limit of one call of a client, including retries."""

UI_VARIABLE = "PERDURE_UI"
"""Address of the Temporal UI, for control planes other than the local default's, which knows its own."""

UI_BACKEND_VARIABLE = "PERDURE_UI_BACKEND"
"""Address at which the local default's UI listens, for its worker, which serves it at `PERDURE_UI`."""

TASK_QUEUE_VARIABLE = "PERDURE_TASK_QUEUE"
"""The task queue of workers and of the jobs for them: several sites may share one Temporal namespace."""


def configured_task_queue() -> str:
    """The task queue that the environment names, else the usual one."""
    return os.environ.get(TASK_QUEUE_VARIABLE) or WORKER_TASK_QUEUE


class LocalServer(BaseModel, frozen=True):
    """The address of the local default's server; a part of the content of `temporal/server.json`."""

    ip: str = "127.0.0.1"
    port: int
    ui_port: int
    host: str = ""
    """The machine that it runs on; empty in records of older releases."""

    @property
    def address(self) -> str:
        return host_and_port(self.ip, self.port)

    @property
    def ui(self) -> str:
        return f"http://127.0.0.1:{self.ui_port}"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of the control plane."""

    address: str
    namespace: str = "default"
    """Temporal's namespace, not the job's."""
    task_queue: str = field(default_factory=configured_task_queue)
    """The task queue on which jobs are started, and which workers serve."""
    ui: str = ""
    """Address of the Temporal UI; empty where that is unknown."""
    state: StateFolder | None = None
    """The state folder of the local default; None if the address was configured."""
    host: str = ""
    """The machine on which the local default was started; empty where that is unknown."""

    @property
    def is_local_default(self) -> bool:
        return self.state is not None

    def workflow_page(self, workflow_id: str, run_id: str = "") -> str:
        """Address of a workflow's page in the Temporal UI; empty where that is unknown."""
        if not self.ui:
            return ""
        page = f"{self.ui}/namespaces/{quote(self.namespace, safe='')}/workflows/{quote(workflow_id, safe='')}"
        return f"{page}/{run_id}" if run_id else page


def configured_endpoint(address: str | None = None) -> Endpoint | None:
    """The endpoint that the command line or Temporal's environment configuration names; None if neither does."""
    profile = load_profile()
    if not (address or profile.address):
        return None
    return Endpoint(
        address=address or profile.address or "",
        namespace=profile.namespace or "default",
        ui=os.environ.get(UI_VARIABLE, "").rstrip("/"),
    )


def find_endpoint(address: str | None = None, *, state: StateFolder | None = None) -> Endpoint:
    """The endpoint to use: a configured one, else that of the server that was started from the state folder.

    Raises:
        ControlPlaneUnreachable: if there is neither.
        StateFolderError: if the state folder belongs to another release.
    """
    if endpoint := configured_endpoint(address):
        return endpoint
    state = state or StateFolder()
    state.check_version()
    if record := read_record(state.server_record, LocalServer):
        return local_endpoint(record, state)
    raise ControlPlaneUnreachable(
        f"no Temporal server: none is configured, and none was started from {state.path}",
        remedy="`perdure run …` and `perdure worker --detach` start a local one; TEMPORAL_ADDRESS names another.",
    )


def local_endpoint(record: LocalServer, state: StateFolder) -> Endpoint:
    return Endpoint(address=record.address, task_queue=WORKER_TASK_QUEUE, ui=record.ui, state=state, host=record.host)


def load_profile() -> ClientConfigProfile:
    """Temporal's environment configuration: variables, and the profile of its file.

    Raises:
        ControlPlaneUnreachable: if it cannot be read.
    """
    try:
        return ClientConfigProfile.load(override_env_vars=text_variables())
    except Exception as error:  # The SDK raises RuntimeError and others, from its Rust core.
        raise ControlPlaneUnreachable(
            f"Temporal's environment configuration cannot be read: {error}",
            remedy="Check the TEMPORAL_* variables and `temporal config list`.",
        ) from error


class Connection:
    """A connection to a control plane, made when it is entered or first used."""

    def __init__(
        self,
        *,
        address: str | None = None,
        namespace: str = "default",
        endpoint: Endpoint | None = None,
        temporal: TemporalClient | None = None,
    ) -> None:
        """Creates a client; it connects when it is entered or first used.

        Args:
            address: The Temporal server, as host:port. The default is Temporal's environment configuration, else the
                local server that `perdure run` started.
            namespace: The jobs' namespace, for calls that do not name one.
            endpoint: A known control plane, such as one that `LocalControlPlane.ensure` started; used instead of the
                address.
            temporal: A connection to use instead; it must convert data with pydantic's converter.
        """
        self.namespace = namespace
        self._address = address
        self._temporal = temporal
        self._endpoint = endpoint

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._temporal = None

    async def connect(self) -> TemporalClient:
        """Connects unless the client is connected; returns Temporal's own client."""
        if self._temporal is None:
            self._temporal = await connect(self.endpoint)
        return self._temporal

    @property
    def endpoint(self) -> Endpoint:
        """The address and the namespace of the control plane."""
        if self._endpoint is None:
            if self._temporal is not None:
                config = self._temporal.service_client.config
                self._endpoint = Endpoint(address=config.target_host, namespace=self._temporal.namespace)
            else:
                self._endpoint = find_endpoint(self._address)
        return self._endpoint


async def connect(
    endpoint: Endpoint,
    *,
    identity: str | None = None,
    runtime: Runtime | None = None,
    patient: bool = False,
    part: str = "client",
) -> TemporalClient:
    """Connects to Temporal.

    Args:
        endpoint: The result of `find_endpoint`.
        identity: The name in Temporal; the default names process and host.
        runtime: The SDK's runtime; the default one logs errors only.
        patient: For a worker: calls are retried for as long as the SDK would by itself.
        part: The part of Perdure that this process is, for traces.

    Raises:
        ControlPlaneUnreachable: if the server does not answer.
        PayloadKeysError: if the keys that encrypt payloads cannot be used.
    """
    encryption = payload_encryption(endpoint)
    config = {} if endpoint.is_local_default else dict(load_profile().to_client_connect_config())
    config.update(target_host=endpoint.address, namespace=endpoint.namespace)
    if identity:
        config["identity"] = identity
    if not patient:
        config["retry_config"] = RetryConfig(max_elapsed_time_millis=int(CALL_TIMEOUT.total_seconds() * 1000))
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
            client = await TemporalClient.connect(
                **config,  # pyrefly: ignore[bad-argument-type]  # The SDK's own keys and types, by its TypedDict.
                data_converter=encryption.data_converter,
                runtime=runtime or quiet_runtime(),
                interceptors=interceptors(part),
            )
    except TimeoutError as error:
        raise unreachable(endpoint, "no answer in time") from error
    except (RuntimeError, OSError) as error:
        raise unreachable(endpoint, _reason(str(error))) from error
    encryption.use(client)
    return client


def payload_encryption(endpoint: Endpoint) -> PayloadEncryption:
    """The payload codec for an endpoint: with the state folder's keys for the local default, where unencrypted payloads
    are refused, else as the environment configures it.

    Raises:
        PayloadKeysError: if the keys cannot be used.
    """
    state = endpoint.state
    if state is None:
        configured, state = PayloadEncryption.from_environment(), StateFolder()
        if configured.keys or not _is_server_of(state, endpoint.address):
            return configured
    path = state.payload_keys
    return PayloadEncryption.of(PayloadKeys(path), Plain.REFUSE) if path.exists() else PayloadEncryption.of(None)


def _is_server_of(state: StateFolder, address: str) -> bool:
    """Whether a configured address is that of the local default's server."""
    record = read_record(state.server_record, LocalServer)
    return record is not None and address.replace("localhost:", "127.0.0.1:") == record.address


def quiet_runtime() -> Runtime:
    """The process's runtime, with the SDK's own log lines kept out of what users read."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime(
            telemetry=TelemetryConfig(
                logging=LoggingConfig(filter=TelemetryFilter(core_level="OFF", other_level="OFF"))
            ),
            disable_environment_info=True,
        )
    return _runtime


_runtime: Runtime | None = None


def unreachable(endpoint: Endpoint, reason: str) -> ControlPlaneUnreachable:
    """The error for a server that does not answer, with what to do about it."""
    if endpoint.is_local_default and endpoint.host not in ("", socket.gethostname()):
        remedy = (
            f"It was started on {endpoint.host}: use its jobs there. Where that machine does not run it any more, "
            "`perdure worker --detach` starts it here with its database."
        )
    elif endpoint.is_local_default:
        remedy = (
            "Running nodes continue to train without it. `perdure worker --detach` starts it again with its database."
        )
    else:
        remedy = (
            "Running nodes continue to train without it. Check TEMPORAL_ADDRESS and `temporal operator cluster health`."
        )
    return ControlPlaneUnreachable(
        f"the Temporal server at {endpoint.address} does not answer: {reason}", remedy=remedy
    )


def _reason(text: str) -> str:
    """The useful end of the SDK's nested errors."""
    for known, words in (
        ("Connection refused", "connection refused"),
        ("dns error", "its host name is unknown"),
        ("deadline", "no answer in time"),
        ("timed out", "no answer in time"),
        ("Unauthenticated", "it refused our credentials"),
        ("certificate", "TLS certificates do not match"),
    ):
        if known.lower() in text.lower():
            return words
    return text.splitlines()[0][:200]
