"""The specification as an importer writes it, with the place in the source that each field came from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from ..errors import SpecProblem
from ..fields import Location
from .reader import Field

ROLE: Location = ("roles", "worker")
"""Imported jobs have one role, whatever the source calls its replicas."""


class Draft:
    """A specification that grows; it need not be valid before it is complete."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[Location, list[Field]] = {}
        self.missing: list[SpecProblem] = []

    def put(self, location: Location, value: Any, *of: Field) -> None:
        """Writes a field, and accounts for the fields of the source that it was made of; None is nothing to write.

        An index in the location addresses an item of a list, or the one behind its last.
        """
        if value is None:
            return
        self._write(location, value)
        for field in of:
            if field.present:
                field.carry(location)
                self.origins.setdefault(location, []).append(field)

    def append(self, location: Location, value: Any, *of: Field) -> None:
        """Writes another item at the end of a list."""
        self.put((*location, len(cast("list[Any]", self.get(location) or []))), value, *of)

    def get(self, location: Location) -> Any:
        """What was written; None where nothing was."""
        value: Any = self.data
        for part in location:
            try:
                value = value[part]
            except (KeyError, IndexError):
                return None
        return value

    def remove(self, location: Location) -> list[tuple[Location, Field]]:
        """Takes a field out again, and mappings that become empty by it.

        Returns:
            What it was made of: the fields below it, each with its place in the source.
        """
        container = self.get(location[:-1])
        if container is not None and self.get(location) is not None:
            del container[location[-1]]
            if not container and len(location) > 1:
                self.remove(location[:-1])
        return self.made_of(location)

    def made_of(self, location: Location) -> list[tuple[Location, Field]]:
        """The fields at and below a location, each with its place in the source."""
        return [
            (place, field)
            for place, fields in self.origins.items()
            for field in fields
            if place[: len(location)] == location
        ]

    def must_fill(self, location: Location, message: str, *, hint: str = "") -> None:
        """Notes what the user has to write, since the source does not say it."""
        self.missing.append(SpecProblem(location=location, message=message, hint=hint))

    def _write(self, location: Location, value: Any) -> None:
        container: Any = self.data
        for part, following in pairwise(location):
            empty: Any = [] if isinstance(following, int) else {}
            if isinstance(part, int):
                if part == len(container):
                    container.append(empty)
                container = container[part]
            else:
                container = container.setdefault(part, empty)
        last = location[-1]
        if isinstance(last, int) and last == len(container):
            container.append(value)
        else:
            container[last] = value
