"""Starts and ends the cluster: one per machine, shared by all its users, and ended when the last of them leaves.

/var/lib/perdure-cluster/
    lock            held while the cluster starts or ends
    users           locked, shared, by every process that uses the cluster
    kept            exists if the cluster keeps running after its last user
    logs/           logs of all processes; kept when the cluster ends
    state/          everything else
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.cluster import binaries, images
from scripts.cluster.binaries import BinariesMissing, Report
from scripts.cluster.certificates import Certificates
from scripts.cluster.control_plane import CONTROL_PLANE, SERVER, ControlPlane
from scripts.cluster.images import Image
from scripts.cluster.machine import NAME, Machine, leftovers
from scripts.cluster.node import Node
from scripts.cluster.processes import Processes, await_that

NODES = 2
FOLDER = Path("/var/lib") / NAME


class ClusterUnavailable(Exception):
    """No cluster can run here; the message says why."""


def why_not() -> str:
    """Returns why this machine cannot run a cluster; empty if it can."""
    if sys.platform != "linux":
        return f"kubelets need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "kubelets and containerd need root"
    return ""


class Cluster:
    """The machine's cluster, running or not."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._state = folder / "state"
        self._machine = Machine(self._state, nodes=NODES)
        self._processes = Processes(records=self._state / "processes", logs=folder / "logs")
        self.certificates = Certificates(self._state / "pki")
        self.kubeconfig = self._state / "pki" / "admin.kubeconfig"
        self.logs = folder / "logs"

    @property
    def running(self) -> bool:
        """Whether all processes of the cluster run."""
        names = self._processes.names()
        return (self._state / "up").exists() and bool(names) and not self._processes.ended_processes()

    def up(self, report: Report, *, keep: bool) -> None:
        """Starts the cluster if it does not run; concurrent calls take turns.

        Args:
            report: receives progress messages.
            keep: whether the cluster keeps running after its last user.

        Raises:
            ClusterUnavailable: if this machine cannot run a cluster.
            BinariesMissing: if a program can be neither found nor built.
        """
        if reason := why_not():
            raise ClusterUnavailable(reason)
        with self._lock(report):
            if not self.running:
                self._clear()
                try:
                    self._start(report)
                except BaseException:
                    self._clear()
                    raise
            if keep:
                (self._folder / "kept").touch()

    def down(self) -> list[str]:
        """Ends the cluster and undoes its changes to the machine; returns the changes that could not be undone."""
        if reason := why_not():
            raise ClusterUnavailable(reason)
        with self._lock():
            (self._folder / "kept").unlink(missing_ok=True)
            self._clear()
        return leftovers(self._folder, nodes=NODES)

    @contextlib.contextmanager
    def use(self, report: Report) -> Iterator[Cluster]:
        """Provides a running cluster while the context is open. The last user ends the cluster unless it is kept."""
        self.up(report, keep=False)
        with (self._folder / "users").open("w") as users:
            fcntl.flock(users, fcntl.LOCK_SH)
            # The last user may have ended the cluster before this process took the lock.
            self.up(report, keep=False)
            try:
                yield self
            finally:
                self._leave(users.fileno())

    def load_perdure_image(self, code: Path = images.ROOT) -> Image:
        """Builds Perdure's image from this checkout, or from the code in another folder, and loads it into all
        nodes."""
        with self._lock():
            image = images.perdure_image(self._state / "images", code)
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda node: node.load([image]), self.nodes()))
        return image

    def kill_api_server(self) -> None:
        """Kills the API server; nodes and pods continue without it."""
        self._processes.kill("kube-apiserver")

    def start_api_server(self, *, awaited: bool = True) -> None:
        """Starts the API server. Returns when it answers, unless that is not to be awaited."""
        control_plane = self._control_plane(binaries.ensure(lambda _: None))
        control_plane.start_api_server()
        if awaited:
            control_plane.await_api_server()

    def kill_control_plane(self) -> None:
        """Kills etcd, the API server, the controllers and the scheduler; nodes and pods continue without them."""
        self._processes.kill(*CONTROL_PLANE)

    def start_control_plane(self) -> None:
        """Starts the control plane with the state that it had. Returns when the API server answers."""
        self._control_plane(binaries.ensure(lambda _: None)).start_programs()

    def kubeconfig_of(self, user: str, *groups: str) -> Path:
        """Returns a kubeconfig of a user with the rights that RBAC grants."""
        # A colon separates the paths of several kubeconfigs.
        name = f"user-{user.replace(':', '.')}"
        return self.certificates.kubeconfig(name, server=SERVER, user=user, groups=groups)

    def nodes(self) -> list[Node]:
        programs = binaries.ensure(lambda _: None)
        return [Node(number, self._state, self.certificates, self._processes, programs) for number in range(NODES)]

    def _control_plane(self, programs: Mapping[str, Path]) -> ControlPlane:
        return ControlPlane(self._state, self.certificates, self._processes, programs)

    def _leave(self, users: int) -> None:
        with self._lock():
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            if (self._folder / "kept").exists():
                return
            self._clear()
        if left := leftovers(self._folder, nodes=NODES):
            raise RuntimeError(f"the cluster left behind: {', '.join(left)}")

    def _start(self, report: Report) -> None:
        programs = binaries.ensure(report)
        report(f"Starting a Kubernetes {binaries.KUBERNETES} cluster of {NODES} nodes; its logs: {self.logs}")
        started = time.monotonic()
        shutil.rmtree(self.logs, ignore_errors=True)
        self._state.mkdir(parents=True)
        self._machine.prepare()
        self.certificates.create()
        control_plane = self._control_plane(programs)
        nodes = [Node(number, self._state, self.certificates, self._processes, programs) for number in range(NODES)]
        with ThreadPoolExecutor() as pool:
            controlling = pool.submit(control_plane.start)
            bare = images.bare_images(self._state / "images")
            for node in nodes:
                node.start_containerd()
            list(pool.map(lambda node: node.load(bare), nodes))
            controlling.result()
        for node in nodes:
            # One after the other: every kubelet binds the same socket of device plugins, after it has removed a former
            # one's, and ends where another has bound it in between.
            node.start_kubelet()
            await_that(
                lambda node=node: control_plane.has_ready_node(node.name),
                what=f"{node.name} is not ready; see {self.logs}",
                within=60,
            )
        (self._state / "up").touch()
        report(f"  up in {time.monotonic() - started:.0f} s: export KUBECONFIG={self.kubeconfig}")

    def _clear(self) -> None:
        """Ends all processes and removes all state, whatever state the cluster is in."""
        names = self._processes.names()
        kubelets = [name for name in names if name.endswith("kubelet")]
        runtimes = [name for name in names if name.endswith("containerd")]
        # Kubelets end first, so that none restarts a killed container; runtimes end after the shims, so that none
        # misses one.
        self._processes.kill(*kubelets)
        self._machine.end_pods()
        self._processes.kill(*runtimes)
        self._processes.kill(*(name for name in names if name not in (*kubelets, *runtimes)))
        self._machine.restore()
        if self._state.exists():
            shutil.rmtree(self._state)

    @contextlib.contextmanager
    def _lock(self, report: Report = print) -> Iterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"Another process starts or ends the cluster, or loads images into it; waiting for {lock.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


__all__ = ["BinariesMissing", "Cluster", "ClusterUnavailable", "why_not"]
