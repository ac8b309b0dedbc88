"""The command `perdure stacks`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.tree import Tree

from perdure.base.words import count
from perdure.cli.common import JobArgument, OnlyRoleOption, Session, out
from perdure.cli.completion import complete_node, complete_rank
from perdure.cli.ranks import node_numbers, parse_ranks, rank_numbers, running_roles

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.stacks import Branch
    from perdure.contract import NodeStacks, RankPosition, StackFrame

_STATES = {"R": "running", "S": "sleeping", "D": "sleeping in the kernel", "T": "stopped", "t": "in a debugger"}


def stacks(
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
            "--rank", help="Only these global ranks: 5, or 120-127.", show_default=False, autocompletion=complete_rank
        ),
    ] = None,
    role: OnlyRoleOption = None,
    threads: Annotated[
        bool, typer.Option("--threads", help="Every thread of each rank, not merged.", show_default=False)
    ] = False,
    *,
    here: Session,
) -> None:
    """Show where each rank is: the calls of its main thread, merged, so that the ranks which are elsewhere stand out.
    Training goes on meanwhile; a rank that hangs in C code, or is stopped, is shown as well.

    [dim]perdure stacks llama-8b-sft · perdure stacks llama-8b-sft --rank 8-15 --threads[/]
    """
    from perdure.base.errors import Refused

    wanted = None if rank is None else parse_ranks(rank)

    async def read(client: Client) -> dict[str, list[NodeStacks]]:
        chosen = node if wanted is None else await node_numbers(client, name, wanted, role)
        roles = await running_roles(client, name, role)
        found: dict[str, list[NodeStacks]] = {}
        for one in roles:
            # A node number may be one of some roles only.
            with suppress(*([Refused] if one != roles[-1] or found else [])):
                answers = await client.stacks(name, node=chosen, role=one)
                found[one] = [_only(answer, wanted) for answer in answers]
        return found

    found = here.run(read)
    several = len(found) > 1
    if here.json:
        rows = [(one, answer) for one, answers in found.items() for answer in answers]
        here.show([{"role": one} | answer.model_dump(mode="json") if several else answer for one, answer in rows])
        return
    for one, answers in found.items():
        if several:
            out.print(f"[bold]role {escape(one)}[/]")
        _print(answers, threads=threads)
    here.hint(f"perdure stacks {name}{here.flag} --threads", f"perdure explain {name}{here.flag}")


def _only(answer: NodeStacks, wanted: range | None) -> NodeStacks:
    if wanted is None:
        return answer
    return answer.model_copy(update={"ranks": tuple(one for one in answer.ranks if one.rank in wanted)})


def _print(found: Iterable[NodeStacks], *, threads: bool) -> None:
    from perdure.client.stacks import merged, positions_of

    answers = list(found)
    positions = positions_of(answers)
    if threads:
        for position in positions.values():
            _print_threads(position)
    else:
        _print_merged(merged(positions.values()), positions.values())
    for position in positions.values():
        if not position.threads:
            out.print(f"[bold yellow]rank {position.rank}[/]  {escape(position.problem)}")
    for answer in answers:
        if answer.problem or not answer.ranks:
            why = answer.problem or "none of its ranks has imported torch yet, or none runs"
            out.print(f"[bold yellow]node {answer.node}[/]  {escape(why)}")


def _print_merged(root: Branch, positions: Iterable[RankPosition]) -> None:
    if not root.ranks:
        return
    known = {position.rank: position for position in positions}
    tree = Tree(f"[bold]{_count(root.ranks)}[/]", guide_style="dim")
    _grow(tree, root, known)
    out.print(tree)


def _grow(tree: Tree, branch: Branch, known: dict[int, RankPosition]) -> None:
    """Adds the calls below a branch; calls that the same ranks made stand below each other, not deeper and deeper."""
    for call in sorted(branch.calls.values(), key=lambda call: (-len(call.ranks), call.ranks)):
        parts = len(branch.calls) > 1 or bool(branch.ends)
        node = tree.add(f"[bold cyan]{rank_numbers(call.ranks)}[/]") if parts else tree
        here = call
        while True:
            assert here.frame is not None
            node.add(_call(here.frame))
            if len(here.calls) != 1 or here.ends:
                break
            here = next(iter(here.calls.values()))
        if here.ends:
            node.add(f"[green]{_doing(here.ends, known)}[/]")
        _grow(node, here, known)


def _doing(ranks: list[int], known: dict[int, RankPosition]) -> str:
    """What the kernel says of ranks whose innermost call this is."""
    shown: dict[str, list[int]] = {}
    for rank in ranks:
        shown.setdefault(_STATES.get(known[rank].state, known[rank].state), []).append(rank)
    used = [known[rank].cpu_percent or 0.0 for rank in ranks]
    least, most = min(used), max(used)
    processor = f"{most:.0f} %" if round(least) == round(most) else f"{least:.0f}-{most:.0f} %"
    if len(shown) == 1:
        return f"{next(iter(shown))}, {processor} of a processor"
    states = ", ".join(f"{rank_numbers(those)} {state}" for state, those in shown.items())
    return f"{states}; {processor} of a processor"


def _print_threads(position: RankPosition) -> None:
    for number, thread in enumerate(position.threads):
        kind = "main thread" if number == 0 else f"thread {number}"
        out.print(f"[bold]rank {position.rank}[/]  process {position.pid}, {kind}")
        for frame in thread.frames:
            out.print(f"  {_call(frame)}")


def _call(frame: StackFrame) -> str:
    return f"{escape(frame.function)}  [dim]{escape(_short(frame.file))}:{frame.line}[/]"


def _short(file: str) -> str:
    """The path from the package on, for what is installed."""
    return file.rpartition("/site-packages/")[2] or file


def _count(ranks: list[int]) -> str:
    return count(len(ranks), "rank")
