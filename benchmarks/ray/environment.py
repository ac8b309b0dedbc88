"""Installs Ray Train into an environment of its own, whose ranks use the checkout's torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

from scripts.environments import make_environment
from scripts.ray_environment import RELEASE
from scripts.setup import CACHE

_PROGRAMS = Path(__file__).with_name("programs")


def ensure() -> Path:
    """Returns the environment's interpreter.

    Raises:
        SetupFailed: if it cannot be created.
    """
    packages = [f"ray[train]=={RELEASE}", "setuptools"]
    return make_environment(CACHE / "ray" / f"{RELEASE}-train", ["install", *packages], size="0.6 GB")


def variables() -> Mapping[str, str]:
    """Returns the variables by which that interpreter finds torch: `sitecustomize.py` appends its folder."""
    return {"PYTHONPATH": str(_PROGRAMS), "BENCH_PACKAGES": sysconfig.get_path("purelib")}
