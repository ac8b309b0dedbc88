"""Running the long-lived processes of the control plane: logging, probes and exit."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from perdure.base import tracing
from perdure.base.errors import ExitCode, PerdureError
from perdure.base.log_format import LogFormat, configured_format, formatter_of

LOG_BYTES = 10 * 1024 * 1024
LOG_FILES = 3


def run_service(
    service: Coroutine[None, None, None],
    *,
    logger: logging.Logger,
    log_file: Path | None = None,
    log_format: LogFormat | None = None,
) -> ExitCode:
    """Runs a service until it ends, and logs errors that keep it from running.

    Args:
        service: Returns when the service was stopped.
        logger: The service's own logger.
        log_file: A file that is rotated; the default is stderr.
        log_format: The format of its lines; the default is that of the environment.

    Returns:
        The exit code of the process.
    """
    log_to(log_file, log_format or configured_format())
    try:
        asyncio.run(service)
    except PerdureError as error:
        logger.error("%s %s", error, error.remedy)
        return error.exit_code
    except Exception:
        logger.exception("the service failed")
        return ExitCode.INFRASTRUCTURE
    return ExitCode.OK


@dataclass(frozen=True)
class Readiness:
    """The answer to `GET /readyz`."""

    ready: bool
    report: str
    """What the service serves and what it does not, for people."""


def _serving() -> Readiness:
    return Readiness(True, "ok\n")


@asynccontextmanager
async def health_endpoint(port: int | None, readiness: Callable[[], Readiness] = _serving) -> AsyncGenerator[None]:
    """Answers probes on a port, if one is given, while the context is open: `GET /healthz` succeeds for as long as the
    process runs its event loop, and `GET /readyz` while the service is ready.

    Args:
        port: The port; None to serve nothing.
        readiness: Is called for each `GET /readyz`; by default a service is ready while the context is open.
    """
    if port is None:
        yield
        return
    from aiohttp import web

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        state = readiness()
        return web.Response(text=state.report, status=200 if state.ready else 503)

    application = web.Application()
    application.router.add_get("/healthz", healthy)
    application.router.add_get("/readyz", ready)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


def log_to(path: Path | None, format: LogFormat = LogFormat.TEXT) -> None:
    """Logs to a file that is rotated, else to stderr."""
    from logging.handlers import RotatingFileHandler

    handler = (
        RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES)
        if path
        else logging.StreamHandler(sys.stderr)
    )
    handler.setFormatter(formatter_of(format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def leave(code: int) -> NoReturn:
    """Ends the process at once: the SDK's native threads sometimes crash the interpreter's finalization."""
    logging.shutdown()
    tracing.end()
    flush()
    os._exit(code)


def flush() -> None:
    """Flushes printed output; a closed pipe is not an error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):
            stream.flush()
