"""Commands that change running jobs: scale, suspend, resume, restart, checkpoint, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import text
from perdure.cli.common import (
    AddressOption,
    DryRunOption,
    JobArgument,
    NamespaceOption,
    OutputOption,
    ReasonOption,
    Session,
    out,
    say,
    session,
)

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.contract import Accepted, CheckpointView


def scale(
    name: JobArgument,
    nodes: Annotated[str, typer.Argument(metavar="NODES", help="4, or 2:8 for min and max.", show_default=False)],
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Change how many nodes a job has.

    [dim]perdure scale llama-8b-sft 4 · perdure scale llama-8b-sft 2:8 -n nlp[/]
    """
    from perdure.base.errors import PerdureError
    from perdure.spec.roles import NodeCount

    try:
        NodeCount.model_validate(nodes)
    except ValueError:
        raise PerdureError(f'NODES: got "{nodes}"; expected a number such as 4, or a range such as 2:8') from None
    here = session(namespace=namespace, output=output, address=address)
    _change(
        here, name, f"scale to {nodes} nodes", lambda client: client.scale(name, nodes, reason=reason), dry_run=dry_run
    )


def suspend(
    name: JobArgument,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Release all nodes of a job; it keeps its history and can be resumed.

    [dim]perdure suspend llama-8b-sft --reason "making room"[/]
    """
    here = session(namespace=namespace, output=output, address=address)
    _change(here, name, "release all nodes", lambda client: client.suspend(name, reason=reason), dry_run=dry_run)


def resume(
    name: JobArgument,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Request the nodes of a suspended job again.

    [dim]perdure resume llama-8b-sft[/]
    """
    here = session(namespace=namespace, output=output, address=address)
    _change(here, name, "request nodes again", lambda client: client.resume(name, reason=reason), dry_run=dry_run)


def restart(
    name: JobArgument,
    node: Annotated[
        int | None, typer.Option("--node", help="Replace this node instead.", min=0, show_default=False)
    ] = None,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Restart all ranks in place as a new generation; with --node, replace one node by a new one.

    [dim]perdure restart llama-8b-sft · perdure restart llama-8b-sft --node 3 --reason "slow disk"[/]
    """
    here = session(namespace=namespace, output=output, address=address)
    if node is None:
        _change(
            here,
            name,
            "restart all ranks in place",
            lambda client: client.restart(name, reason=reason),
            dry_run=dry_run,
        )
    else:
        _change(
            here,
            name,
            f"replace node {node}",
            lambda client: client.relaunch_node(name, node, reason=reason),
            dry_run=dry_run,
        )


def checkpoint(
    name: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is durable.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="With --wait: give up after this time.")] = "10m",
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """Have a job make a checkpoint in storage at one of its next steps.

    [dim]perdure checkpoint llama-8b-sft --wait[/]
    """
    from perdure.base.errors import PerdureError
    from perdure.spec.durations import parse_duration

    try:
        patience = parse_duration(timeout)
    except ValueError as error:
        raise PerdureError(f'--timeout: got "{timeout}"; {error}') from None
    here = session(namespace=namespace, output=output, address=address)
    if dry_run or not wait:
        plan = "make a checkpoint in storage"
        _change(here, name, plan, lambda client: client.save_checkpoint(name, reason=reason), dry_run=dry_run)
        return
    view = here.run(lambda client: _until_durable(client, name, patience, reason))
    if here.json:
        here.show(view)
    else:
        out.print(f"step {view.step:,} of {name} is durable: {view.url}/{view.folder}", markup=False)


async def _until_durable(client: Client, name: str, patience: timedelta, reason: str) -> CheckpointView:
    """Requests a checkpoint, and waits until it is durable: one that was on its way before does not count.

    Raises:
        Refused: if it is not in time.
    """
    from perdure.base.errors import Refused

    order = (await client.save_checkpoint(name, reason=reason)).order
    known = (await client.status(name)).checkpoint
    try:
        async with asyncio.timeout(patience.total_seconds()), aclosing(client.watch(name)) as snapshots:
            async for snapshot in snapshots:
                known = snapshot.status.checkpoint if snapshot.status else known
                if known.order >= order:
                    return known
    except TimeoutError:
        pass
    why = known.problem or "the script must save with perdure_training.checkpoint.Checkpointer"
    raise Refused(f"{name} made no checkpoint within {text.duration(patience)}: {why}")


def cancel(
    name: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended, its nodes included.")] = False,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    namespace: NamespaceOption = "default",
    output: OutputOption = None,
    address: AddressOption = None,
) -> None:
    """End a job: its processes get SIGTERM and their grace period. The nodes of a failed job that are held are
    released.

    [dim]perdure cancel llama-8b-sft --wait[/]
    """
    here = session(namespace=namespace, output=output, address=address)
    if dry_run:
        here.run(lambda client: _tell_plan(client, here, name, "cancel it and stop its nodes"))
        return

    async def end(client: Client) -> str:
        from perdure.contract import JobPhase

        accepted = await client.cancel(name, reason=reason)
        if not wait:
            return accepted.message
        say(accepted.message)
        result = await client.wait(name)
        if result.phase is JobPhase.CANCELLED:
            return f"{name} is cancelled; its nodes are gone"
        return f"{name} had ended before: {result.phase}; its nodes are gone"

    message = here.run(end)
    if here.json:
        here.show({"name": name, "message": message})
    else:
        out.print(message, markup=False)
        here.hint(f"perdure status {name}{here.flag}")


def _change(
    here: Session, name: str, plan: str, change: Callable[[Client], Awaitable[Accepted]], *, dry_run: bool
) -> None:
    """Sends a change, or describes it with --dry-run."""
    if dry_run:
        here.run(lambda client: _tell_plan(client, here, name, plan))
        return
    accepted = here.run(change)
    if here.json:
        here.show(accepted)
    else:
        out.print(accepted.message, markup=False)
        here.hint(f"perdure watch {name}{here.flag}")


async def _tell_plan(client: Client, here: Session, name: str, plan: str) -> None:
    """Prints what a change would do, and the job's present state."""
    from perdure.base.errors import Refused

    status = await client.status(name)
    if status.finished_at:
        raise Refused(f"{name} does not run: it has ended as {status.phase}")
    if here.json:
        here.show({"name": name, "would": plan, "phase": status.phase, "nodes": status.nodes})
        return
    desired = f"{status.nodes_min}:{status.nodes_max}" if status.nodes_min < status.nodes_max else f"{status.nodes_max}"
    present = f"{name} is {status.phase} with {text.count(status.nodes, 'node')} of {desired}"
    out.print(f"would {plan}: {present}; nothing was changed", markup=False)
