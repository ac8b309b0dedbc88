"""Builds the wheels that users install, from uv's cache where it has what builds them."""

from __future__ import annotations

from pathlib import Path

from scripts.setup import find_uv, run_from_cache


def built_wheel(project: Path, folder: Path) -> Path:
    """Builds the wheel of the project in a folder.

    Args:
        project: The folder with its `pyproject.toml`.
        folder: The empty folder for the wheel.
    """
    command = [find_uv(), "build", "--quiet", "--wheel", project, "-o", folder]
    run_from_cache(command, remedy="Check the network, then try again.")
    [wheel] = folder.glob("*.whl")
    return wheel
