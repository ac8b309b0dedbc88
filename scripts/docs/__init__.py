"""The pages of `docs` that are generated, so that they say what is true: by `make docs`, held current by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.docs import command_line, python_api, specification

FOLDER = Path(__file__).resolve().parents[2] / "docs"

PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": command_line.reference,
    "python-api.md": python_api.reference,
    "spec.md": specification.reference,
}
"""By the file's name, what it must hold."""
