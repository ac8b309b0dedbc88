"""What every model of the contract is: a value that only ever grows.

Only additive changes: a running job may hold messages of an older release in its history, and an agent of an older
release may stand beside a newer worker. So unknown fields are ignored, and a new field has a default.

Times are of the event, in UTC, set where it happened; graces count from them and never from the time of arrival.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict


def _in_utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


Time = Annotated[datetime, AfterValidator(_in_utc)]
"""A moment. One without a zone is UTC: Python refuses to compare it with others, and a decision would fail by that."""


LONGEST_TEXT = 1_000
"""Characters of one text for people: what a job says of thousands of nodes and of its past rides in its state."""

LONGEST_ERROR = 4_000
"""Characters of what a program said itself: what failed is told by it."""


def shorten(text: str, limit: int = LONGEST_TEXT) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


ShortText = Annotated[str, AfterValidator(shorten)]
"""A text for people. Of a longer one the beginning is kept."""

ErrorText = Annotated[str, AfterValidator(lambda text: shorten(text, LONGEST_ERROR))]
"""What a program said about its error. Of a longer one the beginning is kept."""

LogTail = Annotated[str, AfterValidator(lambda text: text[-LONGEST_ERROR:])]
"""The last lines of a program's output. Of a longer one the end is kept."""


class Message(BaseModel):
    """A value: immutable, and tolerant of fields from a newer release.

    A field whose name on the wire is another one, because histories have it, is declared with `Field(validation_alias=,
    serialization_alias=)`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class Vocabulary(StrEnum):
    """A closed set of words in messages. A word that this release does not know is read as the set's `UNKNOWN`.

    A value of a newer release would otherwise fail the whole message, and the SDK drops a signal that it cannot decode.
    Each set has a member `UNKNOWN`, and each decision about a member one for it.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls("UNKNOWN") if isinstance(value, str) and value != "UNKNOWN" else None
