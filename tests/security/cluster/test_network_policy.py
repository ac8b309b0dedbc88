"""What the chart's network policies mean for the pods of jobs, where the network enforces them.

The test cluster's network enforces none. So the rendered policies are evaluated here, as Kubernetes defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.chart import rendered

NAMED_PORTS = {"agents": 7433, "health": 8080, "metrics": 9464}
"""Those of the chart's containers."""


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster's pods."""

    address: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


JOB = Peer("10.1.0.5", "nlp", {"perdure.dev/job": "llama", "perdure.dev/role": "worker"})
SAME_NAMESPACE = Peer("10.1.0.6", "nlp", {"perdure.dev/job": "other"})
NO_JOB = Peer("10.1.0.7", "nlp", {"app": "notebook"})
OTHER_TENANT = Peer("10.1.0.8", "vision", {"perdure.dev/job": "llama"})
GATEWAY = Peer(
    "10.1.0.9",
    "perdure",
    {
        "app.kubernetes.io/name": "perdure",
        "app.kubernetes.io/instance": "perdure",
        "app.kubernetes.io/component": "gateway",
    },
)
WORKER = Peer("10.1.0.10", "perdure", {**GATEWAY.labels, "app.kubernetes.io/component": "worker"})
FALSE_GATEWAY = Peer("10.1.0.11", "vision", GATEWAY.labels)
TEMPORAL = Peer("10.1.0.12", "temporal", {"app.kubernetes.io/name": "temporal"})
NAME_SERVER = Peer("10.1.0.13", "kube-system", {"k8s-app": "kube-dns"})
NODE_LOCAL_CACHE = Peer("169.254.20.10")
"""NodeLocal DNSCache runs on the machine's network, so only its address selects it."""


@pytest.fixture
async def policies(helm: Path) -> list[dict[str, Any]]:
    """The policies of the chart's defaults, with one namespace of jobs."""
    return await policies_of(helm)


async def policies_of(helm: Path, **values: Any) -> list[dict[str, Any]]:
    objects = await rendered(helm, jobNamespaces=["nlp"], networkPolicy=values)
    return [one for one in objects if one["kind"] == "NetworkPolicy"]


DENIED = (
    (TEMPORAL, 7233),
    (WORKER, 9464),
    (WORKER, 8080),
    (GATEWAY, 8080),
    (FALSE_GATEWAY, 7433),
    (NO_JOB, 8888),
    (OTHER_TENANT, 29500),
    # The API server's Service, the API server itself, kubelets, the machines' metadata.
    (Peer("10.96.0.1"), 443),
    (Peer("172.20.0.1"), 6443),
    (Peer("192.168.1.10"), 10250),
    (Peer("100.64.3.1"), 10250),
    (Peer("169.254.169.254"), 80),
    (Peer("fd00:ec2::254"), 80),
    # A tunnel at the port of name servers, and name servers at others.
    (NO_JOB, 53),
    (OTHER_TENANT, 53),
    (Peer("10.1.0.14", "vision", NAME_SERVER.labels), 53),
    (Peer("10.96.0.1"), 53),
    (Peer("169.254.169.254"), 53),
    (NAME_SERVER, 9153),
    (NODE_LOCAL_CACHE, 9253),
)
PUBLIC = ((Peer("198.51.100.7"), 443), (Peer("198.51.100.8"), 7233), (Peer("198.51.100.9"), 6443))
"""A hub of models, Temporal Cloud, and an API server with a public address."""
ALLOWED = ((SAME_NAMESPACE, 29500), (GATEWAY, 7433), (NAME_SERVER, 53), (NODE_LOCAL_CACHE, 53))
STRANGERS = (NO_JOB, OTHER_TENANT, TEMPORAL, Peer("198.51.100.7"))


async def test_training_code_connects_to_its_peers_the_gateway_and_name_servers_only(
    policies: list[dict[str, Any]],
) -> None:
    assert [one for one in (*DENIED, *PUBLIC) if connects(policies, JOB, *one)] == []
    assert [one for one in ALLOWED if not connects(policies, JOB, *one)] == []


async def test_the_site_allows_single_addresses_the_internet_and_other_name_servers(helm: Path) -> None:
    hub, temporal, api = PUBLIC
    allowed = {"to": [{"ipBlock": {"cidr": "198.51.100.7/32"}}], "ports": [{"port": 443}]}
    listed = await policies_of(helm, jobsEgress=[allowed])
    assert [one for one in PUBLIC if connects(listed, JOB, *one)] == [hub]
    private = ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]
    public = await policies_of(helm, jobsInternet=True, jobsDenied=[*private, "198.51.100.9/32"])
    assert [one for one in PUBLIC if connects(public, JOB, *one)] == [hub, temporal]
    assert [one for one in DENIED if connects(public, JOB, *one)] == []
    service = await policies_of(helm, jobsDns=[{"ipBlock": {"cidr": "10.96.0.10/32"}}])
    assert connects(service, JOB, Peer("10.96.0.10"), 53)
    assert not connects(service, JOB, NAME_SERVER, 53)
    assert not connects(service, JOB, *api)


PUBLIC_6 = Peer("2001:db8::7")
PRIVATE_6 = (Peer("fd00:ec2::254"), Peer("fe80::1"), Peer("64:ff9b::a00:1"), Peer("::ffff:10.0.0.1"))
"""A machine's metadata, a neighbour, and private addresses of IPv4 behind a translation."""


async def test_the_internet_has_both_families_and_no_private_address_of_either(helm: Path) -> None:
    public = await policies_of(helm, jobsInternet=True)
    assert connects(public, JOB, PUBLIC_6, 443)
    assert [one for one in PRIVATE_6 if connects(public, JOB, one, 443)] == []
    assert [one for one in DENIED if connects(public, JOB, *one)] == []
    own = await policies_of(helm, jobsInternet=True, jobsDenied=["10.0.0.0/8", "2001:db8::/32"])
    assert not connects(own, JOB, PUBLIC_6, 443)
    assert connects(own, JOB, Peer("2001:4860::1"), 443)


async def test_a_site_that_has_listed_what_is_private_of_ipv4_alone_opens_no_ipv6(helm: Path) -> None:
    """Its list was complete until the policy knew of IPv6."""
    former = await policies_of(helm, jobsInternet=True, jobsDenied=["10.0.0.0/8", "192.168.0.0/16"])
    assert not connects(former, JOB, PUBLIC_6, 443)
    assert connects(former, JOB, *PUBLIC[0])


async def test_an_exception_is_of_the_family_of_its_block(helm: Path) -> None:
    """The API server takes no other."""
    policies = await policies_of(helm, jobsInternet=True)
    blocks = [
        peer["ipBlock"]
        for policy in policies
        for rule in policy["spec"].get("egress") or ()
        for peer in rule.get("to") or ()
        if "ipBlock" in peer
    ]
    assert len(blocks) > 2
    for block in blocks:
        for one in block.get("except") or ():
            assert ip_network(one).network_address in ip_network(block["cidr"])


async def test_strangers_reach_neither_pods_of_jobs_nor_the_gateway(policies: list[dict[str, Any]]) -> None:
    assert [one for one in STRANGERS if connects(policies, one, JOB, 29500)] == []
    assert [one for one in STRANGERS if connects(policies, one, GATEWAY, 7433)] == []


def connects(policies: list[dict[str, Any]], source: Peer, target: Peer, port: int) -> bool:
    """Whether the policies on both sides allow a TCP connection."""
    return _allowed(policies, "Egress", source, target, port) and _allowed(policies, "Ingress", target, source, port)


def _allowed(policies: list[dict[str, Any]], direction: str, pod: Peer, other: Peer, port: int) -> bool:
    rules, peers = direction.lower(), "to" if direction == "Egress" else "from"
    specs = [
        one["spec"]
        for one in policies
        if direction in one["spec"]["policyTypes"]
        and one["metadata"].get("namespace", "perdure") == pod.namespace
        and _selected(one["spec"]["podSelector"], pod.labels)
    ]
    return not specs or any(
        _port_matches(rule.get("ports"), port)
        and (peers not in rule or any(_peer_matches(one, pod.namespace, other) for one in rule[peers]))
        for spec in specs
        for rule in spec[rules]
    )


def _port_matches(ports: list[dict[str, Any]] | None, port: int) -> bool:
    return ports is None or any(
        NAMED_PORTS.get(str(one["port"]), one["port"]) == port and one.get("protocol", "TCP") == "TCP" for one in ports
    )


def _peer_matches(peer: dict[str, Any], own_namespace: str, other: Peer) -> bool:
    if block := peer.get("ipBlock"):
        address = ip_address(other.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(one) for one in block.get("except", ())
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _selected(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
    else:
        in_namespace = other.namespace == own_namespace
    return in_namespace and _selected(peer.get("podSelector", {}), other.labels)


def _selected(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    exact: Mapping[str, str] = selector.get("matchLabels") or {}
    return all(labels.get(name) == value for name, value in exact.items()) and all(
        _expression(one, labels) for one in selector.get("matchExpressions", ())
    )


def _expression(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    match one["operator"]:
        case "Exists":
            return one["key"] in labels
        case "In":
            return labels.get(one["key"]) in one["values"]
        case other:
            raise NotImplementedError(other)
