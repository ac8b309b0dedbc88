"""Starts the command `perdure`, unless another module of that name hides its package.

A file `perdure.py` in a folder of PYTHONPATH comes first, as any folder of it does. It would be run as a program of the
user's, and end in a traceback. So it is looked for by this package, which has another name and imports it only then.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

_USAGE = 2


def perdure() -> None:
    """Entry point of `perdure`."""
    _command().main()


def temporal_perdure() -> None:
    """Entry point of `temporal-perdure`."""
    _command().temporal_extension()


def _command() -> Any:
    spec = find_spec("perdure")
    origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
    if origin is not None and not (origin.parent / "cli" / "main.py").exists():
        _refuse(origin)
    return import_module("perdure.cli.main")


def _refuse(found: Path) -> NoReturn:
    hiding = found.parent if found.name == "__init__.py" else found
    sys.stderr.write(
        f"error: {hiding} hides Perdure's own package of that name.\n"
        f"  Rename it, or take {hiding.parent} out of PYTHONPATH.\n"
    )
    sys.exit(_USAGE)
