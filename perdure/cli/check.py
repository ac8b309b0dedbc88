"""The command `perdure check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.base.errors import ExitCode, PerdureError
from perdure.cli.common import JobArgument, RoleOption, Session, out
from perdure.cli.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.contract import Check, NodeChecks


def check(
    name: JobArgument,
    nodes: Annotated[
        str | None, typer.Option("--nodes", help="Only these nodes: 3, or 0,4-7.", show_default=False)
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also devices, and links between nodes: a minute, and training is disturbed."),
    ] = False,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Instead have other ranks compute the next step again, and compare."),
    ] = False,
    role: RoleOption = None,
    *,
    here: Session,
) -> None:
    """Check the machines of a running job beside each other: processor, memory, disks, names, clock, and whether nodes
    reach one another. Ends with 3 if a check fails, also by not ending in time; training goes on meanwhile.

    --replay finds devices that compute wrongly, where the script uses perdure_training.replay: docs/corruption.md.

    [dim]perdure check llama-8b-sft · perdure check llama-8b-sft --nodes 0,3 --full · perdure check llama-8b-sft
    --replay[/]
    """
    chosen = None if nodes is None else _numbers(nodes)
    if replay and (full or chosen is not None):
        raise PerdureError(
            "--replay: got --full or --nodes as well; all ranks replay a step, and nothing else is checked"
        )
    found = here.run(
        lambda client: (
            client.replay(name, role=role) if replay else client.check(name, node=chosen, role=role, full=full)
        )
    )
    if here.json:
        here.show(found)
    else:
        _print(found)
    if any(node.failed for node in found):
        raise typer.Exit(ExitCode.INFRASTRUCTURE)


def _numbers(text: str) -> frozenset[int]:
    """Reads `3`, or `0,4-7`.

    Raises:
        PerdureError: if it is neither.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, span, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not span)):
            raise PerdureError(f'--nodes: got "{text}"; expected numbers of nodes such as 3, or 0,4-7')
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _print(found: Iterable[NodeChecks]) -> None:
    table = Rows.of("NODE", "CHECK", "OF", "FOUND", "BOUND", "TOOK", "RESULT")
    for node in found:
        for one in node.checks:
            verdict = f"[bold red]{escape(one.problem)}[/]" if one.problem else "[green]ok[/]"
            value, bound = escape(one.checksum) or _amount(one.value, one), _amount(one.bound, one)
            table.add_row(str(node.node), escape(one.name), escape(one.subject), value, bound, _took(one), verdict)
    out.print(table)


def _amount(value: float | None, check: Check) -> str:
    if value is None:
        return "-"
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {escape(check.unit)}"


def _took(check: Check) -> str:
    return f"{check.seconds:.2f} s" if check.seconds else "-"
