"""Actions of a job on an interruption, as data: effects and the words of `perdure explain` are both made from them.

An action names the nodes (slots) that it concerns, and none where it concerns all of a role. As an option that was not
taken it may name none, either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field

from perdure.contract.base import Message, ShortText, Time
from perdure.spec.durations import Duration

__all__ = [
    "Action",
    "Actions",
    "AwaitNodes",
    "EndHang",
    "ExchangePlaces",
    "ExtendFirstStep",
    "NewWorld",
    "RaiseMemory",
    "ReplaceNodes",
    "RestartCommands",
    "RestartRanks",
    "RoleAction",
    "RollBack",
    "Shrink",
    "StartCommands",
    "StartOver",
    "Stop",
    "Suspend",
    "Wait",
    "kind_of",
]


class RoleAction(Message):
    """An action on one role of a job."""

    nodes: tuple[int, ...] = ()
    """The nodes (slots) that it concerns."""


def kind_of(action: type[RoleAction]) -> str:
    """The `kind` of all actions of a class."""
    return action.model_fields["kind"].default


class Wait(RoleAction):
    """Wait for more reports, and decide then."""

    kind: Literal["WAIT"] = "WAIT"
    until: Time | None = None


class Stop(RoleAction):
    """Stop the job: it has failed."""

    kind: Literal["STOP"] = "STOP"
    reason: str = ""
    exit_code: int = 1


class NewWorld(RoleAction):
    """Form another world, although nothing has failed."""

    kind: Literal["NEW_WORLD"] = "NEW_WORLD"
    reason: ShortText = ""


class RestartRanks(RoleAction):
    """Restart the ranks of the surviving nodes where they are. It names the nodes that failed, as far as is known."""

    kind: Literal["RESTART_RANKS"] = "RESTART_RANKS"
    others: bool = False
    """Something else is done about the culprit's own ranks."""


class EndHang(RoleAction):
    """Restart the ranks of the surviving nodes where they are, since one of them hangs. It names the nodes of that one,
    as far as is known."""

    kind: Literal["END_HANG"] = "END_HANG"


class ExchangePlaces(RoleAction):
    """Restart the ranks of every node where they are, with the ranks of these two nodes exchanged."""

    kind: Literal["EXCHANGE_PLACES"] = "EXCHANGE_PLACES"


class StartCommands(RoleAction):
    """Start commands again that have ended."""

    kind: Literal["START_COMMAND"] = "START_COMMAND"


class RestartCommands(RoleAction):
    """End commands, if they still run, and start them again on their nodes."""

    kind: Literal["RESTART_COMMAND"] = "RESTART_COMMAND"
    between_worlds: bool = False
    """The other commands continue, and these skip the torchruns that have finished."""


class ReplaceNodes(RoleAction):
    """Give nodes up, and have others take their places."""

    kind: Literal["REPLACE_NODES"] = "REPLACE_NODES"
    suspected: bool = False
    """They are not known to be lost."""
    elsewhere: bool = False
    """Their successors should run on other machines."""
    between_worlds: bool = False
    """The other commands continue, and the successors' skip the torchruns that have finished."""
    creates_nodes: bool = True
    """The backend creates the successors; otherwise machines join by themselves."""


class Shrink(RoleAction):
    """Continue with fewer nodes until there are more."""

    kind: Literal["SHRINK"] = "SHRINK"
    size: int = 0
    """Nodes of the next world."""
    survivors: int = 0


class AwaitNodes(RoleAction):
    """Form no world before the missing nodes are there, or the time is over."""

    kind: Literal["AWAIT_NODES"] = "AWAIT_NODES"
    patience: Duration | None = None


class RollBack(RoleAction):
    """Have the next world load no state that was saved after a step, since such a state may not be sound."""

    kind: Literal["ROLL_BACK"] = "ROLL_BACK"
    after: int = -1
    """The newest step that it may load; below 0 for none."""
    found_at: int = 0
    """The step whose loss was not a number; below 0 where the job goes back for another reason."""


class RaiseMemory(RoleAction):
    """Have the successors of these nodes, and all later ones, request more memory than before: theirs has run out."""

    kind: Literal["RAISE_MEMORY"] = "RAISE_MEMORY"
    memory: int = Field(default=0, ge=0)
    """Bytes that nodes request from now on."""
    before: int = Field(default=0, ge=0)
    """Bytes that those had whose memory ran out."""
    steps: int | None = None
    """Steps of their world until then; None where none are known."""
    in_place: tuple[int, ...] = ()
    """Those of them that get it while they run."""


class ExtendFirstStep(RoleAction):
    """Give the next world twice the time for its first step."""

    kind: Literal["EXTEND_FIRST_STEP"] = "EXTEND_FIRST_STEP"


class StartOver(RoleAction):
    """Train from the first step, although there are checkpoints."""

    kind: Literal["START_OVER"] = "START_OVER"


class Suspend(RoleAction):
    """Release all nodes of the role, until it is resumed."""

    kind: Literal["SUSPEND"] = "SUSPEND"
    alone: bool = False
    """The rest of the job continues."""


_AnyAction = (
    Wait
    | Stop
    | NewWorld
    | RestartRanks
    | EndHang
    | ExchangePlaces
    | StartCommands
    | RestartCommands
    | ReplaceNodes
    | Shrink
    | AwaitNodes
    | ExtendFirstStep
    | StartOver
    | Suspend
    | RollBack
    | RaiseMemory
)

_KINDS = {kind_of(model) for model in get_args(_AnyAction)}


def _known(actions: Any) -> Any:
    return [one for one in actions if not isinstance(one, Mapping) or cast("Mapping[str, Any]", one)["kind"] in _KINDS]


Action = Annotated[_AnyAction, Field(discriminator="kind")]

Actions = Annotated[tuple[Action, ...], BeforeValidator(_known)]
"""The actions of one decision. Those that only a newer release knows are left out."""
