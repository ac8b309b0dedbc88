"""The control plane: etcd, API server, controller manager and scheduler, and KWOK, which simulates nodes."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from scripts.cluster.certificates import Certificates
from scripts.cluster.machine import API_ADDRESS, SERVICE_NETWORK
from scripts.cluster.processes import Processes, await_that

SERVER = f"https://{API_ADDRESS}:443"
_LOOPBACK = "127.213.0.1"
"""A loopback address on which no other etcd listens."""
ETCD = f"http://{_LOOPBACK}:2379"
_CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
CONTROL_PLANE = ("kube-apiserver", "etcd", *_CONTROLLERS)
"""The names of the processes that a cluster's control plane consists of; KWOK only simulates nodes."""
_GATES = "GenericWorkload=true,GangScheduling=true"
"""Feature gates of Kubernetes' own gang scheduling, which is still alpha; they do not affect pods outside of gangs."""


class ControlPlane:
    """The control plane's processes on this machine, with their state below one folder."""

    def __init__(
        self, folder: Path, certificates: Certificates, processes: Processes, programs: Mapping[str, Path]
    ) -> None:
        self._folder = folder
        self._certificates = certificates
        self._processes = processes
        self._programs = programs
        self.kubeconfig = folder / "pki" / "admin.kubeconfig"

    def start(self) -> None:
        """Starts all processes. Returns when the API server answers; the others may still be starting."""
        self._certificates.kubeconfig("admin", server=SERVER, user="admin", groups=["system:masters"])
        for name in _CONTROLLERS:
            self._certificates.kubeconfig(name, server=SERVER, user=f"system:{name}")
        self._certificates.kubeconfig("kwok", server=SERVER, user="kwok", groups=["system:masters"])
        self._certificates.issue(
            "apiserver", user="kube-apiserver", hosts=[f"IP:{API_ADDRESS}", "DNS:kubernetes.default.svc"]
        )
        self._certificates.issue("kubelet-client", user="kube-apiserver-kubelet-client", groups=["system:masters"])
        self.start_programs()
        self._start_kwok()

    def start_programs(self) -> None:
        """Starts the processes of `CONTROL_PLANE`, with the state that an earlier start left."""
        self._start_etcd()
        self.start_api_server()
        self.await_api_server()
        for name in _CONTROLLERS:
            self._start_controller(name)

    def start_api_server(self) -> None:
        pki = self._folder / "pki"
        self._processes.start(
            "kube-apiserver",
            [
                self._programs["kube-apiserver"],
                *("--etcd-servers", ETCD),
                *("--bind-address", API_ADDRESS, "--advertise-address", API_ADDRESS, "--secure-port", "443"),
                *("--tls-cert-file", pki / "apiserver.crt", "--tls-private-key-file", pki / "apiserver.key"),
                *("--client-ca-file", self._certificates.authority),
                *("--kubelet-preferred-address-types", "InternalIP"),
                *("--kubelet-certificate-authority", self._certificates.authority),
                *("--kubelet-client-certificate", pki / "kubelet-client.crt"),
                *("--kubelet-client-key", pki / "kubelet-client.key"),
                *("--service-account-issuer", "https://kubernetes.default.svc"),
                *("--service-account-key-file", self._certificates.service_account_key),
                *("--service-account-signing-key-file", self._certificates.service_account_key),
                *("--service-cluster-ip-range", SERVICE_NETWORK),
                *("--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction"),
                *("--feature-gates", _GATES, "--runtime-config", "scheduling.k8s.io/v1alpha2=true"),
                "--allow-privileged",
            ],
        )

    def await_api_server(self) -> None:
        await_that(self.ready, what=f"the API server (see {self._processes.log('kube-apiserver')})", within=300)

    def ready(self) -> bool:
        """Returns whether the API server answers."""
        return self._get("/readyz") is not None

    def has_ready_node(self, name: str) -> bool:
        """Returns whether the node is ready for pods."""
        answer = self._get(f"/api/v1/nodes/{name}")
        conditions = json.loads(answer)["status"].get("conditions", []) if answer else []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _get(self, path: str) -> bytes | None:
        trust = ssl.create_default_context(cafile=str(self._certificates.authority))
        trust.load_cert_chain(self._folder / "pki" / "admin.crt", self._folder / "pki" / "admin.key")
        try:
            with urllib.request.urlopen(f"{SERVER}{path}", context=trust, timeout=2) as answer:
                return answer.read()
        except OSError:
            return None

    def _start_etcd(self) -> None:
        client, peer = ETCD, f"http://{_LOOPBACK}:2380"
        self._processes.start(
            "etcd",
            [
                self._programs["etcd"],
                *("--data-dir", self._folder / "etcd", "--unsafe-no-fsync"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}"),
            ],
        )

    def _start_controller(self, name: str) -> None:
        # The default client limits are meant for small clusters; a thousand pods reach them at once.
        command: list[str | Path] = [
            self._programs[name],
            *("--kubeconfig", self._folder / "pki" / f"{name}.kubeconfig"),
            *("--leader-elect=false", "--bind-address", _LOOPBACK),
            *("--kube-api-qps", "1000", "--kube-api-burst", "2000"),
        ]
        if name == "kube-controller-manager":
            command += [
                *("--service-account-private-key-file", self._certificates.service_account_key),
                *("--root-ca-file", self._certificates.authority),
                "--use-service-account-credentials",
                # Half of the default, because tests wait for it. Kubelets report every 10 s.
                *("--node-monitor-grace-period", "24s"),
            ]
        else:
            command += ["--feature-gates", _GATES]
        self._processes.start(name, command)

    def _start_kwok(self) -> None:
        configuration = {
            "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
            "kind": "KwokConfiguration",
            "options": {
                "manageNodesWithAnnotationSelector": "kwok.x-k8s.io/node=fake",
                "cidr": "10.214.0.0/16",
                "nodeIP": "10.214.255.254",
                "nodeLeaseDurationSeconds": 40,
            },
        }
        path = self._folder / "kwok.json"
        path.write_text(json.dumps(configuration), encoding="utf-8")
        self._processes.start(
            "kwok",
            [
                self._programs["kwok"],
                *("--kubeconfig", self._folder / "pki" / "kwok.kubeconfig", "--config", path),
                *("--server-address", f"{_LOOPBACK}:10247"),
            ],
        )
