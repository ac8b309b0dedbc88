"""The buttons of a job's page: what each asks for, and the change that it makes, which is one of the command line's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from perdure.base.errors import PerdureError
from perdure.client.changes import Change, Changes
from perdure.client.scaling import finish_time
from perdure.contract import JobStatus
from perdure.contract.users import AS_SPECIFIED
from perdure.page.access import Right
from perdure.spec.roles import NodeCount

MakeChange = Callable[[Changes, Mapping[str, str], JobStatus], Change]
"""Makes the change of the values of an action's form, for a job with this status."""


@dataclass(frozen=True)
class Action:
    """One button."""

    name: str
    """The command's name, in addresses."""
    label: str
    change: MakeChange
    asks_nodes: bool = False
    """It asks for a number of nodes."""
    asks_node: bool = False
    """It asks for the number of one node."""
    asks_goal: bool = False
    """It asks for fields of `scaling`."""
    has_role: bool = True
    """It can be for one role of several."""
    ends: bool = False
    """It ends the job."""

    @property
    def right(self) -> Right:
        """The right that it takes."""
        return Right.END if self.ends else Right.CHANGE

    def is_complete(self, values: Mapping[str, str]) -> bool:
        """Whether the form has all that the change needs."""
        lacks_nodes, lacks_node = self.asks_nodes and not values["nodes"], self.asks_node and not values["node"]
        return not (lacks_nodes or lacks_node or (self.asks_goal and not any(map(values.get, GOAL))))

    def settled(self, values: Mapping[str, str]) -> dict[str, str]:
        """The values with times in place of durations from now on, so that what is shown first is what is done."""
        if not (self.asks_goal and values["finish_by"]):
            return dict(values)
        return {**values, "finish_by": finish_time(values["finish_by"], GOAL["finish_by"].label)}


@dataclass(frozen=True)
class GoalField:
    """One field of `scaling` in the form for goals."""

    label: str
    read: Callable[[str], object] = str
    example: str = ""
    expected: str = "a number"


GOAL = {
    "policy": GoalField("Policy"),
    "finish_by": GoalField("Finish by", example="6h, or 2026-12-01T08:00:00Z"),
    "max_cost": GoalField("Max cost", float, "250"),
    "price": GoalField("Price of a node for an hour", float, "2.1"),
    "max_gpu_hours": GoalField("Max GPU hours", float, "1000"),
    "min_efficiency": GoalField("Min efficiency", float, "0.7"),
    "steps": GoalField("Steps of the training", int, "where its script does not tell", "a whole number"),
}
"""The fields of `scaling` that a running job's form asks for, as `perdure scale` does. Empty ones stay as they are."""


def _goal(changes: Changes, values: Mapping[str, str], status: JobStatus) -> Change:
    given: dict[str, object] = {}
    for name, field in GOAL.items():
        if value := values[name]:
            try:
                given[name] = field.read(value)
            except ValueError:
                raise PerdureError(f'{field.label}: got "{value}"; expected {field.expected}') from None
    return changes.goal(status, given)


def _scale(changes: Changes, values: Mapping[str, str], _: JobStatus) -> Change:
    try:
        if values["nodes"] != AS_SPECIFIED:
            NodeCount.model_validate(values["nodes"])
    except ValueError:
        got = values["nodes"]
        raise PerdureError(f'Nodes: got "{got}"; expected a number such as 4, a range such as 2:8, or auto') from None
    return changes.scale(values["nodes"])


def _relaunch(changes: Changes, values: Mapping[str, str], _: JobStatus) -> Change:
    if not values["node"].isdecimal():
        raise PerdureError(f'Node: got "{values["node"]}"; expected the number of a node')
    return changes.relaunch(int(values["node"]))


def _without_values(change: Callable[[Changes], Change]) -> MakeChange:
    return lambda changes, values, status: change(changes)


ACTIONS = {
    action.name: action
    for action in (
        Action("scale", "Scale", _scale, asks_nodes=True),
        Action("goal", "Change the goal", _goal, asks_goal=True),
        Action("restart", "Restart", _without_values(Changes.restart)),
        Action("relaunch", "Replace a node", _relaunch, asks_node=True),
        Action("checkpoint", "Save a checkpoint", _without_values(Changes.checkpoint), has_role=False),
        Action("suspend", "Suspend", _without_values(Changes.suspend)),
        Action("resume", "Resume", _without_values(Changes.resume)),
        Action("cancel", "Cancel", _without_values(Changes.cancel), has_role=False, ends=True),
    )
}
"""The buttons by their names, in the order in which they are shown."""

FIELDS = ("nodes", "node", "role", "reason", *GOAL)
"""The fields of their forms."""
