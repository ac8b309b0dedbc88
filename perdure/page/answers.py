"""Answers to requests: whole pages, messages, and streams of changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import web

from perdure.base.errors import JobNotFound, PerdureError
from perdure.page import render
from perdure.page.access import VISIT, Handler, NotAllowed

ALIVE = 15.0
"""Seconds without an event after which a sign of life is sent, which also shows that a page was closed."""
_LINES = 500
"""Lines of a log that wait for a browser to take them, and of one event."""
_PAUSE = 0.1
"""Seconds for which lines of a log are collected."""

PREFIX = web.AppKey("prefix", str)
"""The path below which a proxy shows the pages."""


def html(request: web.Request, template: str, *, status: int = 200, **values: object) -> web.Response:
    """The answer with a whole page."""
    visit = request.get(VISIT)
    known = {"visit": visit, "csrf": visit.csrf if visit else ""}
    return web.Response(text=render.page(template, **known, **values), content_type="text/html", status=status)


def root_of(request: web.Request) -> str:
    """The way from a request's address to the list of jobs."""
    return "../" * (request.path.removeprefix(request.app[PREFIX]).count("/") - 1)


@web.middleware
async def show_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers with a page that tells the error and its remedy."""
    try:
        return await handler(request)
    except PerdureError as error:
        match error:
            case JobNotFound():
                status, title = 404, "Not found"
            case NotAllowed():
                status, title = 403, "Not allowed"
            case _:
                status, title = 503, "No answer"
        return message(request, title, str(error), remedy=error.remedy, status=status)


def message(
    request: web.Request, title: str, words: str, *, remedy: str = "", back: str = "", status: int = 200
) -> web.Response:
    """The answer with a page that says something."""
    return html(
        request,
        "message.html",
        status=status,
        root=root_of(request),
        events="",
        title=title,
        message=words,
        remedy=remedy,
        back=back,
    )


async def begin_events(request: web.Request) -> web.StreamResponse:
    """Begins a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, value: object, event: str = "") -> None:
    """Sends one event."""
    head = f"event: {event}\n" if event else ""
    await response.write(f"{head}data: {json.dumps(value)}\n\n".encode())


async def send_lines(request: web.Request, lines: AsyncGenerator[str]) -> web.StreamResponse:
    """Sends lines as they come, and why there are no more. They are read for as long as the page is open, and no faster
    than its browser takes them."""
    response = await begin_events(request)
    waiting, has_news = asyncio.Queue[str](_LINES), asyncio.Event()

    async def read() -> str:
        """Returns what is wrong; nothing at the end of the lines."""
        try:
            async with aclosing(lines):
                async for line in lines:
                    await waiting.put(line)
                    has_news.set()
        except (PerdureError, ValueError) as error:
            return str(error)
        return ""

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: has_news.set())
    try:
        with suppress(ConnectionError):
            while not (reading.done() and waiting.empty()):
                try:
                    async with asyncio.timeout(ALIVE):
                        await has_news.wait()
                except TimeoutError:
                    await response.write(b": alive\n\n")
                    continue
                await asyncio.sleep(_PAUSE)
                has_news.clear()
                if batch := [waiting.get_nowait() for _ in range(waiting.qsize())]:
                    await send(response, batch)
            await send(response, reading.result(), event="end")
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return response


async def send_parts(request: web.Request, versions: AsyncGenerator[render.Parts]) -> web.StreamResponse:
    """Sends what changes, as long as the page is open. A page that comes back begins with everything."""
    async with aclosing(versions):
        before, parts = None, await anext(versions)
        response = await begin_events(request)
        with suppress(ConnectionError):
            while True:
                message = parts.since(before)
                if message["parts"] or message["lists"]:
                    await send(response, message)
                before = parts
                coming = asyncio.ensure_future(anext(versions))
                try:
                    while not (await asyncio.wait([coming], timeout=ALIVE))[0]:
                        await response.write(b": alive\n\n")
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.gather(coming, return_exceptions=True)
                try:
                    parts = coming.result()
                except (StopAsyncIteration, PerdureError):  # Its user may not see it any more, or that cannot be said.
                    break
    return response
