"""The warm interpreter: Python, stopped in its own start with torch imported, which forks the ranks of its node.

It is started with the ranks' command line and calls `wait_to_be_forked` from a `sitecustomize` that stands first on its
path. There it imports, serves requests, and returns only in processes that it forked: those go on with their start and
run the script. It has one thread, has run no operation and touched no device, so that a fork of it is as good as new.
"""

from __future__ import annotations

import atexit
import gc
import importlib.machinery
import importlib.util
import os
import socket
import sys

from ..processes import die_with_parent
from . import learning
from .imports import Imports, Unfit
from .names import FOLDER_VARIABLE, LISTENING_VARIABLE, REFUSAL, SOCKET, STARTED, record_start
from .plan import AUTOLOAD_VARIABLE, START, Plan
from .server import Request, Server, answer
from .shown import GENERATION_VARIABLE, show_generation
from .traces import Traces

_REFUSED = 1


def wait_to_be_forked() -> None:
    """Serves until the process is killed. Returns in forked ranks, which then are as if they had just been started.

    The caller must end the process where this raises: to go on would run the script outside any world.
    """
    # Killed with the torchrun that started it, and its ranks with it, as torchrun's own would be.
    die_with_parent()
    folder = os.environ[FOLDER_VARIABLE]
    plan = Plan.of_process(os.getpid())
    listening = socket.socket(fileno=int(os.environ[LISTENING_VARIABLE]))
    listening.set_inheritable(False)
    imports, traces = Imports(plan), Traces()
    try:
        with traces.kept():
            _leave_path(f"{folder}/{START}")
            imports.always()
    except Unfit as unfit:
        _refuse(folder, str(unfit))
    except Exception as error:
        _refuse(folder, f"the warm interpreter could not prepare: {type(error).__name__}: {error}")
        raise
    request = Server(plan, folder, listening, imports, traces).serve()
    _become(plan, folder, request, traces)


def _refuse(folder: str, reason: str) -> None:
    sys.stderr.write(f"not warm: {reason}\n")
    sys.stderr.flush()
    with open(f"{folder}/{REFUSAL}", "w", encoding="utf-8") as file:
        file.write(reason)
    os.unlink(f"{folder}/{SOCKET}")
    os._exit(_REFUSED)


def _leave_path(ours: str) -> None:
    """Takes our folder off the path, and runs the `sitecustomize` that it hides, as Python would have."""
    sys.path.remove(ours)
    sys.path_importer_cache.pop(ours, None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _become(plan: Plan, folder: str, request: Request, traces: Traces) -> None:
    """Makes the forked process the rank that was asked for, and says so."""
    die_with_parent()
    os.setsid()
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    show_generation(request.environment.get(GENERATION_VARIABLE, ""))
    # Arguments may differ from rank to rank (torchrun's macros); the script was not looked at yet.
    own = request.arguments[plan.script_index + 1 :]
    sys.argv[1:] = own
    sys.orig_argv[1:] = request.arguments
    traces.leave()
    _reseed()
    _load_plugins()
    # What a collection at the end finds and reports is then as ever.
    atexit.register(gc.unfreeze)
    record_start(folder, warm=True)
    learning.begin(folder)
    answer(request.connection, STARTED)
    request.connection.close()


def _reseed() -> None:
    """As Python does with its own generator at a fork: those of a script that sets no seed differ in all ranks."""
    sys.modules["torch"].default_generator.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _load_plugins() -> None:
    """As the end of `import torch` would have, with the rank's environment: devices' plugins, and our step counter."""
    if os.environ.get(AUTOLOAD_VARIABLE, "1") == "1":
        import torch

        torch._import_device_backends()  # pyright: ignore[reportPrivateUsage]
