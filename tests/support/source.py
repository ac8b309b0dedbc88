"""Reads the repository's source, for tests that look at all modules."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def parse(path: Path) -> ast.Module:
    """Returns the syntax tree of a module.

    Python 3.11 fails where a parse is interrupted by another one. The garbage collector does that, if it finds a task
    whose exception nobody has asked for: the traceback that is printed then underlines a part of a line.
    """
    text = path.read_text(encoding="utf-8")
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()
