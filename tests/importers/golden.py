"""Expected results of importing each fixture; `python -m tests.importers.golden` writes them again."""

from __future__ import annotations

from pathlib import Path

import yaml

from perdure.spec.importers.documents import Imported, import_documents
from perdure.spec.job import Backend
from perdure.spec.load import read_documents

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.yaml"))
_WITHOUT_IMAGE = ("ray-submission",)
PAIRS = [
    *((name, Backend.LOCAL) for name in NAMES),
    *((name, Backend.KUBERNETES) for name in NAMES if name not in _WITHOUT_IMAGE),
    *((name, Backend.RAY) for name in NAMES if "ray" in name),
]
"""Each fixture on one machine and, where it has what that needs, as pods; Ray's own on Ray."""


def imported(name: str, backend: Backend) -> Imported:
    return import_documents(read_documents(FIXTURES / f"{name}.yaml"), backend=backend)


def golden_path(name: str, backend: Backend) -> Path:
    return FIXTURES / "golden" / f"{name}.{backend}.yaml"


def render(result: Imported) -> str:
    """Independent of where the checkout lies."""
    report = {
        "format": result.format,
        "spec": result.spec,
        "warnings": [f"{warning.fate}: {warning}" for warning in result.warnings],
        "missing": [str(problem) for problem in result.missing],
    }
    return yaml.safe_dump(report, sort_keys=False, width=120).replace(str(FIXTURES), "FOLDER")


if __name__ == "__main__":
    for fixture, target in PAIRS:
        golden_path(fixture, target).write_text(render(imported(fixture, target)), encoding="utf-8")
