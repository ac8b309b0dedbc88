"""Messages about the key-value store of a job: between agents and its `Store` workflow.

Values are bytes, which travel as URL-safe base64. A rank's call is named by its client and sequence number, so a call
that is repeated because its answer was lost changes the store once.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, model_validator

from perdure.contract.agents import AgentMessage
from perdure.contract.base import Message, ShortText, Vocabulary
from perdure.contract.identity import NodeCredentials
from perdure.contract.routes import Destination, Route, RoutedMessage

__all__ = [
    "StoreAction",
    "StoreAnswer",
    "StoreAnswers",
    "StoreCall",
    "StoreChanged",
    "StoreNeeded",
    "StoreRequest",
    "StoreView",
]

LONGEST_KEY = 512
"""Characters."""
LARGEST_CALL = 512 * 1024
"""Bytes of keys and values in one call: as base64 it stays below the gateway's limit of 1 MiB for one message."""
MOST_KEYS_AT_ONCE = 1_024
"""Keys of one call."""
MOST_CALLS = 256
"""Calls of one request of a node."""

Key = Annotated[str, Field(min_length=1, max_length=LONGEST_KEY)]


class _Binary(Message):
    model_config: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class StoreAction(Vocabulary):
    """What a call does with its keys."""

    SET = "SET"
    """Sets each key to the value at the same place."""
    GET = "GET"
    """Returns the values of all keys, once each key is set."""
    WAIT = "WAIT"
    """Returns once each key is set."""
    CHECK = "CHECK"
    """Returns whether each key is set."""
    ADD = "ADD"
    """Adds `amount` to the number at the key, 0 where it is not set, and returns the sum."""
    APPEND = "APPEND"
    """Appends the value to that of the key, empty where it is not set."""
    COMPARE_SET = "COMPARE_SET"
    """Sets the key to the second value if it has the first one; an empty first value also stands for an unset key."""
    DELETE = "DELETE"
    """Deletes the key, and returns whether it was set."""
    COUNT = "COUNT"
    """Returns the number of keys."""
    LIST = "LIST"
    """Returns the names of all keys."""
    JOIN = "JOIN"
    """Records that `member` has arrived at the barrier that the key names, and returns the barrier's round."""
    AWAIT_JOINS = "AWAIT_JOINS"
    """Returns once `amount`, a round of the barrier that the key names, is complete."""
    UNKNOWN = "UNKNOWN"


class StoreCall(_Binary):
    """One call of a rank."""

    client: str = Field(min_length=1, max_length=64)
    """The caller: a part of a process that has one call in progress at a time."""
    sequence: int = Field(ge=1, lt=2**62)
    """The number of the call: the client's calls are numbered in ascending order, and a repeat keeps its number."""
    action: StoreAction
    keys: tuple[Key, ...] = Field(default=(), max_length=MOST_KEYS_AT_ONCE)
    values: tuple[bytes, ...] = Field(default=(), max_length=MOST_KEYS_AT_ONCE)
    amount: int = Field(default=0, ge=-(2**63), lt=2**63)
    member: int = Field(default=0, ge=0, lt=2**31)
    """The global rank that arrives at a barrier."""
    size: int = Field(default=1, ge=1, le=100_000)
    """The number of ranks that a barrier waits for."""
    lasting: bool = False
    """Whether the keys are those of the job, which survive generations, instead of the generation's."""

    @model_validator(mode="after")
    def _is_complete(self) -> StoreCall:
        several = {StoreAction.SET, StoreAction.GET, StoreAction.WAIT, StoreAction.CHECK}
        none = {StoreAction.COUNT, StoreAction.LIST}
        if self.action not in several | none and len(self.keys) != 1:
            raise ValueError(f"keys: {self.action} needs one key, found {len(self.keys)}")
        needed = {
            StoreAction.SET: len(self.keys),
            StoreAction.APPEND: 1,
            StoreAction.COMPARE_SET: 2,
        }.get(self.action, 0)
        if len(self.values) != needed:
            raise ValueError(f"values: {self.action} needs {needed}, found {len(self.values)}")
        if self.weight > LARGEST_CALL:
            raise ValueError(f"keys and values have {self.weight} bytes; at most {LARGEST_CALL} can be sent at once")
        return self

    @property
    def weight(self) -> int:
        """Bytes of keys and values."""
        return sum(map(len, self.values)) + sum(len(key.encode()) for key in self.keys)


class StoreAnswer(_Binary):
    """The answer to one call."""

    waits: bool = False
    """The call is to be sent again when the agent is notified that the store has changed."""
    later: bool = False
    """The answers before this one are large: the call was not carried out, and is to be sent again at once."""
    number: int = 0
    """A sum, a number of keys, the round of a barrier; 1 or 0 for yes or no."""
    complete: bool = False
    """Whether all ranks have arrived at the barrier, after JOIN."""
    values: tuple[bytes, ...] = ()
    keys: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """What a call waits for, abridged: for the message of its timeout."""
    refused: ShortText = ""
    """Why the call was not carried out, for its user."""
    superseded: bool = False
    """The call is of a rank of an older generation, or the client has sent a newer call."""
    generation: int = 0
    """The generation of the rank when the call was sent, which the agent adds; 0 where it is not known."""


class StoreRequest(RoutedMessage, route=Route(Destination.STORE, "call")):
    """Argument of the update `call`: calls of several ranks of one node."""

    generation: int = Field(ge=0)
    """The generation of all these ranks."""
    calls: tuple[StoreCall, ...] = Field(max_length=MOST_CALLS)


class StoreAnswers(Message):
    """Result of the update `call`: an answer to each call, in their order."""

    calls: tuple[StoreAnswer, ...]


class StoreChanged(Message):
    """Argument of the command `store_changed`: the agent sends the calls that wait once more."""

    node: NodeCredentials


class StoreNeeded(AgentMessage, route=Route(Destination.GROUP, "store_needed", newest_only=True, journaled=False)):
    """A rank uses the store of its job, which the server does not know. The group starts it."""


class StoreView(Message):
    """What is known of a store: its query `usage`, and the workflow's result."""

    generation: int = 0
    keys: int = 0
    """Keys of the generation."""
    lasting_keys: int = 0
    bytes: int = 0
    """Bytes of all keys and values."""
    waiting_nodes: int = 0
