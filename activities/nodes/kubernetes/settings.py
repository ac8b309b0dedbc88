"""Settings of a site for its pods: the agent's image, how agents reach the control plane, presets, and gangs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from perdure.activities.nodes.gateway import GatewayAccess, gateway_of
from perdure.activities.nodes.kubernetes.gangs import GangAdapter, OneByOne, adapter_of
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.log_format import FORMAT_VARIABLE

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

VARIABLES = "PERDURE_KUBERNETES_"
"""The prefix of the environment variables of these settings."""


_CREDENTIALS = re.compile(r"TEMPORAL_(API_KEY|CODEC_AUTH|GRPC_META_AUTHORIZATION|TLS_\w+_DATA)")
"""Temporal's variables that must not appear in pod manifests if a Secret holds them."""

_FILES = re.compile(r"TEMPORAL_(CONFIG_FILE|PROFILE|TLS_\w+_PATH)")
"""Temporal's variables that refer to files of the worker's machine."""


_REPORTING = re.compile(
    rf"{FORMAT_VARIABLE}|OTEL_(?!\w*(HEADERS|CERTIFICATE|CLIENT_KEY|SERVICE_NAME|RESOURCE_ATTRIBUTES))\w+"
)
"""Variables that agents in pods get from the worker: no credentials, no files, and no identity."""


_OWN_SECRETS = ("perdure-gateway", "perdure-payload-keys", "sh.helm.release.v1.*")
"""The key ring and the payload keys, as the documentation names them, and what Helm stores of a release."""

_OWN_ACCOUNTS = ("perdure-worker", "perdure-gateway", "perdure-operator")
"""Service accounts of the control plane in a release with the documentation's name."""


_PREPARE_RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
_AGENT_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "2", "memory": "512Mi"}}
"""Requests and limits of all that a ResourceQuota may count: where it counts a resource, the API server takes no pod
with a container that leaves it out."""


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """The settings of a site."""

    agent_image: str
    """The image with Perdure; the agent runs in it, and the launcher is copied from it."""
    agent_pull_policy: str = "IfNotPresent"
    prepare_resources: Mapping[str, Any] = field(default_factory=lambda: _PREPARE_RESOURCES)
    """The resources of the container `perdure-prepare`; a job's `pod_template` may change them."""
    agent_resources: Mapping[str, Any] = field(default_factory=lambda: _AGENT_RESOURCES)
    """The resources of the container `perdure-agent`; a job's `pod_template` may change them."""
    gateway: GatewayAccess | None = None
    """The gateway that agents connect to; with None they connect to Temporal itself."""
    connection: Mapping[str, str] = field(default_factory=dict[str, str])
    """Temporal's environment variables for agents that connect to it: the address at which pods reach it, its
    namespace, and all other settings that are not secret."""
    connection_secret: str | None = None
    """A Secret in the job's namespace whose keys are Temporal's environment variables, such as `TEMPORAL_API_KEY`."""
    reporting: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables for agents: the format of logs, and OpenTelemetry's without credentials."""
    presets_namespace: str = "default"
    """The namespace of the presets that `runtime` names. Users with write access to it decide about all jobs."""
    creates_at_once: int = 64
    """The number of concurrent requests for pods."""
    gangs: GangAdapter = field(default_factory=OneByOne)
    """The adapter of the site's gang system; by default each pod is admitted by itself."""
    agent_metrics_port: int | None = None
    """The port at which agents serve metrics, in every pod of a job; None for no port."""
    pod_annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    """Annotations of every pod of a job, such as what cluster-autoscaler needs to know; `pod_template` cannot change
    them."""
    policy: SitePolicy = field(default_factory=SitePolicy)
    """The site's policy: the limits on the pods of jobs."""
    reserved_secrets: tuple[str, ...] = _OWN_SECRETS
    """Secrets of the control plane, which no job may use; glob patterns."""
    reserved_accounts: tuple[str, ...] = _OWN_ACCOUNTS
    """Service accounts of the control plane, which no job may use; glob patterns."""
    namespace: str | None = None
    """The worker's own namespace, in which the reserved names count; None if it runs outside of the cluster: they then
    count in all."""

    def secrets_reserved_in(self, namespace: str) -> tuple[str, ...]:
        """Returns the Secrets that no job of this namespace may use."""
        connection = (self.connection_secret,) if self.connection_secret else ()
        return (*connection, *self._reserved_in(namespace, self.reserved_secrets))

    def accounts_reserved_in(self, namespace: str) -> tuple[str, ...]:
        """Returns the service accounts that no job of this namespace may use."""
        return self._reserved_in(namespace, self.reserved_accounts)

    def _reserved_in(self, namespace: str, names: tuple[str, ...]) -> tuple[str, ...]:
        return names if self.namespace in (None, namespace) else ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> KubernetesSettings:
        """Reads `PERDURE_KUBERNETES_AGENT_IMAGE` and its siblings.

        Without a gateway, Temporal's variables are passed to the agents, except those that a Secret holds or that
        refer to local files.

        Raises:
            ValueError: if the agent's image is not set, if agents could not authenticate, if the gang system is
                unknown, if the port for metrics is none, or if resources are not.
        """
        image = environment.get(f"{VARIABLES}AGENT_IMAGE")
        if not image:
            raise ValueError(f"{VARIABLES}AGENT_IMAGE is not set; name the image that holds Perdure's agent")
        gateway = gateway_of(
            environment, prefix=VARIABLES, temporal_namespace=environment.get("TEMPORAL_NAMESPACE") or "default"
        )
        connection, secret = ({}, None) if gateway else _direct_connection(environment)
        return cls(
            agent_image=image,
            agent_pull_policy=environment.get(f"{VARIABLES}AGENT_PULL_POLICY", cls.agent_pull_policy),
            prepare_resources=_resources(environment, f"{VARIABLES}PREPARE_RESOURCES", _PREPARE_RESOURCES),
            agent_resources=_resources(environment, f"{VARIABLES}AGENT_RESOURCES", _AGENT_RESOURCES),
            gateway=gateway,
            connection=connection,
            connection_secret=secret,
            reporting={name: value for name, value in environment.items() if _REPORTING.fullmatch(name)},
            presets_namespace=environment.get(f"{VARIABLES}PRESETS_NAMESPACE") or own_namespace(),
            gangs=_gangs(environment),
            agent_metrics_port=_port(environment, f"{VARIABLES}AGENT_METRICS_PORT"),
            pod_annotations=_annotations(environment, f"{VARIABLES}POD_ANNOTATIONS"),
            policy=_policy(environment),
            reserved_secrets=(*_OWN_SECRETS, *_names(environment, f"{VARIABLES}RESERVED_SECRETS")),
            reserved_accounts=(*_OWN_ACCOUNTS, *_names(environment, f"{VARIABLES}RESERVED_ACCOUNTS")),
            namespace=own_namespace() if _OWN_NAMESPACE.exists() else None,
        )


def _direct_connection(environment: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Returns the variables and the Secret of agents that connect to Temporal itself."""
    secret = environment.get(f"{VARIABLES}CONNECTION_SECRET")
    found = {name: value for name, value in environment.items() if name.startswith("TEMPORAL_")}
    for name in found:
        if name.endswith("_PATH") and not secret:
            raise ValueError(
                f"{name} names a file that pods do not have; put its content into a Secret of the jobs' "
                f"namespaces, as {name.removesuffix('_PATH')}_DATA, and name it in {VARIABLES}CONNECTION_SECRET"
            )
    connection = {
        name: value
        for name, value in found.items()
        if not (_FILES.fullmatch(name) or (secret and _CREDENTIALS.fullmatch(name)))
    }
    if address := environment.get(f"{VARIABLES}TEMPORAL_ADDRESS"):
        connection["TEMPORAL_ADDRESS"] = address
    return connection, secret or None


def _policy(environment: Mapping[str, str]) -> SitePolicy:
    path = environment.get(f"{VARIABLES}POLICY_FILE")
    if not path:
        return SitePolicy()
    try:
        return SitePolicy.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{VARIABLES}POLICY_FILE: {error}") from error


def _names(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in environment.get(variable, "").split(",") if name.strip())


def _annotations(environment: Mapping[str, str], variable: str) -> Mapping[str, str]:
    text = environment.get(variable, "")
    if not text:
        return {}
    try:
        return TypeAdapter(dict[str, str]).validate_json(text)
    except ValidationError as error:
        raise ValueError(
            f'{variable} is {text!r}; expected texts by name in JSON, such as {{"a.example/b": "c"}}'
        ) from error


def _port(environment: Mapping[str, str], variable: str) -> int | None:
    text = environment.get(variable, "")
    if not text:
        return None
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise ValueError(f"{variable} is {text!r}; expected a port from 1024 to 65535")
    return int(text)


class _Resources(BaseModel):
    """Resources of a container, as its manifest has them."""

    model_config = ConfigDict(extra="forbid")

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


def _resources(environment: Mapping[str, str], variable: str, default: Mapping[str, Any]) -> Mapping[str, Any]:
    text = environment.get(variable)
    if not text:
        return default
    try:
        return _Resources.model_validate_json(text).model_dump()
    except ValidationError as error:
        expected = 'expected resources of a container as JSON, such as {"limits": {"cpu": "1"}}'
        raise ValueError(f"{variable} is {text!r}; {expected}: {error.errors(include_url=False)[0]['msg']}") from error


def _gangs(environment: Mapping[str, str]) -> GangAdapter:
    system = environment.get(f"{VARIABLES}GANGS", "")
    try:
        priority_class = environment.get(f"{VARIABLES}ELASTIC_PRIORITY_CLASS", "")
        return adapter_of(system, elastic_priority_class=priority_class)
    except ValueError as error:
        raise ValueError(f"{VARIABLES}GANGS: {error}") from error


def own_namespace() -> str:
    """Returns the namespace of the pod that this process runs in; `default` outside of a cluster."""
    return _OWN_NAMESPACE.read_text(encoding="utf-8").strip() if _OWN_NAMESPACE.exists() else "default"
