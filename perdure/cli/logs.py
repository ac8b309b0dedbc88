"""The command `perdure logs`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.cli.common import JobArgument, OnlyRoleOption, ReadingSession, err, out
from perdure.cli.completion import complete_node, complete_rank
from perdure.cli.ranks import node_numbers, parse_ranks
from perdure.cli.terminal import as_json, printed_line

if TYPE_CHECKING:
    from perdure.client.client import Client


def logs(
    name: JobArgument,
    node: Annotated[
        int | None,
        typer.Option(
            "--node",
            help="Only this node's (a number of `perdure nodes`).",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank",
            help="Only nodes that run these global ranks: 5, or 120-127.",
            show_default=False,
            autocompletion=complete_rank,
        ),
    ] = None,
    role: OnlyRoleOption = None,
    incarnation: Annotated[
        int | None,
        typer.Option("--incarnation", min=1, help="Only this incarnation of a replaced node.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail",
            min=0,
            help="Begin with this many last lines of each node.",
            show_default="all that this machine keeps; of other nodes 1000",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", help="Only what was printed since: 10m, or 2026-11-23T22:00 (UTC).", show_default=False
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option("--grep", help="Only lines in which this regular expression is found.", show_default=False),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Begin each line with the time (UTC) at which it was printed.")
    ] = False,
    *,
    here: ReadingSession,
) -> None:
    """Print the nodes' output in the order of time: from files here, from running nodes' agents, or from copies: at
    outputs.logs or in an archive. Lines are cut after 16,384 characters, and --grep searches what is left; the log
    itself has all.

    [dim]perdure logs llama-8b-sft -f --rank 8 · perdure logs llama-8b-sft --since 10m --grep NCCL -t[/]
    """
    ranks = None if rank is None else parse_ranks(rank)
    begin = None if since is None else _moment(since)
    pattern = None if grep is None else _pattern(grep)

    async def print_lines(client: Client) -> int:
        printed = 0
        chosen = node if ranks is None else await node_numbers(client, name, ranks, role)
        roles = (await client.status(name)).roles if role is None else ()
        width = max(map(len, roles)) if len(roles) > 1 else 0
        async for line in client.logs(
            name, node=chosen, role=role, incarnation=incarnation, follow=follow, tail=tail, since=begin
        ):
            if pattern and not pattern.search(line.text):
                continue
            printed += 1
            if here.json:
                out.out(as_json(line.model_dump(mode="json")), highlight=False)
                continue
            time = f"{_time(line.time)} " if timestamps else ""
            if node is None or width:
                place = f"{line.role:<{width}} " if width else ""
                colour = _COLOURS[(line.node + roles.index(line.role) if width else line.node) % len(_COLOURS)]
                out.print(f"{time}[{colour}]{place}{line.node:>3} |[/] {escape(printed_line(line.text))}")
            else:
                out.out(time + printed_line(line.text), highlight=False)
        return printed

    try:
        printed = here.run(print_lines)
    except KeyboardInterrupt:
        return
    if not printed and not here.json:
        chosen = "nothing was printed" if begin is None and pattern is None else "nothing that was printed is chosen"
        err.print(f"{name}: {chosen}{'' if node is None else f' by node {node}'} yet", style="dim")


def _moment(text: str) -> datetime:
    """Reads `10m`, for that long ago, or a time."""
    from perdure.base.errors import PerdureError
    from perdure.spec.durations import parse_duration

    try:
        return datetime.now(UTC) - parse_duration(text)
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise PerdureError(f'--since: got "{text}"; expected a duration such as 10m, or a time (ISO 8601)') from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _pattern(text: str) -> re.Pattern[str]:
    from perdure.base.errors import PerdureError

    try:
        return re.compile(text)
    except re.error as error:
        raise PerdureError(f'--grep: got "{text}"; expected a regular expression of Python: {error}') from None


def _time(time: datetime | None) -> str:
    """Returns the time for one line, or as many spaces where it is unknown."""
    return " " * 24 if time is None else f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03}Z"


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
