"""A real node: a kubelet with its own containerd and pod network; several of them run on one machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.cluster.binaries import packaged_file
from scripts.cluster.certificates import Certificates
from scripts.cluster.control_plane import SERVER
from scripts.cluster.images import PAUSE_IMAGE, Image
from scripts.cluster.machine import (
    NAME,
    bridge,
    has_ipv6,
    node_address,
    node_address_of_ipv6,
    pod_network,
    pod_network_of_ipv6,
)
from scripts.cluster.processes import Processes, await_that


class Node:
    """One of the cluster's nodes, named `real-<number>`."""

    def __init__(
        self,
        number: int,
        folder: Path,
        certificates: Certificates,
        processes: Processes,
        programs: Mapping[str, Path],
    ) -> None:
        self.name = f"real-{number}"
        self._number = number
        self._folder = folder / self.name
        self._certificates = certificates
        self._processes = processes
        self._programs = programs

    @property
    def _socket(self) -> Path:
        return self._folder / "containerd.sock"

    def start_containerd(self) -> None:
        """Starts the container runtime. Returns when it answers."""
        (self._folder / "cni").mkdir(parents=True, exist_ok=True)
        self._write("cni/10-bridge.conflist", _network(self._number, self._folder))
        self._write_containerd_configuration()
        # The shim and runc are found on PATH.
        folders = [str(self._programs["containerd"].parent), str(_package_file("runc").parent), "/usr/bin:/bin"]
        self._processes.start(
            f"{self.name}-containerd",
            [self._programs["containerd"], "--config", self._folder / "containerd.toml"],
            environment={"PATH": ":".join(folders)},
        )
        await_that(
            lambda: self._ctr("version").returncode == 0,
            what=f"containerd of {self.name} (see {self._processes.log(f'{self.name}-containerd')})",
            within=30,
        )

    def kill_containerd(self) -> None:
        """Kills the container runtime; containers continue below their shims."""
        self._processes.kill(f"{self.name}-containerd")

    def load(self, images: Sequence[Image]) -> None:
        """Imports the images that the node does not have yet."""
        known = self._ctr("images", "list", "--quiet").stdout.split()
        for image in images:
            if image.reference in known:
                continue
            answer = self._ctr("images", "import", str(image.archive))
            if answer.returncode:
                raise RuntimeError(f"{image.archive} could not be imported by {self.name}: {answer.stderr.strip()}")

    def start_kubelet(self, *, evicts_below: Mapping[str, str] | None = None, ipv6_first: bool = False) -> None:
        """Starts the kubelet, which registers the node by itself.

        Args:
            evicts_below: thresholds of node pressure by signal, such as `{"nodefs.available": "10%"}`. By default the
                kubelet never evicts for pressure.
            ipv6_first: has the pods that start from now on take their addresses of IPv6 for their own.
        """
        addresses = [
            node_address(self._number),
            *([node_address_of_ipv6(self._number)] if has_ipv6() else []),
        ]
        if ipv6_first:
            addresses.reverse()
        kubeconfig = self._certificates.kubeconfig(
            self.name, server=SERVER, user=f"system:node:{self.name}", groups=["system:nodes"]
        )
        certificate, key = self._certificates.issue(
            f"{self.name}-serving",
            user=self.name,
            hosts=[*(f"IP:{address}" for address in addresses), f"DNS:{self.name}"],
        )
        configuration = self._kubelet_configuration(addresses[0], certificate, key)
        configuration["evictionHard"] |= evicts_below or {}
        self._processes.start(
            f"{self.name}-kubelet",
            [
                self._programs["kubelet"],
                *("--kubeconfig", kubeconfig, "--config", self._write("kubelet.json", configuration)),
                *("--root-dir", self._folder / "kubelet", "--cert-dir", self._folder / "kubelet-pki"),
                *("--hostname-override", self.name, "--node-ip", ",".join(addresses)),
            ],
        )

    def kill_kubelet(self) -> None:
        """Kills the kubelet; containers continue."""
        self._processes.kill(f"{self.name}-kubelet")

    def _kubelet_configuration(self, address: str, certificate: Path, key: Path) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "address": address,
            "healthzBindAddress": address,
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(key),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._certificates.authority)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{NAME}/{self._number}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            # Evicts pods that exceed the limits of their volumes.
            "localStorageCapacityIsolation": True,
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(self._folder / "pod-logs"),
            "volumePluginDir": str(self._folder / "volume-plugins"),
            "registryPullQPS": 0,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
            "syncFrequency": "10s",
        }

    def _write_containerd_configuration(self) -> None:
        binaries = _package_file("containernetworking-plugins").parent
        text = f"""\
version = 3
root = "{self._folder}/containerd"
state = "{self._folder}/containerd-state"
[grpc]
  address = "{self._socket}"
[plugins.'io.containerd.internal.v1.opt']
  path = "{self._folder}/opt"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  # Works also if this machine is a container that may not lower the score.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{binaries}"]
    conf_dir = "{self._folder}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
"""
        (self._folder / "containerd.toml").write_text(text, encoding="utf-8")

    def _write(self, name: str, content: Any) -> Path:
        path = self._folder / name
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return path

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._programs["ctr"]), "--address", str(self._socket), "--namespace", "k8s.io", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def _network(number: int, folder: Path) -> dict[str, Any]:
    networks = [("0.0.0.0/0", pod_network(number)), *([("::/0", pod_network_of_ipv6(number))] if has_ipv6() else [])]
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": network}] for _, network in networks],
        "routes": [{"dst": everywhere} for everywhere, _ in networks],
    }
    # Routed, not masqueraded: pods reach each other and this machine only, by their own addresses.
    plugin = {"type": "bridge", "bridge": bridge(number), "isGateway": True, "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": bridge(number), "plugins": [plugin]}


def _package_file(package: str) -> Path:
    found = packaged_file(package)
    if found is None:
        found = Path(shutil.which(package) or f"/no-{package}")
    return found
