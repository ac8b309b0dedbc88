"""The cluster's changes to the machine outside of its own folder, and how each is undone.

Every change carries the cluster's name or is below its folder, so that it can be found without a record. Only previous
values are recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from scripts.cluster.processes import kill_all

NAME = "perdure-cluster"

SERVICE_NETWORK = "10.213.0.0/24"
API_ADDRESS = "10.213.0.1"
"""The address of the API server and of the service `kubernetes`: pods reach it without kube-proxy."""
IPV6_ADDRESS = "fd13:ffff::1"
"""An address of this machine for pods, where it has IPv6; those of services are of IPv4 only."""
INTERFACE = "perdure"
"""The interface with the addresses of the API server and of the nodes."""

_SYSCTLS = (
    *("net/ipv4/ip_forward", "net/ipv4/conf/all/forwarding", "net/ipv4/conf/default/forwarding"),
    *("net/ipv6/conf/all/forwarding", "net/ipv6/conf/default/forwarding"),
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
"""Kernel settings that a kubelet or a network plugin changes."""

_CNI_RESULTS = Path("/var/lib/cni")
_CONTAINER_LOGS = Path("/var/log/containers")
_SHIM_SOCKETS = Path("/run/containerd")
_FOREIGN_FOLDERS = (
    *(_CNI_RESULTS, _CONTAINER_LOGS, _SHIM_SOCKETS),
    *(Path("/var/lib/kubelet"), Path("/usr/libexec/kubernetes")),
)
"""Folders that the programs use even if they are configured with others."""


def node_address(number: int) -> str:
    """Outside of the networks of services and pods, whose addresses the control plane hands out."""
    return f"10.213.255.{10 + number}"


def pod_network(number: int) -> str:
    return f"10.213.{1 + number}.0/24"


def has_ipv6() -> bool:
    """Returns whether this machine has addresses of IPv6. Pods then have one of each family, and so have nodes."""
    try:
        return bool(Path("/proc/net/if_inet6").read_text(encoding="ascii"))
    except OSError:
        return False


def node_address_of_ipv6(number: int) -> str:
    return f"fd13:ffff::{10 + number}"


def pod_network_of_ipv6(number: int) -> str:
    return f"fd13:{1 + number}::/64"


def bridge(number: int) -> str:
    """Returns the name of the bridge that connects a node's pods."""
    return f"{INTERFACE}{number}"


class Machine:
    """Prepares the machine for the cluster and restores its previous state."""

    def __init__(self, folder: Path, *, nodes: int) -> None:
        self._folder = folder
        self._nodes = nodes
        self._found = folder / "found.json"

    def prepare(self) -> None:
        """Records the values that will change, and creates the addresses and a control group for each node."""
        sysctls = {name: value for name in _SYSCTLS if (value := _read_sysctl(name)) is not None}
        folders = [str(folder) for folder in _FOREIGN_FOLDERS if folder.exists()]
        self._found.write_text(json.dumps({"sysctls": sysctls, "folders": folders}), encoding="utf-8")
        # A bridge needs no kernel modules beyond those of the network plugins.
        _ip("link", "add", INTERFACE, "type", "bridge")
        for address in (API_ADDRESS, *map(node_address, range(self._nodes))):
            _ip("address", "add", f"{address}/32", "dev", INTERFACE)
        for address in (IPV6_ADDRESS, *map(node_address_of_ipv6, range(self._nodes))) if has_ipv6() else ():
            _ip("address", "add", f"{address}/128", "dev", INTERFACE, "nodad")
        _ip("link", "set", INTERFACE, "up")
        _write_sysctl("net/ipv4/ip_forward", "1")
        for number in range(self._nodes):
            _make_control_group(f"{NAME}/{number}")

    def restore(self) -> None:
        """Undoes all changes, including those of earlier attempts. The cluster's processes must have ended."""
        self.end_pods()
        _unmount_below(self._folder)
        for interface in (INTERFACE, *map(bridge, range(self._nodes))):
            if Path("/sys/class/net", interface).exists():
                _ip("link", "delete", interface)
        for root in _control_groups(kinds=("cgroup", "cgroup2")):
            _remove_control_group(root / NAME)
        found = json.loads(self._found.read_text(encoding="utf-8")) if self._found.exists() else {}
        for name, value in found.get("sysctls", {}).items():
            _write_sysctl(name, value)
        self._clear_foreign_folders(found.get("folders", []))

    def end_pods(self) -> None:
        """Kills all processes in the nodes' control groups, and then their shims."""
        deadline = time.monotonic() + 20
        while running := {pid for root in _control_groups() for pid in _processes_in(root / NAME)}:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of pods do not end: {sorted(running)}")
            time.sleep(0.05)
        kill_all(process for process in psutil.process_iter(["name", "cmdline"]) if self._is_shim(process))

    def _is_shim(self, process: psutil.Process) -> bool:
        words = process.info["cmdline"] or []
        return process.info["name"].startswith("containerd-shim") and any(str(self._folder) in word for word in words)

    def _clear_foreign_folders(self, found_before: list[str]) -> None:
        for folder in _FOREIGN_FOLDERS:
            if folder.exists() and str(folder) not in found_before:
                shutil.rmtree(folder, ignore_errors=True)
        for network in map(bridge, range(self._nodes)):
            for result in _CNI_RESULTS.glob(f"results/{network}-*"):
                result.unlink(missing_ok=True)
        for link in _CONTAINER_LOGS.glob("*.log") if _CONTAINER_LOGS.exists() else ():
            if link.is_symlink() and str(self._folder) in os.readlink(link):
                link.unlink()


def leftovers(folder: Path, *, nodes: int) -> list[str]:
    """Returns the changes of a cluster that are still on the machine, for messages; empty if there are none."""
    interfaces = [name for name in (INTERFACE, *map(bridge, range(nodes))) if Path("/sys/class/net", name).exists()]
    roots = _control_groups(kinds=("cgroup", "cgroup2"))
    groups = [str(root / NAME) for root in roots if (root / NAME).exists()]
    return [*interfaces, *groups, *(str(path) for path in _mounts_below(folder))]


def _ip(*arguments: str) -> None:
    answer = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"`ip {' '.join(arguments)}` failed: {answer.stderr.strip()}")


def _read_sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return None


def _write_sysctl(name: str, value: str) -> None:
    if _read_sysctl(name) != value:
        Path("/proc/sys", name).write_text(value, encoding="ascii")


def unified_control_groups() -> bool:
    """Returns whether this machine has version 2 of control groups only."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def _control_groups(kinds: tuple[str, ...] = ("cgroup",)) -> list[Path]:
    """Returns the root of each hierarchy that kubelets use; if both versions are mounted, they use version 1."""
    if unified_control_groups():
        return [Path("/sys/fs/cgroup")]
    mounts = (line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    return [Path(fields[1]) for fields in mounts if fields[2] in kinds]


def _make_control_group(name: str) -> None:
    for root in _control_groups():
        group = root
        for part in Path(name).parts:
            if unified_control_groups():
                controllers = (group / "cgroup.controllers").read_text(encoding="ascii").split()
                (group / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in controllers))
            parent, group = group, group / part
            group.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                # Version 1 admits no process to a group without CPUs.
                if (parent / setting).exists() and not unified_control_groups():
                    (group / setting).write_text((parent / setting).read_text(encoding="ascii"))


def _processes_in(group: Path) -> Iterator[int]:
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            yield from map(int, Path(folder, "cgroup.procs").read_text(encoding="ascii").split())


def _remove_control_group(group: Path) -> None:
    if not group.exists():
        return
    for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    group.rmdir()


def _mounts_below(folder: Path) -> list[Path]:
    mounts = (line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    paths = (Path(mount.encode().decode("unicode_escape")) for mount in mounts)
    return sorted((path for path in paths if path.is_relative_to(folder)), reverse=True)


def _unmount_below(folder: Path) -> None:
    for mount in _mounts_below(folder):
        answer = subprocess.run(["umount", "--lazy", mount], capture_output=True, text=True, check=False)
        if answer.returncode:
            raise RuntimeError(f"`umount {mount}` failed: {answer.stderr.strip()}")
