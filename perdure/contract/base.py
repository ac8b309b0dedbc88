"""Base classes and text types of all messages.

Models change by addition only: a running job may hold messages of an older release in its history, and an agent of an
older release may run beside a newer worker. So a reader ignores unknown fields, and a new field has a default.

Times are times of the event, in UTC, set where it happened, on the server's clock as far as an agent knows it. Grace
periods count from them, never from the arrival.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from math import isnan
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import to_json

__all__ = ["Message"]


def _in_utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


Time = Annotated[datetime, AfterValidator(_in_utc)]
"""A time in UTC. A value without a zone is read as UTC: Python does not compare it with others, so a decision would
fail."""


LONGEST_TEXT = 1_000
"""Characters of one text for people: a job carries the texts about thousands of nodes and past incidents in its
state."""

LONGEST_ERROR = 4_000
"""Characters of a program's own output or error, which explains a failure best."""


def shorten(text: str, limit: int = LONGEST_TEXT) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def size_in_json(text: str) -> int:
    """The bytes of a text in a message: more than its characters where they are not ASCII, or must be escaped."""
    return len(to_json(text))


_LARGEST_NUMBER = 1e15


def _carried(number: float) -> float:
    return 0.0 if isnan(number) else min(max(number, -_LARGEST_NUMBER), _LARGEST_NUMBER)


Number = Annotated[float, AfterValidator(_carried)]
"""A number of a message that another message, or the state of a job, carries on. JSON has none that is not finite: who
reads it then could not read the whole message."""

ShortText = Annotated[str, AfterValidator(shorten)]
"""A text for people. A longer text keeps its beginning."""

ErrorText = Annotated[str, AfterValidator(lambda text: shorten(text, LONGEST_ERROR))]
"""A program's own error message. A longer text keeps its beginning."""

LogTail = Annotated[str, AfterValidator(lambda text: text[-LONGEST_ERROR:])]
"""The last lines of a program's output. A longer text keeps its end."""


class Message(BaseModel):
    """An immutable value that ignores fields of a newer release."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True,
        extra="ignore",
        # A process makes and reads few of the messages that it imports.
        defer_build=True,
        # Messages hold tokens and variables, and errors go to logs and histories.
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    def replace(self, **fields: object) -> Self:
        """Returns the message with other values of these fields, which are not validated.

        A decision on a thousand nodes makes ten thousand copies, so this does only what `model_copy` must do for a
        message: it has no extra and no private fields. Which fields were given is not asked of messages.
        """
        changed = self.__new__(type(self))
        object.__setattr__(changed, "__dict__", {**self.__dict__, **fields})
        object.__setattr__(changed, "__pydantic_fields_set__", self.__pydantic_fields_set__)
        object.__setattr__(changed, "__pydantic_extra__", None)
        object.__setattr__(changed, "__pydantic_private__", None)
        return changed

    def part(self, base: type[Message]) -> dict[str, Any]:
        """Returns the fields of a base class, as another message with that base takes them."""
        values = self.__dict__
        return {name: values[name] for name in base.model_fields}


class Vocabulary(StrEnum):
    """An enumeration in messages. A value that this release does not know is read as the member `UNKNOWN`.

    A value of a newer release would otherwise fail the whole message, and the SDK drops a signal that it cannot decode.
    Each enumeration has a member `UNKNOWN`, and each decision on members handles it.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls("UNKNOWN") if isinstance(value, str) and value != "UNKNOWN" else None
