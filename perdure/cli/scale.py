"""The command `perdure scale`: how many nodes a job has, and how it chooses their number."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import plan, text
from perdure.cli.change import ChangeSession
from perdure.cli.common import JobArgument, RoleOption, out, warn

if TYPE_CHECKING:
    from perdure.client.changes import Change
    from perdure.client.client import Client
    from perdure.contract import Accepted, JobStatus

_GOAL = "How it chooses"


def scale(
    name: JobArgument,
    nodes: Annotated[
        str | None,
        typer.Argument(
            metavar="[NODES]", help="4, 2:8 for min and max, or auto: what the job states.", show_default=False
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="How the job chooses its number from now on: max, efficient, deadline, budget or manual.",
            show_default=False,
            rich_help_panel=_GOAL,
        ),
    ] = None,
    finish_by: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="The fewest nodes that finish by this time, such as 2026-12-01T08:00:00Z, or in this time, such as "
            "6h.",
            show_default=False,
            rich_help_panel=_GOAL,
        ),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(
            help="The number that finishes soonest for this sum, at --price.",
            show_default=False,
            rich_help_panel=_GOAL,
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Of a node for an hour.", show_default=False, rich_help_panel=_GOAL)
    ] = None,
    max_gpu_hours: Annotated[
        float | None,
        typer.Option(
            help="The number that finishes soonest within these hours of ranks.",
            show_default=False,
            rich_help_panel=_GOAL,
        ),
    ] = None,
    min_efficiency: Annotated[
        float | None,
        typer.Option(
            help="The share of a node's speed that a further one must add.", show_default=False, rich_help_panel=_GOAL
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of the whole training, where its script does not tell.",
            show_default=False,
            rich_help_panel=_GOAL,
        ),
    ] = None,
    role: RoleOption = None,
    cpu: Annotated[
        str | None, typer.Option("--cpu", metavar="CPU", help="Processors that new nodes request.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="MEMORY", help="Memory that new nodes request.", show_default=False),
    ] = None,
    scale_plan: Annotated[
        Path | None,
        typer.Option(
            "--scale-plan", metavar="FILE", help="Do what this ScalePlan of DLRover says.", show_default=False
        ),
    ] = None,
    older: Annotated[
        bool,
        typer.Option(
            "--older",
            help="Do it also where ranks of that number cannot load the newest state: they continue with an older one, "
            "or begin anew.",
        ),
    ] = False,
    *,
    here: ChangeSession,
) -> None:
    """Change how many nodes a job has, how it chooses their number, and what new nodes request of their machines.

    What it has measured counts on. Nodes that run keep what they have: `perdure restart NAME --node 3` replaces one by
    a new one.

    [dim]perdure scale llama-8b-sft 4 · perdure scale llama-8b-sft 2:8 -n nlp · perdure scale llama-8b-sft auto[/]
    [dim]perdure scale llama-8b-sft --finish-by 6h --dry-run · perdure scale llama-8b-sft --policy max[/]
    [dim]perdure scale llama-8b-sft 4 --memory 64Gi · perdure scale llama-8b-sft --scale-plan plan.yaml[/]
    """
    from perdure.client.scaling import finish_time

    goal = {
        "policy": policy,
        "finish_by": None if finish_by is None else finish_time(finish_by, "--finish-by"),
        "max_cost": max_cost,
        "price": price,
        "max_gpu_hours": max_gpu_hours,
        "min_efficiency": min_efficiency,
        "steps": steps,
    }
    goal = {name: value for name, value in goal.items() if value is not None}
    resources = {what: amount for what, amount in (("cpu", cpu), ("memory", memory)) if amount is not None}
    if scale_plan is not None:
        if nodes or role or resources or goal or older:
            raise typer.BadParameter(
                "the plan states nodes, roles and resources itself, and no goal", param_hint="--scale-plan"
            )
        _carry_out(here, name, scale_plan)
        return
    _check(nodes)
    if nodes is None and (resources or not goal):
        raise typer.BadParameter(
            "name the number of nodes, such as 2:8, a goal, such as --finish-by 6h, or a file with --scale-plan",
            param_hint="NODES",
        )
    if older and (goal or nodes is None):
        raise typer.BadParameter("it goes with a number of nodes, and with no goal", param_hint="--older")
    if not goal:
        here.change(name, here.of(name, role).scale(nodes or "", resources, older=older), role=role)
        return

    async def prepare(client: Client) -> tuple[JobStatus, Change]:
        return await _goal(here, client, name, goal, nodes=nodes or "", resources=resources, role=role)

    async def look(client: Client) -> tuple[str, JobStatus, JobStatus]:
        before, change = await prepare(client)
        assert change.preview is not None
        return change.plan, before, await change.preview(client)

    async def carry_out(client: Client) -> Accepted:
        _, change = await prepare(client)
        return await change.send(client)

    if here.dry_run:
        _show(here, *here.run(look))
    else:
        _tell(here, name, here.run(carry_out))


def _tell(here: ChangeSession, name: str, accepted: Accepted) -> None:
    if here.json:
        here.show(accepted)
        return
    out.print(accepted.message, markup=False)
    here.hint(f"perdure plan {name}{here.flag}", f"perdure watch {name}{here.flag}")


def _check(nodes: str | None) -> None:
    from perdure.base.errors import PerdureError
    from perdure.contract.users import AS_SPECIFIED
    from perdure.spec.roles import NodeCount

    try:
        if nodes not in (None, AS_SPECIFIED):
            NodeCount.model_validate(nodes)
    except ValueError:
        raise PerdureError(f'NODES: got "{nodes}"; expected a number such as 4, a range such as 2:8, or auto') from None


async def _goal(
    here: ChangeSession,
    client: Client,
    name: str,
    goal: dict[str, Any],
    *,
    nodes: str,
    resources: dict[str, str],
    role: str | None,
) -> tuple[JobStatus, Change]:
    """The present status, and the change of `scaling`.

    Raises:
        Refused: if the job has ended, or its worker knows no such change.
    """
    from perdure.base.errors import Refused

    status = await client.status(name, role=role)
    if status.finished_at:
        raise Refused(f"{name} does not run: it has ended as {status.phase}")
    return status, here.of(name, role).goal(status, goal, nodes=nodes, resources=resources)


def _show(here: ChangeSession, plan_: str, before: JobStatus, after: JobStatus) -> None:
    view = after.scaling
    if here.json:
        here.show({"name": after.name, "would": after.goal, "nodes": after.nodes, "scaling": view})
        return
    out.print(f"{text.plan(plan_, before)}; nothing was changed", markup=False)
    out.print(f"it would {plan.would_choose(after)}", markup=False)
    if view is not None:
        plan.show_sizes(after, view)


def _carry_out(here: ChangeSession, name: str, path: Path) -> None:
    """Does what a ScalePlan says, or describes it with --dry-run."""
    from perdure.base.errors import PerdureError
    from perdure.client.scale_plans import PlanRequest, describe, translate
    from perdure.spec.errors import SpecError
    from perdure.spec.importers.scaleplan import ScalePlan, read_scale_plan_file

    def tell(request: PlanRequest, message: str) -> None:
        if not here.json:
            out.print(message, markup=False)
        done.append({"would" if here.dry_run else "message": message, "request": request.model_dump(mode="json")})

    async def carry_out(client: Client, plan: ScalePlan) -> None:
        requests = await translate(client, plan, name, namespace=here.namespace, reason=here.reason)
        for warning in plan.warnings:
            warn(str(warning))
        for request in requests:
            if here.dry_run:
                tell(request, f"would {describe(request)}; nothing was changed")
            else:
                tell(request, (await client.change(name, request)).message)

    done: list[dict[str, object]] = []
    try:
        plan = read_scale_plan_file(path)
        here.run(lambda client: carry_out(client, plan))
    except SpecError as error:
        raise PerdureError(f"{path}: {error}", remedy="docs/importing.md says what becomes of each field.") from None
    if here.json:
        here.show(done)
    elif not here.dry_run:
        here.hint(f"perdure watch {name}{here.flag}")
