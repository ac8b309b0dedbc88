"""The warm interpreter: Python, stopped during its own start-up with torch imported, which starts its node's ranks.

It is started with the ranks' command line and calls `wait_to_become_a_rank` from a `sitecustomize` that is first on
its path. There it imports modules, serves requests, and returns only in processes that it forked: those continue the
start-up and run the script. It has one thread, has run no operation and touched no device, so a fork of it is
equivalent to a new process. A standby is started in the same way, and returns once it becomes its rank.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.machinery
import importlib.util
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType

from ..system.processes import die_with_parent
from ..torch_internals import plugin_loader
from . import learning
from .first_import import compare_at_first_import
from .imports import Imports, Unfit
from .messages import Request, answer, write_record
from .names import (
    FOLDER_VARIABLE,
    LISTENING_VARIABLE,
    PACKAGES,
    REFUSAL,
    SOCKET,
    STANDBY_VARIABLE,
    STARTED,
    record_start,
)
from .plan import AUTOLOAD_VARIABLE, START, Plan
from .proc_environ import GENERATION_VARIABLE, show_generation
from .server import Server
from .standby import wait_for_request
from .traces import Traces

_REFUSED = 1
_OF_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that schedulers send to all processes of a job."""


def wait_to_become_a_rank() -> None:
    """Serves requests until the process is killed. Returns in ranks only, which are then like newly started ones.

    The caller must end the process if this raises: otherwise Python would run the script outside of any world.
    """
    # Killed together with the process that started it, as torchrun's own ranks would be; its ranks are killed with it.
    die_with_parent()
    # Ranks would end with this process by a signal that they handle themselves.
    for number in _OF_RANKS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _do_nothing)
    folder = os.environ[FOLDER_VARIABLE]
    plan, traces = Plan.of_process(os.getpid()), Traces()
    connection = socket.socket(fileno=int(os.environ[LISTENING_VARIABLE]))
    connection.set_inheritable(False)
    imports: Imports | None = None
    leave_path = functools.partial(_leave_path, f"{folder}/{START}")
    if STANDBY_VARIABLE in os.environ:
        request, reason = wait_for_request(plan, connection, traces, leave_path)
        _become(plan, request, traces)
        record_start(folder, warm=True, standby=True, reason=reason)
    else:
        imports, unfit_for_forks = Imports(plan), ""
        try:
            with traces.record():
                leave_path()
                imports.always()
        except Unfit as unfit:
            if not unfit.for_forks_only:
                _refuse(folder, str(unfit))
            unfit_for_forks = str(unfit)
        except Exception as error:
            _refuse(folder, f"the warm interpreter could not prepare: {type(error).__name__}: {error}")
            raise
        write_record(f"{folder}/{PACKAGES}", learning.states_of_packages())
        request = Server(plan, folder, connection, imports, traces, unfit_for_forks).serve()
        _become(plan, request, traces)
        _shed_the_fork(imports)
        record_start(folder, warm=True)
    _load_plugins()
    learning.begin(folder)
    answer(request.connection, STARTED)
    request.connection.close()
    if imports is not None:
        compare_at_first_import(
            find_contradiction=imports.find_contradiction,
            arguments=request.arguments,
            environment=request.environment,
            folder=folder,
        )


def _refuse(folder: str, reason: str) -> None:
    sys.stderr.write(f"not warm: {reason}\n")
    sys.stderr.flush()
    with open(f"{folder}/{REFUSAL}", "w", encoding="utf-8") as file:
        file.write(reason)
    os.unlink(f"{folder}/{SOCKET}")
    os._exit(_REFUSED)


def _leave_path(ours: str) -> None:
    """Removes our folder from the path, and runs the `sitecustomize` that it hides, as Python would have."""
    sys.path.remove(ours)
    sys.path_importer_cache.pop(ours, None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _become(plan: Plan, request: Request, traces: Traces) -> None:
    """Turns this process into the requested rank: the part that forks and standbys have in common."""
    die_with_parent()
    _leave_signals()
    os.setsid()
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    _set_environment(request.environment)
    show_generation(request.environment.get(GENERATION_VARIABLE, ""))
    # Arguments may differ between ranks (torchrun's macros); the script has not read them yet.
    own = request.arguments[plan.script_index + 1 :]
    sys.argv[1:] = own
    sys.orig_argv[1:] = request.arguments
    traces.leave()


def _do_nothing(number: int, _: FrameType | None) -> None:
    pass


def _leave_signals() -> None:
    """Gives signals back their defaults, which programs look for before they install their handlers."""
    for number in _OF_RANKS:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)


def _set_environment(environment: Mapping[str, str]) -> None:
    """Sets the environment in place, without clearing it: threads that imports have started may be reading it."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


def _shed_the_fork(imports: Imports) -> None:
    """Removes state that a fork inherits from the warm interpreter and a started process would not have."""
    # Python seeds its own generator at a fork; torch's must also differ in all ranks of a script that sets no seed.
    sys.modules["torch"].default_generator.seed()
    for generator in imports.generators:
        random.Random.seed(generator)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    # Lets a collection at the process's end find and report the same objects as in a started process.
    atexit.register(gc.unfreeze)


def _load_plugins() -> None:
    """Loads the device plugins and our step counter with the rank's environment, as the end of `import torch` would
    have."""
    if os.environ.get(AUTOLOAD_VARIABLE, "1") == "1" and (load := plugin_loader()) is not None:
        load()
