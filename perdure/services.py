"""What the long-running processes of the control plane share: where they log, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from perdure.errors import ExitCode, PerdureError

LOG_BYTES = 10 * 1024 * 1024
LOG_FILES = 3


def run_service(service: Coroutine[None, None, None], *, logger: logging.Logger, log_file: Path | None) -> ExitCode:
    """Runs a service until it ends, and logs what keeps it from running.

    Args:
        service: Returns when it was stopped.
        logger: The service's own.
        log_file: Rotated; by default the standard error.

    Returns:
        What the process should exit with.
    """
    log_to(log_file)
    try:
        asyncio.run(service)
    except PerdureError as error:
        logger.error("%s %s", error, error.remedy)
        return error.exit_code
    except Exception:
        logger.exception("the service failed")
        return ExitCode.INFRASTRUCTURE
    return ExitCode.OK


def log_to(path: Path | None) -> None:
    """Logs to a file that is rotated, else to stderr."""
    from logging.handlers import RotatingFileHandler

    handler = (
        RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES)
        if path
        else logging.StreamHandler(sys.stderr)
    )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler]
    )


def leave(code: int) -> NoReturn:
    """Ends the process at once: the SDK's native threads sometimes crash the interpreter's finalization."""
    logging.shutdown()
    flush()
    os._exit(code)


def flush() -> None:
    """Flushes what was printed; a reader that has gone is no error of ours."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):
            stream.flush()
