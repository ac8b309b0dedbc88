"""A real browser that opens one page, without a window, and looks names up as a test says."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def open_page(browser: Path, address: str, *, names: Mapping[str, str]) -> AsyncIterator[None]:
    """Opens a page for as long as the context is open.

    Args:
        browser: Takes Chromium's options.
        address: Of the page.
        names: Where host names lead, as `address` or `address:port`; a port applies to whatever port a page names.
    """
    with tempfile.TemporaryDirectory(prefix="perdure-browser-", ignore_cleanup_errors=True) as folder:
        rules = ", ".join(f"MAP {name} {where}" for name, where in names.items())
        process = await asyncio.create_subprocess_exec(
            *(str(browser), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", f"--user-data-dir={folder}"),
            # Without it the browser ends as soon as the page is loaded.
            "--remote-debugging-port=0",
            *(f"--host-resolver-rules={rules}", address),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            # The browser is several processes.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
