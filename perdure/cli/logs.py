"""The command `perdure logs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.cli.common import AddressOption, JobArgument, NamespaceOption, OutputOption, err, out, session
from perdure.cli.terminal import as_json

if TYPE_CHECKING:
    from perdure.client.client import Client


def logs(
    name: JobArgument,
    node: Annotated[
        int | None, typer.Option("--node", help="Only this node's (a number of `perdure nodes`).", show_default=False)
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option("--rank", help="Only nodes that run these global ranks: 5, or 120-127.", show_default=False),
    ] = None,
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
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Print the nodes' output: from files here, from running nodes' agents, or from the copies at outputs.logs.

    [dim]perdure logs llama-8b-sft --node 3 --tail 50 · perdure logs llama-8b-sft -f --rank 8[/]
    """
    here = session(namespace=namespace, output=output, address=address)
    ranks = None if rank is None else _ranks(rank)

    async def print_lines(client: Client) -> int:
        printed = 0
        chosen = node if ranks is None else await _nodes_of(client, name, ranks)
        async for line in client.logs(name, node=chosen, incarnation=incarnation, follow=follow, tail=tail):
            printed += 1
            if here.json:
                out.out(as_json(line.model_dump(mode="json")), highlight=False)
            elif node is None:
                out.print(f"[{_COLOURS[line.node % len(_COLOURS)]}]{line.node:>3} |[/] {escape(line.text)}")
            else:
                out.out(line.text, highlight=False)
        return printed

    try:
        printed = here.run(print_lines)
    except KeyboardInterrupt:
        return
    if not printed and not here.json:
        err.print(f"{name}: nothing was printed{'' if node is None else f' by node {node}'} yet", style="dim")


def _ranks(text: str) -> range:
    """Reads `5` or `120-127`."""
    from perdure.errors import PerdureError

    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise PerdureError(f'--rank: got "{text}"; expected a global rank such as 5, or a range such as 120-127')
    return range(int(first), int(last or first) + 1)


async def _nodes_of(client: Client, name: str, ranks: range) -> frozenset[int]:
    from perdure.client.views import nodes_of_ranks
    from perdure.errors import PerdureError

    found = nodes_of_ranks(await client.nodes(name), ranks)
    if not found:
        raise PerdureError(f"{name} has no world with rank {ranks.start} now; choose by --node instead")
    return found


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
