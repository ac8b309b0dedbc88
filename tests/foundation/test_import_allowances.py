"""Tests of the allowed imports, which complement import-linter's forbidden ones, so that no new import goes
unnoticed."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import parse

ROOT = Path(__file__).resolve().parents[2]

_SECRETS = "perdure_training.secret_texts"
"""The one rule for what looks like a secret, in the package that all others may import; of the standard library."""

_ADDRESSES = "perdure_training.node_api.addresses"
"""The one rule for how a host and a port are one text, likewise."""

_HOLD_TIMES = "perdure_training.node_api.hold_times"
"""For how long ranks wait at a step, likewise."""


def imports(path: Path) -> Iterator[str]:
    """Every absolute import of a file, wherever in the file it stands."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def foreign(folder: str, *, allowed: tuple[str, ...]) -> list[str]:
    """Imports of a package that are neither its own, nor standard library, nor allowed."""
    own = f"perdure.{folder}" if folder == "workflows" else folder.replace("/", ".")
    found: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imports(path):
            expected = name.split(".")[0] in sys.stdlib_module_names or any(
                name == module or name.startswith(f"{module}.") for module in (own, *allowed)
            )
            if not expected:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        # Runs in the workflow sandbox, and must replay the same for years.
        (
            "workflows",
            (
                "pydantic",
                "temporalio",
                "perdure.contract",
                "perdure.spec",
                "perdure.base.markdown",
                "perdure.base.shortages",
                "perdure.base.words",
                _SECRETS,
                _ADDRESSES,
                _HOLD_TIMES,
            ),
        ),
        ("perdure/spec", ("pydantic", "pydantic_core", "yaml", "perdure.base.errors", _SECRETS)),
        # Run in users' processes, next to whatever versions they have.
        (
            "perdure_launcher",
            (
                "torch",
                "perdure_training.background",
                "perdure_training.events",
                "perdure_training.node_api",
                "perdure_training.snapshots",
                _SECRETS,
            ),
        ),
        # The adapters of frameworks import these, and only scripts that use them import the adapters.
        ("perdure_training", ("torch", "transformers", "lightning", "pytorch_lightning")),
    ],
)
def test_imports_only_what_it_may(folder: str, allowed: tuple[str, ...]):
    assert foreign(folder, allowed=allowed) == []


def test_importing_the_package_is_cheap():
    """`perdure --version` and every launched agent import it."""
    tree = parse(ROOT / "perdure" / "__init__.py")
    eager = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    expensive = [line for line in eager if "temporalio" in line or "pydantic" in line or "client" in line]
    assert expensive == []
