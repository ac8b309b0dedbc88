"""Finds programs that come as wheels: an environment that has them needs no download and no build of its own."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def wheel_program(distribution: str, name: str) -> Path | None:
    """Returns a program of a wheel that is installed in this environment; None if the environment lacks it.

    Args:
        distribution: The wheel's name in the package index.
        name: The program's file name.
    """
    try:
        installed = files(distribution) or ()
    except PackageNotFoundError:
        return None
    paths = (Path(os.path.normpath(str(file.locate()))) for file in installed if file.name == name)
    return next((path for path in paths if os.access(path, os.X_OK) and path.is_file()), None)
