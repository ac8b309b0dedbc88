"""Completion of job names, nodes and incidents in the user's shell.

A shell waits for it while the user types: what is not found in about a second is not suggested, and errors are silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from perdure.client.client import Client

DEADLINE: Final = 1.0
"""Seconds for the questions to the control plane."""

_MOST_JOBS = 200

Suggestion = tuple[str, str]
"""A value, and a word about it."""


def complete_job(ctx: typer.Context, incomplete: str) -> list[Suggestion]:
    """Suggests the names of jobs."""

    async def names(client: Client) -> list[Suggestion]:
        jobs = await client.list(limit=_MOST_JOBS)
        return [(job.name, job.phase.value if job.phase else "") for job in jobs]

    return _matching(incomplete, _ask(ctx, names))


def complete_incident(ctx: typer.Context, incomplete: str) -> list[Suggestion]:
    """Suggests the numbers of a job's incidents."""
    name = _job(ctx)

    async def numbers(client: Client) -> list[Suggestion]:
        return [(str(one.number), one.title) for one in await client.incidents(name)]

    return _matching(incomplete, _ask(ctx, numbers) if name else [])


def complete_node(ctx: typer.Context, incomplete: str) -> list[Suggestion]:
    """Suggests the numbers of a job's nodes."""
    name, role = _job(ctx), ctx.params.get("role")

    async def numbers(client: Client) -> list[Suggestion]:
        nodes = await client.nodes(name, role=role)
        return [(str(node.rank), node.phase.value) for node in nodes]

    return _matching(incomplete, _ask(ctx, numbers) if name else [])


def complete_rank(ctx: typer.Context, incomplete: str) -> list[Suggestion]:
    """Suggests the global ranks of a job."""
    name, role = _job(ctx), ctx.params.get("role")

    async def numbers(client: Client) -> list[Suggestion]:
        status = await client.status(name, role=role)
        return [(str(rank), "") for rank in range(status.world_size)]

    return _matching(incomplete, _ask(ctx, numbers) if name else [])


def _job(ctx: typer.Context) -> str:
    """The job's name as it was typed. Arguments have no names yet while the last option lacks its value."""
    return str(ctx.params.get("name") or next(iter(ctx.args), ""))


def _ask(ctx: typer.Context, question: Callable[[Client], Awaitable[list[Suggestion]]]) -> list[Suggestion]:
    async def answer() -> list[Suggestion]:
        from perdure.client.client import Client

        namespace = str(ctx.params.get("namespace") or "default")
        async with asyncio.timeout(DEADLINE), Client(address=ctx.params.get("address"), namespace=namespace) as client:
            return await question(client)

    try:
        return asyncio.run(answer())
    except Exception:
        return []


def _matching(incomplete: str, suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    from perdure.cli.terminal import printable

    return [
        (value, " ".join(printable(word).split())[:80]) for value, word in suggestions if value.startswith(incomplete)
    ]
