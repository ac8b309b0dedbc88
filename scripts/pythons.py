"""Provides root folders of Debian releases, whose Python is newer than this machine's, and runs commands in them.

A root is cached by its release's name outside of the checkout, and made anew once it is old: `sid` changes daily. A
command has its own mounts and processes, which end with it; it shares this machine's network and the user's caches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from perdure.local.go_build import Report
from scripts.cluster.binaries import BinariesMissing, exclusive
from scripts.debian import ensure_program
from scripts.setup import CACHE

PYTHONS = {"trixie": "3.13", "sid": "3.14"}
"""Debian's releases, and the Python that each has."""

_PACKAGES = "python3,python3-venv,ca-certificates"

_OLD = 30 * 24 * 3600.0
"""Seconds after which a root is made anew."""

_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

_ENTER = """
set -e
mount --bind "$CACHES" "$ROOT$CACHES"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
cd "$ROOT"
exec chroot "$ROOT" "$@"
"""
"""What a command is started by, in namespaces of its own: no mount outlasts it."""


def debian_root(suite: str, report: Report) -> Path:
    """Returns the root folder of a release, which is unpacked if it is missing or old.

    Raises:
        BinariesMissing: if there is none and none can be made.
    """
    if os.geteuid() != 0:
        raise BinariesMissing("Debian's releases are unpacked by root alone")
    root = CACHE / "debian" / suite
    with exclusive(root.with_name(f"{suite}.lock")):
        made = root.stat().st_mtime if root.exists() else 0.0
        if time.time() - made > _OLD:
            try:
                _unpack(suite, root, report)
            except BinariesMissing as missing:
                if not made:
                    raise
                report(f"{missing}; the {suite} of {time.strftime('%Y-%m-%d', time.gmtime(made))} is used")
    return root


def run_in(root: Path, command: Sequence[str], *, timeout: float, variables: Mapping[str, str]) -> str:
    """Runs a command as root of a Debian release, and ends all that it started.

    Args:
        root: The release's root folder.
        command: The program's path within the root, and its arguments.
        timeout: Seconds.
        variables: Its environment, besides PATH, HOME and certificates.

    Returns:
        What it has written.

    Raises:
        AssertionError: if it fails.
    """
    caches = CACHE.parent
    (root / caches.relative_to("/")).mkdir(parents=True, exist_ok=True)
    for name in ("/etc/resolv.conf", "/etc/hosts", _CERTIFICATES):
        if Path(name).exists():
            shutil.copyfile(name, root / name[1:])
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(Path.home()),
        "SSL_CERT_FILE": _CERTIFICATES,
        "ROOT": str(root),
        "CACHES": str(caches),
        **variables,
    }
    done = subprocess.run(
        [*words, "/bin/sh", "-c", _ENTER, "enter", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"`{' '.join(command)}` ended with exit code {done.returncode}:\n{done.stdout}"
    return done.stdout


def _unpack(suite: str, root: Path, report: Report) -> None:
    debootstrap = ensure_program(["debootstrap"], "debootstrap", report)
    report(f"Unpacking Debian {suite} (once a month: minutes) ...")
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f"{suite}-", ignore_cleanup_errors=True) as folder:
        made = Path(folder) / "root"
        command = [debootstrap, "--variant=minbase", f"--include={_PACKAGES}", suite, made, _mirror()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BinariesMissing(f"debootstrap failed: {(done.stdout + done.stderr)[-500:]}")
        os.utime(made)
        if root.exists():
            root.rename(Path(folder) / "old")
        made.rename(root)


def _mirror() -> str:
    """Returns the address from which this machine has its own packages."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (sites := done.stdout.split()):
        raise BinariesMissing("apt knows no mirror of Debian on this machine")
    return sites[0]
