"""Runs a program as `python` does, in a process that was forked from an interpreter which has imported torch."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def run_program(program: str, *arguments: str) -> None:
    """Runs `python PROGRAM ARGUMENTS`, where `-c CODE` may stand for a file, up to the end of its threads."""
    begin_torch()
    try:
        if program == "-c":
            run_code(*arguments)
        else:
            sys.argv = [program, *arguments]
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        other: Any = threading
        other._shutdown()
        atexit._run_exitfuncs()


def run_code(code: str, *arguments: str) -> None:
    """Runs what `python -c` would."""
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))


def begin_torch() -> None:
    """Does what `import torch` does for a process of its own: the import path, threads and plugins are its own."""
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    importlib.invalidate_caches()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        loads: Any = torch
        loads._import_device_backends()


if __name__ == "__main__":
    run_program(*sys.argv[1:])
