"""A standby: Python, stopped in its own start with all imported that its rank imports, which becomes that rank.

The warm interpreter tells it its rank's place and what to import, and later passes a stand-in's request on to it.
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
    """Imports, and waits until this process is wanted. Ends the process where it never will be.

    Args:
        plan: What it was started for.
        control: The socket to the warm interpreter.
        traces: Keep what imports leave behind.
        leave_path: Takes our folder off the path, before anything is imported.

    Returns:
        The request, and why a standby answers it.
    """
    order, _ = receive(control)
    if not order:
        os._exit(0)
    # Not in what the kernel shows of this process's environment: it is no rank yet.
    os.environ.update(order["place"])
    imports = Imports(plan, STANDBY)
    try:
        with traces.kept():
            leave_path()
            imports.always()
            imports.learned(Learned.from_json(order["learned"]), without=order["without"])
    except Refused as refused:
        _give_up(control, {"refused": {"package": refused.package, "reason": str(refused)}})
    except Unfit as unfit:
        _give_up(control, {"failure": str(unfit)})
    # A driver that was woken has read them too.
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
    """Where memory runs out meanwhile, it is this process that the kernel ends, and no rank that trains."""
    with open(_SCORE, encoding="ascii") as file:
        own = file.read()
    with open(_SCORE, "w", encoding="ascii") as file:
        file.write(_FIRST_TO_GO)
    yield
    with open(_SCORE, "w", encoding="ascii") as file:
        file.write(own)
