"""The specification that an importer writes, with the source location of each field."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from ..errors import SpecProblem, format_path, format_value
from ..fields import Location
from .reader import Field


class Draft:
    """A specification that is being written; it need not be valid before it is complete."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.role: Location = ("roles", "worker")
        """The role that is being written; most sources have one, whatever they call its replicas."""
        self.env: Location = ("env",)
        """The place of the role's environment variables."""
        self.origins: dict[Location, list[Field]] = {}
        self.missing: list[SpecProblem] = []
        self.cluster = ""
        """The address of the cluster that the source names."""

    @property
    def pod_template(self) -> Location:
        """The place of the role's `pod_template`."""
        return (*self.role, "pod_template")

    @property
    def pod(self) -> Location:
        """The place of the role's pod."""
        return (*self.pod_template, "spec")

    @property
    def container(self) -> Location:
        """The place of the container that runs the role's command."""
        return (*self.pod, "containers", 0)

    def begin_role(self, name: str) -> None:
        """Begins one role of several."""
        self.role = ("roles", name)
        self.env = (*self.role, "env")

    def put_shared(self, location: Location, value: Any, *of: Field) -> None:
        """Writes a field that all roles share; a value that differs from that of an earlier role is left out."""
        if value is None or self.get(location) in (None, value):
            self.put(location, value, *of)
            return
        for field in of:
            field.drop(
                f"{format_path(location)} is {format_value(self.get(location))} already, for all nodes of the job"
            )

    def put(self, location: Location, value: Any, *of: Field) -> None:
        """Writes a field, and accounts for the fields of the source that it was made of; None writes nothing.

        An index in the location addresses an item of a list, or the position after its last item.
        """
        if value is None:
            return
        self._write(location, value)
        for field in of:
            if field.present:
                field.carry(location)
                self.origins.setdefault(location, []).append(field)

    def append(self, location: Location, value: Any, *of: Field) -> None:
        """Appends an item to a list."""
        self.put((*location, len(cast("list[Any]", self.get(location) or []))), value, *of)

    def get(self, location: Location) -> Any:
        """The value at a location; None if there is none."""
        value: Any = self.data
        for part in location:
            try:
                value = value[part]
            except (KeyError, IndexError):
                return None
        return value

    def remove(self, location: Location) -> list[tuple[Location, Field]]:
        """Removes a field, and mappings that become empty by that.

        Returns:
            Its sources: the fields below it, each with its location in the source.
        """
        container = self.get(location[:-1])
        if container is not None and self.get(location) is not None:
            del container[location[-1]]
            if not container and len(location) > 1:
                self.remove(location[:-1])
        return self.fields_below(location)

    def fields_below(self, location: Location) -> list[tuple[Location, Field]]:
        """The fields at and below a location, each with its location in the source."""
        return [
            (place, field)
            for place, fields in self.origins.items()
            for field in fields
            if place[: len(location)] == location
        ]

    def must_fill(self, location: Location, message: str, *, hint: str = "") -> None:
        """Notes a field that the user has to write, because the source does not define it."""
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
