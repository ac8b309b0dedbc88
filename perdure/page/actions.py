"""The buttons of a job's page: what each asks for, and the change that it makes, which is one of the command line's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from perdure.base.errors import PerdureError
from perdure.client.changes import Change, Changes
from perdure.contract.users import AS_SPECIFIED
from perdure.page.access import Right
from perdure.spec.roles import NodeCount


@dataclass(frozen=True)
class Action:
    """One button."""

    name: str
    """The command's name, in addresses."""
    label: str
    change: Callable[[Changes, Mapping[str, str]], Change]
    """Makes the change of the values of its form."""
    asks_nodes: bool = False
    """It asks for a number of nodes."""
    asks_node: bool = False
    """It asks for the number of one node."""
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
        return not (self.asks_nodes and not values["nodes"]) and not (self.asks_node and not values["node"])


def _scale(changes: Changes, values: Mapping[str, str]) -> Change:
    try:
        if values["nodes"] != AS_SPECIFIED:
            NodeCount.model_validate(values["nodes"])
    except ValueError:
        got = values["nodes"]
        raise PerdureError(f'Nodes: got "{got}"; expected a number such as 4, a range such as 2:8, or auto') from None
    return changes.scale(values["nodes"])


def _relaunch(changes: Changes, values: Mapping[str, str]) -> Change:
    if not values["node"].isdecimal():
        raise PerdureError(f'Node: got "{values["node"]}"; expected the number of a node')
    return changes.relaunch(int(values["node"]))


ACTIONS = {
    action.name: action
    for action in (
        Action("scale", "Scale", _scale, asks_nodes=True),
        Action("restart", "Restart", lambda changes, _: changes.restart()),
        Action("relaunch", "Replace a node", _relaunch, asks_node=True),
        Action("checkpoint", "Save a checkpoint", lambda changes, _: changes.checkpoint(), has_role=False),
        Action("suspend", "Suspend", lambda changes, _: changes.suspend()),
        Action("resume", "Resume", lambda changes, _: changes.resume()),
        Action("cancel", "Cancel", lambda changes, _: changes.cancel(), has_role=False, ends=True),
    )
}
"""The buttons by their names, in the order in which they are shown."""

FIELDS = ("nodes", "node", "role", "reason")
"""The fields of their forms."""
