"""What it means that a step cannot be saved: a warning, and never the end of a rank."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)


class SaveFailures:
    """Warns of each problem once, until a step could be saved again. Any thread may use it."""

    def __init__(self) -> None:
        """Creates the object."""
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, step: int, error: OSError) -> None:
        """Says why a step is not saved."""
        problem = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        # Each slot has another name.
        kind = f"{type(error).__name__} {error.errno}"
        with self._lock:
            log = logger.debug if kind in self._known else logger.warning
            self._known.add(kind)
        log("perdure: step %d is not saved, the training continues, and the next one is another try: %s", step, problem)

    def passed(self) -> None:
        """Records that a step could be saved."""
        if self._known:
            with self._lock:
                self._known.clear()
