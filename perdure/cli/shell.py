"""The command `perdure shell`."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from perdure.base.services import flush
from perdure.cli.common import JobArgument, RoleOption, Session, out
from perdure.cli.completion import complete_node, complete_rank

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.shell import ShellCommand


def shell(
    name: JobArgument,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Run this instead of a shell.", show_default=False),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            "--node",
            help="In this node; default: where the last incident began.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            min=0,
            help="In the node that runs this global rank.",
            show_default=False,
            autocompletion=complete_rank,
        ),
    ] = None,
    role: RoleOption = None,
    print_: Annotated[bool, typer.Option("--print", help="Only print the command that opens the shell.")] = False,
    *,
    here: Annotated[Session, "namespace", "address"],
) -> None:
    """Open a shell in a node of a running or held job, in its command's folder and environment.

    [dim]perdure shell llama-8b-sft --node 3 · perdure shell llama-8b-sft --rank 8 -- nvidia-smi[/]
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    found = here.run(lambda client: _find(client, name, role, node, rank, command or [], terminal=terminal or print_))
    if print_:
        out.out(str(found), highlight=False)
    else:
        _become(found)


async def _find(
    client: Client,
    name: str,
    role: str | None,
    node: int | None,
    rank: int | None,
    command: list[str],
    *,
    terminal: bool,
) -> ShellCommand:
    from perdure.base.errors import PerdureError
    from perdure.client.nodes import require_one_role
    from perdure.client.shell import node_to_enter, shell_command
    from perdure.client.views import nodes_of_ranks

    status, nodes = await client.status(name, role=role), await client.nodes(name, role=role)
    require_one_role(status, role)
    if rank is not None:
        node = next(iter(nodes_of_ranks(nodes, [rank])), None)
        if node is None:
            raise PerdureError(f"{name} has no world with rank {rank} now; choose by --node instead")
    return shell_command(status, node_to_enter(status, nodes, node), command, terminal=terminal)


def _become(command: ShellCommand) -> NoReturn:
    from perdure.base.errors import PerdureError

    program = shutil.which(command.words[0])
    if program is None:
        raise PerdureError(
            f"{command.words[0]} is not on PATH", remedy=f"Install it, or run this on a machine that has it: {command}"
        )
    inherited = os.environ if command.inherited is None else command.inherited
    flush()
    os.execve(program, command.words, {**inherited, **command.environment})
