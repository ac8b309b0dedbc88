"""Makes a test fail if its job skips an event that it cannot decide on; real jobs survive that."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager


class _EventsLeftOut(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "left out of the decisions" in record.getMessage():
            self.found.append(record.getMessage())


@contextmanager
def no_event_left_out() -> Generator[None]:
    """Fails where a job of this process could not decide on an event."""
    left_out = _EventsLeftOut()
    logging.getLogger("temporalio.workflow").addHandler(left_out)
    try:
        yield
    finally:
        logging.getLogger("temporalio.workflow").removeHandler(left_out)
    assert not left_out.found, "a job could not decide on an event"
