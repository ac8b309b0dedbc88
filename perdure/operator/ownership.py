"""The treatment of objects' owners, as `perdure operator --owners` says it."""

from __future__ import annotations

from enum import StrEnum


class Ownership(StrEnum):
    """The treatment of objects' owners."""

    REQUIRE = "require"
    """Only objects with a recorded owner become jobs."""
    ACCEPT_UNKNOWN = "accept-unknown"
    """Objects without a recorded owner become jobs unchecked."""
    IGNORE = "ignore"
    """No owner is read or checked: clusters without admission policies for them."""
