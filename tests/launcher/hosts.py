"""Simulated machines with networks of their own: network namespaces of this machine (Linux, root).

They have no names and contain only a sleeping process, which the kernel ends with this one; so nothing can be left
behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from perdure_launcher.system.processes import die_with_parent
from tests.support.waiting import wait_for

_PATIENCE = 10.0


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    pid: int
    """The PID of the process that keeps the namespace."""

    @property
    def entry(self) -> list[str]:
        """The command that starts a program in the namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def ip(self, *arguments: str) -> None:
        run(*self.entry, "ip", *arguments)

    def give(self, address: str, interface: str) -> None:
        """Adds an address with the network around it, to be used at once."""
        how = ["nodad"] if ":" in address else []
        self.ip("address", "add", f"{address}/{64 if how else 24}", "dev", interface, *how)


def unavailable() -> str:
    """Why there can be no hosts on this machine; empty where there can."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines joined by their second interfaces, `eth1`. Their first ones, `eth0`, lead nowhere."""
    with _host() as one, _host() as other:
        run(*_ends("eth1", one, other))
        for host in (one, other):
            host.ip("link", "set", "lo", "up")
            run(*_ends("eth0", host, host, peer="nowhere"))
            host.give("198.51.100.1", "eth0")
            for interface in ("eth0", "nowhere", "eth1"):
                host.ip("link", "set", interface, "up")
        yield one, other


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_PATIENCE)


def _ends(name: str, one: Host, other: Host, *, peer: str | None = None) -> list[str]:
    there = ["peer", "name", peer or name, "netns", str(other.pid)]
    return ["ip", "link", "add", name, "netns", str(one.pid), "type", "veth", *there]


@contextlib.contextmanager
def _host() -> Iterator[Host]:
    holder = subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"],
        preexec_fn=die_with_parent,  # noqa: PLW1509 - a system call only
    )
    try:
        own = os.readlink("/proc/self/ns/net")
        wait_for(
            lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, within=_PATIENCE, what="unshare makes a namespace"
        )
        yield Host(holder.pid)
    finally:
        holder.kill()
        holder.wait()
