"""Generated pages of `docs`: `make docs` writes them, and a test verifies that they are current."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts import losses
from scripts.docs import command_line, limits, metrics, notification, python_api, site_policy, specification

FOLDER = Path(__file__).resolve().parents[2] / "docs"

PAGES: Mapping[str, Callable[[], str]] = {
    "checkpoints.md": losses.reference,
    "cli.md": command_line.reference,
    "limits.md": limits.reference,
    "metrics.md": metrics.reference,
    "notification.v1.json": notification.schema,
    "python-api.md": python_api.reference,
    "site-policy.md": site_policy.reference,
    "spec.md": specification.reference,
}
"""Functions that return each page's content, by the file's name."""
