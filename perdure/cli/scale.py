"""The command `perdure scale`: how many nodes a job has, and how it chooses their number."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import plan, text
from perdure.cli.change import ChangeSession
from perdure.cli.common import JobArgument, RoleOption, out, warn

if TYPE_CHECKING:
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
    goal = {
        "policy": policy,
        "finish_by": None if finish_by is None else _time(finish_by),
        "max_cost": max_cost,
        "price": price,
        "max_gpu_hours": max_gpu_hours,
        "min_efficiency": min_efficiency,
        "steps": steps,
    }
    goal = {name: value for name, value in goal.items() if value is not None}
    resources = {what: amount for what, amount in (("cpu", cpu), ("memory", memory)) if amount is not None}
    if scale_plan is not None:
        if nodes or role or resources or goal:
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
    if not goal:
        here.change(name, here.of(name, role).scale(nodes or "", resources), role=role)
    elif here.dry_run:
        before, after = here.run(lambda client: _preview(client, name, nodes or "", goal, role))
        _show(here, before, after)
    else:
        accepted = here.run(lambda client: _change(client, name, nodes or "", goal, resources, role, here.reason))
        _tell(here, name, accepted)


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


def _time(given: str) -> str:
    """Reads a time with its zone, or a duration from now on."""
    from perdure.base.errors import PerdureError
    from perdure.spec.durations import parse_duration

    try:
        return (datetime.now(UTC).replace(microsecond=0) + parse_duration(given)).isoformat()
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise PerdureError(
            f'--finish-by: got "{given}"; expected a time with its zone such as 2026-12-01T08:00:00Z, or a duration '
            "from now on such as 6h"
        )
    return time.isoformat()


async def _scaling(
    client: Client, name: str, role: str | None, goal: dict[str, Any]
) -> tuple[JobStatus, dict[str, Any]]:
    """The present status, and the whole `scaling` with these changes.

    Raises:
        Refused: if the job has ended, or its worker knows no such change.
    """
    from perdure.base.errors import Refused
    from perdure.client.scaling import new_goal

    status = await client.status(name, role=role)
    if status.finished_at:
        raise Refused(f"{name} does not run: it has ended as {status.phase}")
    if status.goal is None:
        raise Refused(f"{name}: its worker is of a release that cannot change `scaling` of a running job; upgrade it")
    return status, new_goal(status.goal, goal)


async def _change(
    client: Client,
    name: str,
    nodes: str,
    goal: dict[str, Any],
    resources: dict[str, str],
    role: str | None,
    reason: str,
) -> Accepted:
    from perdure.contract import ScaleRequest

    _, scaling = await _scaling(client, name, role, goal)
    return await client.change(
        name, ScaleRequest(nodes=nodes, scaling=scaling, resources=resources, role=role, reason=reason)
    )


async def _preview(
    client: Client, name: str, nodes: str, goal: dict[str, Any], role: str | None
) -> tuple[JobStatus, JobStatus]:
    before, scaling = await _scaling(client, name, role, goal)
    return before, await client.preview_scale(name, nodes, scaling=scaling, role=role)


def _show(here: ChangeSession, before: JobStatus, after: JobStatus) -> None:
    view = after.scaling
    if here.json:
        here.show({"name": after.name, "would": after.goal, "nodes": after.nodes, "scaling": view})
        return
    goal = ", ".join(f"{name} {value}" for name, value in (after.goal or {"policy": "max"}).items())
    out.print(f"{text.plan(f'have {goal}', before)}; nothing was changed", markup=False)
    if view is None:
        out.print(f"it would train with up to {text.count(after.nodes_allowed, 'node')}", markup=False)
        return
    out.print(f"it would choose {_chosen(view.chosen)}: {view.problem or view.why}", markup=False)
    plan.show_sizes(after, view)


def _chosen(nodes: int | None) -> str:
    return "nothing yet" if nodes is None else text.count(nodes, "node")


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
