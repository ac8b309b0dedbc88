"""The command `perdure plan`: what a job knows of its speed, and what it makes of that."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perdure.base.errors import PerdureError
from perdure.cli import text
from perdure.cli.common import JobArgument, RoleOption, Session, out
from perdure.cli.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.client.client import Client
    from perdure.contract import JobStatus, ScalingView
    from perdure.workflows.policy.capacity.throughput import Throughput

_GIVEN = ("nodes", "price")


@dataclass(frozen=True)
class Size:
    """How fast the job is with one number of nodes."""

    nodes: int
    step: float
    """Seconds of a step."""
    spread: float
    """By how much that varies or, where it is expected, may be wrong: half the distance between quartiles."""
    measured: bool
    speedup: float
    """Times as fast as with the fewest nodes."""
    rest: float | None = None
    """Seconds for what is left of the training; None where the script does not tell how much that is."""
    cost: float | None = None
    """What that costs, in the unit of the price."""


def plan(
    name: JobArgument,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if",
            metavar="nodes=N,price=P",
            help="The time that the rest takes with N nodes, and its cost at a price for a node and hour.",
            show_default=False,
        ),
    ] = None,
    role: RoleOption = None,
    *,
    here: Session,
) -> None:
    """Show how fast a job is with different numbers of nodes, which one it chooses, and why: `scaling.policy` in its
    specification.

    Of a file, show what `resources: auto` in it would become now.

    [dim]perdure plan llama-8b-sft · perdure plan job.yaml · perdure plan llama-8b-sft --what-if nodes=16,price=2.1[/]
    """
    if Path(name).suffix in (".yaml", ".yml", ".json") and Path(name).is_file():
        _plan_file(here, Path(name))
        return
    asked = _read(what_if) if what_if is not None else {}
    status = here.run(lambda client: _status(client, name, role))
    view = status.scaling
    if view is None and (status.unused or status.smaller) and what_if is None:
        _tell_resources(here, status)
        return
    if view is None:
        raise PerdureError(
            f"{name}: its role {status.role} takes all nodes that it gets. `perdure scale {name} --policy "
            "efficient` has it choose by its speed, --finish-by and --max-cost by a goal, and `--policy manual` only "
            "shows its speed; `share: true` in its specification has it share its cluster"
        )
    nodes = int(asked["nodes"]) if "nodes" in asked else None
    found = sizes(view, status, also=() if nodes is None else (nodes,), price=asked.get("price", view.price))
    if nodes is not None:
        found = [size for size in found if size.nodes == nodes]
        if not found:
            raise PerdureError(f"--what-if nodes={nodes}: too little is measured to say; {view.why}")
    if here.json:
        known = view.model_dump(mode="json")
        rows = [asdict(size) for size in found]
        here.show({"name": name, "role": status.role, "scaling": known, "sizes": rows, **_resources(status)})
        return
    span = f"{view.fewest}:{view.largest}"
    by = "a user" if view.policy == "manual" else "the sharing of the cluster" if view.shares else "speed"
    out.print(f"{name}: {text.count(status.nodes, 'node')} of {span}, chosen by {by}: {view.why}", markup=False)
    show_sizes(status, view, found)
    for one in (*map(text.unused, status.unused), *map(text.smaller, status.smaller)):
        out.print(one, markup=False)
    here.hint(f"perdure explain {name}{here.flag}", f"perdure scale {name} {span}{here.flag}")


def _plan_file(here: Session, file: Path) -> None:
    """Shows what the roles of a file would request that leave it to jobs of the past."""
    from perdure.cli import auto
    from perdure.spec.load import validate_file

    job, _ = validate_file(file)
    [chosen] = auto.choose(here, [job])
    if not chosen:
        raise PerdureError(f"{file}: no role has `resources: auto`, so there is nothing to choose before it starts")
    if here.json:
        here.show([one.model_dump(mode="json") for one in chosen])
        return
    for line in auto.words(chosen):
        out.print(line, markup=False)
    here.hint(f"perdure submit {file}")


def would_choose(after: JobStatus) -> str:
    """What a job would do whose status were this, as a clause that follows "would"."""
    view = after.scaling
    if view is None:
        return f"train with up to {text.count(after.nodes_allowed, 'node')}"
    chosen = "nothing yet" if view.chosen is None else text.count(view.chosen, "node")
    return f"choose {chosen}: {view.problem or view.why}"


def show_sizes(status: JobStatus, view: ScalingView, found: list[Size] | None = None) -> None:
    """Prints the speed with numbers of nodes: these, by default those of interest."""
    found = sizes(view, status, also=(), price=view.price) if found is None else found
    if found:
        out.print(table(found, view))


async def _status(client: Client, name: str, role: str | None) -> JobStatus:
    from perdure.client.resource_use import with_peaks

    status = await client.status(name, role=role)
    return with_peaks(status, await client.nodes(name, role=status.role))


def _resources(status: JobStatus) -> dict[str, object]:
    return {
        "requests": status.requests,
        "peaks": status.peaks and status.peaks.model_dump(mode="json"),
        "unused": [one.model_dump(mode="json") for one in status.unused],
        "smaller": [one.model_dump(mode="json") for one in status.smaller],
    }


def _tell_resources(here: Session, status: JobStatus) -> None:
    """Shows what a job requests and does not use that does not choose its number of nodes."""
    if here.json:
        here.show({"name": status.name, "role": status.role, **_resources(status)})
        return
    for one in (*map(text.unused, status.unused), *map(text.smaller, status.smaller)):
        out.print(one, markup=False)
    here.hint(f"perdure status {status.name}{here.flag}")


def sizes(view: ScalingView, status: JobStatus, *, also: Iterable[int], price: float | None) -> list[Size]:
    """Returns the numbers of nodes that are of interest, ascending, as far as something is known of them.

    Args:
        view: What the job knows.
        status: Its progress and its nodes.
        also: Further numbers of nodes.
        price: The price of a node for an hour.
    """
    from perdure.workflows.policy.capacity.throughput import Throughput

    throughput = Throughput(view.paces, global_batch=view.global_batch)
    known = [pace.nodes for pace in view.paces]
    chosen = [] if view.chosen is None else [view.chosen, view.chosen + view.unit]
    interesting = {view.fewest, *known, *(n for n in chosen if n <= view.largest), view.largest, *also}
    return [size for n in sorted(interesting) if (size := _size(throughput, n, view, status, price)) is not None]


def _size(throughput: Throughput, nodes: int, view: ScalingView, status: JobStatus, price: float | None) -> Size | None:
    expected, speed = throughput.step(nodes), throughput.speed(nodes)
    least = throughput.speed(view.fewest) or speed
    if expected is None or speed is None or least is None:
        return None
    left, rest = _steps_left(view, status), None
    if left is not None and status.nodes:
        # Where each rank has a fixed number of samples, more nodes need fewer steps for the samples that are left.
        same = view.global_batch or view.fixed_steps
        rest = left * expected.seconds * view.pauses * (1 if same else status.nodes / nodes)
    return Size(
        nodes=nodes,
        step=expected.seconds,
        spread=expected.spread,
        measured=expected.measured,
        speedup=speed / least,
        rest=rest,
        cost=None if rest is None or price is None else rest / 3600 * nodes * price,
    )


def _steps_left(view: ScalingView, status: JobStatus) -> int | None:
    progress = status.progress
    if view.steps_left is not None:
        return view.steps_left
    if progress is None or progress.total_steps is None:
        return None
    return max(progress.total_steps - progress.step, 0)


def table(found: list[Size], view: ScalingView) -> Rows:
    """The speed with these numbers of nodes."""
    rows = Rows.of("NODES", "STEP", "SPEED", "PER NODE", "REST", "COST", "")
    for size in found:
        spread = f" ±{size.spread:.2g}" if size.spread else ""
        rows.add_row(
            str(size.nodes),
            f"{size.step:.3g}{spread} s",
            f"{size.speedup:.2f}x",
            f"{size.speedup * view.fewest / size.nodes:.0%}",
            "" if size.rest is None else text.duration(size.rest),
            "" if size.cost is None else f"{size.cost:,.2f}",
            escape(", ".join(_notes(size, view))),
        )
    return rows


def _notes(size: Size, view: ScalingView) -> list[str]:
    notes = ["measured" if size.measured else "expected"]
    if size.nodes in view.meets:
        notes.append("in time" if view.policy == "deadline" else "within the budget")
    return [*notes, "chosen"] if size.nodes == view.chosen else notes


def _read(what_if: str) -> dict[str, float]:
    """Reads `nodes=16,price=2.1`."""
    found: dict[str, float] = {}
    for part in what_if.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in _GIVEN or name in found:
            raise PerdureError(
                f"--what-if: got {part.strip()!r}; expected {' and '.join(f'{n}=' for n in _GIVEN)} once"
            )
        try:
            found[name] = int(value) if name == "nodes" else float(value)
        except ValueError:
            found[name] = -1
        if not 0 < found[name] < 1e9:
            expected = "a whole number of at least 1" if name == "nodes" else "a number above 0"
            raise PerdureError(f"--what-if {name}: got {value.strip()!r}; expected {expected}")
    return found
