"""`python -m perdure.agent`: the agent process beside a node's training."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import NoReturn

from perdure.base import sdk  # noqa: F401

# isort: split

from perdure.agent.config import AgentConfig, ConfigError
from perdure.agent.process import LogPlaces, serve
from perdure.agent.storage_credentials import ignore_configuration
from perdure.agent.transport import TemporalControlPlane
from perdure.base import tracing
from perdure.base.log_format import configured_format, formatter_of
from perdure_training.node_api import layout

logger = logging.getLogger("agent")

_LOG_MAX = 2 * 1024 * 1024
_EXIT_FAILED = 1
_EXIT_CONFIG = 2
_EXIT_ALREADY_RUNS = 75
"""EX_TEMPFAIL: another agent serves this node; trying again later may succeed."""


def _log_to(private_dir: Path, places: LogPlaces) -> None:
    """Logs to a bounded file: an outage must not fill a disk, nor an unread pipe block the agent."""
    folder = private_dir / layout.LOGS
    # A full disk loses log lines, and has no other effect.
    logging.raiseExceptions = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = RotatingFileHandler(folder / layout.AGENT_LOG, maxBytes=_LOG_MAX, backupCount=2)
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(formatter_of(configured_format(), context=places))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # The SDK warns about each lease that ends, which is normal.
    logging.getLogger("temporalio").setLevel(logging.ERROR)


def _lock(private_dir: Path) -> int:
    """Makes this the node's only agent for as long as the process lives.

    Raises:
        BlockingIOError: if another agent runs.
    """
    descriptor = os.open(private_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _run() -> int:
    try:
        config = AgentConfig.load()
    except ConfigError as error:
        sys.stderr.write(f"agent: {error}\n")
        return _EXIT_CONFIG
    if config.is_another_user:
        ignore_configuration(config.private_dir)
    try:
        _lock(config.private_dir)
    except BlockingIOError:
        sys.stderr.write(f"agent: another agent serves {config.private_dir}\n")
        return _EXIT_ALREADY_RUNS
    except OSError as error:
        sys.stderr.write(f"agent: its folder is {config.private_dir}, which cannot be used: {error.strerror}\n")
        return _EXIT_CONFIG
    places = LogPlaces(config)
    _log_to(config.private_dir, places)
    asyncio.run(_serve(config, places))
    return 0


async def _serve(config: AgentConfig, places: LogPlaces) -> None:
    """Serves, and ends the process from inside the loop: the SDK's worker would first contact a server that may be
    away."""
    try:
        await serve(config, TemporalControlPlane(config), places)
    except BaseException:
        logger.exception("ended by an error")
        _leave(_EXIT_FAILED)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """Ends the process without finalizing the interpreter, which the SDK's threads may crash."""
    logging.shutdown()
    tracing.end()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Runs the agent."""
    _leave(_run())


if __name__ == "__main__":
    main()
