"""Checks that the types of the public API are complete, as pyright judges them for the users of a typed package.

    python -m scripts.public_types

Public are the names that `perdure`, `perdure_training` and `perdure.base.errors` export, with their members.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from scripts.setup import ROOT, VENV

PACKAGES = ("perdure", "perdure_training")

BY_THEIR_VALUE = "perdure.client.sync.SyncClient."
"""Members whose types are computed from those of `Client`: every checker computes the same, pyright says only that one
might not."""


def main() -> int:
    problems = [problem for package in PACKAGES for problem in incomplete(package)]
    print(
        "\n".join(problems) if problems else f"The types of the public names of {' and '.join(PACKAGES)} are complete"
    )
    return 1 if problems else 0


def incomplete(package: str) -> Iterator[str]:
    """Yields a line for each public symbol without a known type."""
    symbols = _symbols(package)
    public = tuple(f"{name}." for name in _public_names(package))
    known = {symbol["name"] for symbol in symbols}
    assert any(f"{name}.".startswith(public) for name in known), f"pyright found nothing of {package}"
    for symbol in symbols:
        name = symbol["name"]
        if not f"{name}.".startswith(public) or name.startswith(BY_THEIR_VALUE):
            continue
        if f"{name}." == BY_THEIR_VALUE or name == "perdure.SyncClient":
            continue
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]:
            reasons = [reason["message"] for reason in symbol.get("diagnostics", ())]
            yield f"{name}: {'; '.join(reasons) or 'of a type that is not complete'}"


def _public_names(package: str) -> Iterator[str]:
    """Yields the full names of what a package exports, where they are defined and where they are exported."""
    for module in (package, "perdure.base.errors") if package == "perdure" else (package,):
        exported = __import__(module, fromlist=["*"])
        for name in getattr(exported, "__all__", ()) or [one for one in vars(exported) if not one.startswith("_")]:
            yield f"{module}.{name}"
            value = getattr(exported, name)
            if isinstance(value, type) and value.__module__.startswith(PACKAGES):
                yield f"{value.__module__}.{value.__qualname__}"


def _symbols(package: str) -> list[dict[str, Any]]:
    words = [VENV / "bin" / "pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    # Of all that names an environment, `--verifytypes` reads PATH alone.
    variables = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(VENV)}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found["typeCompleteness"]["symbols"]


if __name__ == "__main__":
    sys.exit(main())
