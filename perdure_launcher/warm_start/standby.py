"""A standby: Python, stopped during its own start-up with its rank's modules imported, which becomes that rank.

The warm interpreter sends it the rank's variables and the modules to import, and later passes a shim's request on to
it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Generator

from .fork_safety import holds_devices
from .imports import Imports, Refused, Unfit
from .learning import Learned
from .messages import Request, read_passed_on, receive, send
from .names import DEVICES
from .plan import Plan
from .start_method import STANDBY
from .traces import Traces

_SCORE = "/proc/self/oom_score_adj"
_FIRST_TO_GO = "1000"


def wait_for_request(
    plan: Plan, control: socket.socket, traces: Traces, leave_path: Callable[[], None]
) -> tuple[Request, str]:
    """Imports modules, and waits for a request. Ends the process if none will come.

    Args:
        plan: The plan that it was started with.
        control: The socket to the warm interpreter.
        traces: Records the side effects of imports.
        leave_path: Removes our folder from the path, before anything is imported.

    Returns:
        The request, and why the rank is started from a standby.
    """
    order, _ = receive(control)
    if not order:
        os._exit(0)
    # Not written to /proc's view of this process's environment: it is not a rank yet.
    os.environ.update(order["place"])
    imports = Imports(plan, STANDBY)
    try:
        with traces.record():
            leave_path()
            imports.always()
            imports.import_learned(Learned.from_json(order["learned"]), without=order["without"])
    except Refused as refused:
        _give_up(control, {"refused": {"package": refused.package, "reason": str(refused)}})
    except Unfit as unfit:
        _give_up(control, {"failure": str(unfit)})
    # A driver that was initialized has read them, too.
    read = imports.read_of_place | DEVICES if holds_devices() else imports.read_of_place
    with _first_to_go():
        send(control, {"read": sorted(read)})
        request = read_passed_on(control)
        if request is None:
            os._exit(0)
    control.close()
    return request, order["reason"]


def _give_up(control: socket.socket, why: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        send(control, why)
    os._exit(0)


@contextlib.contextmanager
def _first_to_go() -> Generator[None]:
    """Makes the kernel's OOM killer prefer this process to ranks that train."""
    with open(_SCORE, encoding="ascii") as file:
        own = file.read()
    with open(_SCORE, "w", encoding="ascii") as file:
        file.write(_FIRST_TO_GO)
    yield
    with open(_SCORE, "w", encoding="ascii") as file:
        file.write(own)
