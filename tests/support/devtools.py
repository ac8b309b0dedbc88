"""Drives a real browser by its DevTools protocol: opens pages, asks them, and takes pictures of them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import eventually

_CODES = {"Tab": 9, "Enter": 13}


class Tab:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.messages: list[dict[str, Any]] = []
        """What the browser has reported, such as errors of scripts and refusals of its policy."""

    async def read(self) -> None:
        """Takes in what the browser says, until it ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if (answer := self._answers.pop(said.get("id"), None)) is not None and not answer.done():
                answer.set_result(said)
            elif "method" in said:
                self.messages.append(said)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls the browser."""
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, 30)
        assert "error" not in said, said
        return said["result"]

    async def open(self, address: str) -> None:
        """Opens a page, and waits until its content is there."""
        await self.call("Page.navigate", url=address)
        await eventually(lambda: self.ask("document.readyState === 'complete' && location.href !== 'about:blank'"))

    async def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        said = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def click(self, selector: str) -> None:
        """Clicks an element as a user does, where it is shown."""
        place = await self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def press(self, key: str) -> None:
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        # What the browser itself does by these keys depends on their codes.
        code = {"windowsVirtualKeyCode": _CODES[key], "code": key} if key in _CODES else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    async def picture(self, path: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Writes a picture of what is shown."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        said = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(said["data"]))


@asynccontextmanager
async def open_tab(browser: Path) -> AsyncIterator[Tab]:
    """A browser with one tab, for as long as the context is open."""
    with tempfile.TemporaryDirectory(prefix="perdure-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(str(browser), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", f"--user-data-dir={folder}"),
            *("--remote-debugging-port=0", "--window-size=1280,900", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port_file = Path(folder) / "DevToolsActivePort"
            await eventually(lambda: port_file.exists() and len(port_file.read_text().splitlines()) == 2)
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (page,) = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    reading = asyncio.create_task(tab.read())
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
        finally:
            # The browser is several processes.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
