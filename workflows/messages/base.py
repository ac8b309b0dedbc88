"""What every model of the contract is: a value that only ever grows.

Only additive changes: a running job may hold messages of an older release in its history, and an agent of an older
release may stand beside a newer worker. So unknown fields are ignored, and a new field has a default.

Times are of the event, in UTC, set where it happened; graces count from them and never from the time of arrival.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """A value: immutable, and tolerant of fields from a newer release."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)
