"""Commands that change running jobs: suspend, resume, restart, pauses of repairs, checkpoint, cancel."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import text
from perdure.cli.common import JobArgument, OnlyRoleOption, Session, out, say
from perdure.cli.completion import complete_node

if TYPE_CHECKING:
    from perdure.client.changes import Change, Changes
    from perdure.client.client import Client
    from perdure.contract import CheckpointView


@dataclass(frozen=True, kw_only=True)
class _Change(Session):
    """The options of commands that change a job, and how such a change is made."""

    reason: Annotated[str, typer.Option("--reason", help="Kept with the job and shown by `perdure explain`.")] = ""
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")] = False

    def of(self, name: str, role: str | None = None) -> Changes:
        """The changes of a job that can be requested."""
        from perdure.client.changes import Changes

        return Changes(name=name, role=role, reason=self.reason)

    def change(self, name: str, change: Change, *, role: str | None = None) -> None:
        """Sends a change, or describes it with --dry-run."""
        if self.dry_run:
            self.run(lambda client: self.tell_plan(client, name, change, role))
            return
        accepted = self.run(change.send)
        if self.json:
            self.show(accepted)
        else:
            out.print(accepted.message, markup=False)
            self.hint(f"perdure watch {name}{self.flag}")

    async def tell_plan(self, client: Client, name: str, change: Change, role: str | None = None) -> None:
        """Prints what a change would do, and the job's present state."""
        from perdure.base.errors import Refused

        status = await client.status(name, role=role)
        if status.finished_at:
            raise Refused(f"{name} does not run: it has ended as {status.phase}")
        if change.check is not None and status.goal is not None:
            # A worker of an older release knows no such question.
            await change.check(client)
        plan = change.plan
        if self.json:
            self.show({"name": name, "would": plan, "phase": status.phase, "nodes": status.nodes})
            return
        out.print(f"{text.plan(plan, status)}; nothing was changed", markup=False)


ChangeSession = Annotated[_Change, "reason", "dry_run", "namespace", "output", "address"]


def suspend(name: JobArgument, role: OnlyRoleOption = None, *, here: ChangeSession) -> None:
    """Release all nodes of a job, or of one role; it keeps its history and can be resumed.

    [dim]perdure suspend llama-8b-sft --reason "making room" · perdure suspend grpo --role evaluator[/]
    """
    here.change(name, here.of(name, role).suspend(), role=role)


def resume(name: JobArgument, role: OnlyRoleOption = None, *, here: ChangeSession) -> None:
    """Request the nodes of a suspended job or role again. A role that was suspended alone stays so when its job is
    suspended and resumed.

    [dim]perdure resume llama-8b-sft · perdure resume grpo --role evaluator[/]
    """
    here.change(name, here.of(name, role).resume(), role=role)


def restart(
    name: JobArgument,
    node: Annotated[
        int | None,
        typer.Option(
            "--node", help="Replace this node instead.", min=0, show_default=False, autocompletion=complete_node
        ),
    ] = None,
    older: Annotated[
        bool,
        typer.Option("--older", help="Continue with an older state than the one that the ranks wait for."),
    ] = False,
    role: OnlyRoleOption = None,
    *,
    here: ChangeSession,
) -> None:
    """Restart all ranks in place as a new generation; with --node, replace one node by a new one.

    [dim]perdure restart llama-8b-sft · perdure restart llama-8b-sft --node 3 --reason "slow disk"[/]
    """
    from perdure.base.errors import PerdureError

    if older and node is not None:
        raise PerdureError("--older: given with --node; it is about all ranks, which --node does not restart")
    changes = here.of(name, role)
    here.change(name, changes.restart(older=older) if node is None else changes.relaunch(node), role=role)


def pause_repairs(
    name: JobArgument,
    duration: Annotated[str, typer.Option("--for", help="Resume repairs after this time.")] = "1h",
    *,
    here: ChangeSession,
) -> None:
    """Show hangs, slow ranks, bad numbers and wrong results of a job for a while, and leave them: to look with a
    debugger, for example. What dies is repaired.

    [dim]perdure pause-repairs llama-8b-sft --for 2h[/]
    """
    from perdure.base.errors import PerdureError
    from perdure.spec.durations import parse_duration

    try:
        pause = parse_duration(duration)
    except ValueError as error:
        raise PerdureError(f'--for: got "{duration}"; {error}') from None
    here.change(name, here.of(name).pause_repairs(pause, text.duration(pause)))


def resume_repairs(name: JobArgument, here: ChangeSession) -> None:
    """Repair hangs, slow ranks, bad numbers and wrong results of a job again.

    [dim]perdure resume-repairs llama-8b-sft[/]
    """
    here.change(name, here.of(name).resume_repairs())


def checkpoint(
    name: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is durable.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="With --wait: give up after this time.")] = "10m",
    *,
    here: ChangeSession,
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
    if here.dry_run or not wait:
        here.change(name, here.of(name).checkpoint())
        return
    view = here.run(lambda client: _until_durable(client, name, patience, here.reason))
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

    request = (await client.save_checkpoint(name, reason=reason)).checkpoint_request
    known = (await client.status(name)).checkpoint
    try:
        async with asyncio.timeout(patience.total_seconds()), aclosing(client.watch(name)) as snapshots:
            async for snapshot in snapshots:
                known = snapshot.status.checkpoint if snapshot.status else known
                if known.answered >= request:
                    return known
    except TimeoutError:
        pass
    why = known.problem or "the script must save with perdure_training.checkpoint.Checkpointer"
    raise Refused(f"{name} made no checkpoint within {text.duration(patience)}: {why}")


def cancel(
    name: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended, its nodes included.")] = False,
    *,
    here: ChangeSession,
) -> None:
    """End a job: its processes get SIGTERM and their grace period. The nodes of a failed job that are held are
    released.

    [dim]perdure cancel llama-8b-sft --wait[/]
    """
    change = here.of(name).cancel()
    if here.dry_run:
        here.change(name, change)
        return

    async def end(client: Client) -> str:
        from perdure.contract import JobPhase

        accepted = await change.send(client)
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
