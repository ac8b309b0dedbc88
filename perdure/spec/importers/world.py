"""Determines the size of the world and the start of its processes, from the source's replicas together with its
command's options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .draft import Draft
from .launchers import Given, Launch, LauncherError, Use, read_launch
from .pods import Pod
from .reader import Field
from .shell import fill_variables, variables_in

BUDGET = "is retry.max_restarts now, which counts the whole job's restarts within retry.window (by default an hour)"
"""The message for every number of restarts that is carried over: no two systems count in the same way."""

_AUTO = "where there is no GPU, torchrun's auto starts a process per CPU core, and Perdure's only one"

_TIMEOUTS = {
    "join_timeout": ("timing", "rendezvous", "join_timeout"),
    "last_call_timeout": ("timing", "rendezvous", "last_call"),
    "lastcall_timeout": ("timing", "rendezvous", "last_call"),
}
"""Settings of torchrun's --rdzv-conf that have a field; DLRover spells one of them differently."""


@dataclass(frozen=True, kw_only=True)
class System:
    """The system that a job was written for."""

    name: str
    variables: frozenset[str] = frozenset()
    """Variables that it sets in each node's environment, and Perdure does not."""
    tells_nodes: bool = False
    """The system passes the number of nodes to torchrun."""
    hidden: str = ""
    """The message for commands that cannot be parsed."""


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The number of nodes that the source starts."""

    least: int
    most: int
    fields: tuple[Field, ...] = ()
    """The fields of the source that set the number."""
    stated: bool = True
    """Whether the source starts the nodes, instead of its user on each machine."""
    first: int | None = None
    """The number of nodes that the source begins with, if it may grow beyond it."""


def put_world(
    draft: Draft,
    pod: Pod,
    *,
    system: System,
    replicas: Replicas,
    processes: int | str = 1,
    processes_field: Field | None = None,
    known: Mapping[str, str] | None = None,
) -> None:
    """Writes nodes, processes and the command.

    Args:
        draft: The specification.
        pod: The command and its resources.
        system: The system that would have run it.
        replicas: The number of nodes that the source starts.
        processes: Processes per node, unless the command sets them: a number, gpu or auto.
        processes_field: The field of the source that sets it.
        known: Variables that the system sets, and whose value is known.
    """
    command, fields = pod.command or [], pod.command_fields
    place = next((field for field in fields if field.present), None)
    if pod.command is None:
        miss_command(draft, place)
    try:
        launch = read_launch(command)
    except LauncherError as error:
        if place is not None:
            place.refuse(str(error))
        return
    _World(
        draft=draft,
        launch=launch,
        command=command,
        fields=fields,
        place=place,
        system=system,
        pod=pod,
        variables={**(known or {}), **pod.variables},
    ).write(replicas, processes, processes_field)


def miss_command(draft: Draft, arguments: Field | None) -> None:
    """Notes that the user has to write the role's command."""
    if arguments is not None:
        arguments.drop("without command they are arguments of the image's ENTRYPOINT, which cannot be read from here")
    draft.must_fill(
        (*draft.role, "command"),
        "the source names no command: the image's own ENTRYPOINT would run, which cannot be read from here",
        hint="write the program and its arguments as a list",
    )


def name_variables(
    place: Field, pod: Pod, command: Sequence[str], system: System, *, besides: AbstractSet[str] = frozenset()
) -> None:
    """Warns of variables that a command reads, and that its system sets and Perdure does not."""
    for name in sorted((_variables_of(command) & system.variables) - pod.variables.keys() - besides):
        place.warn_changed(f"{system.name} sets this variable, and Perdure does not", part=f"${name}", value="")


def _variables_of(command: Sequence[str]) -> set[str]:
    return {name for word in command for name in variables_in(word)}


@dataclass(kw_only=True)
class _World:
    draft: Draft
    launch: Launch | None
    command: list[str]
    fields: tuple[Field, ...]
    place: Field | None
    system: System
    pod: Pod
    variables: dict[str, str]

    def write(self, replicas: Replicas, processes: int | str, processes_field: Field | None) -> None:
        kept: list[Given] = []
        if self.launch is None:
            self._put_nodes(replicas, None, 1)
            self._put_processes_without_torchrun(processes, processes_field)
            for field in self.pod.options.values():
                field.drop("the command does not start torchrun, whose option it is")
        else:
            self.launch.add_variables(
                {name: self.variables[name] for name in self.pod.options if name in self.variables}
            )
            self._put_nodes(replicas, self.launch.last(Use.NODES), self._unit())
            kept = self._processes_of_options(processes, processes_field)
            self._put_restarts()
            self._put_timeouts()
            self._name_dropped()
            self.command = self.launch.command(keep=kept)
        self.draft.put((*self.draft.role, "command"), self.command or None, *self.fields)
        self._drop_places()
        if self.place is not None:
            name_variables(self.place, self.pod, self.command, self.system)

    # Nodes

    def _put_nodes(self, replicas: Replicas, given: Given | None, unit: int) -> None:
        least, most = replicas.least, replicas.most
        fields = replicas.fields
        if given is not None:
            given_range = self._range(given)
            if given_range is not None:
                least, most = self._agree(given, given_range, replicas)
                fields = (*fields, *(field for field in self.fields if field.present))
        elif self.launch and most > 1 and not (self.system.tells_nodes or self.launch.last(Use.AUTOMATIC)):
            self._note(f"without --nnodes each node trains alone; in Perdure all {most} train together", "--nnodes")
        if unit > 1 and (least % unit or most % unit):
            least, most = -(-least // unit) * unit, most // unit * unit
            self._note(f"worlds are multiples of {unit} nodes, so {least} to {most}", "--node-unit")
        if most < max(least, 1):
            self._refuse(f"{least} to {most} nodes", "at least one node, and no more nodes than there are replicas")
            return
        if replicas.first is not None and most > replicas.first and least < most:
            replicas.fields[-1].warn_changed(
                f"Perdure requests all {most} nodes at once, and continues with what it gets"
            )
        if unit > 1:
            nodes: object = {"min": least, "max": most, "unit": unit}
        else:
            nodes = most if least == most else f"{least}:{most}"
        self.draft.put((*self.draft.role, "nodes"), nodes, *dict.fromkeys(fields))

    def _range(self, given: Given) -> tuple[int, int] | None:
        filled = fill_variables(given.value, self.variables) or ""
        parts = filled.split(":")
        if len(parts) <= 2 and all(part.strip().isdecimal() for part in parts):
            return int(parts[0]), int(parts[-1])
        self._note("cannot be determined here; the number of replicas is used", given.written, given.value)
        return None

    def _agree(self, given: Given, given_range: tuple[int, int], replicas: Replicas) -> tuple[int, int]:
        least, most = given_range
        if not replicas.stated:
            return least, most
        if most > replicas.most:
            self._note(f"there are only {replicas.most} replicas", given.written, given.value)
            return min(least, replicas.most), replicas.most
        if (least, most) == (replicas.least, replicas.most):
            return least, most
        if replicas.least < replicas.most:
            elastic = f"{replicas.least}:{replicas.most}"
            lost = (
                f"no world had fewer than {least} nodes or more than {most}"
                if least < most
                else f"every world had {most} nodes"
            )
            self._note(
                f"counts instead of the replicas' range {elastic}: {lost}; for an elastic job set nodes to {elastic}",
                given.written,
                given.value,
            )
        elif most < replicas.most:
            self._note(f"of the {replicas.most} replicas only {most} would train", given.written, given.value)
        return least, most

    def _unit(self) -> int:
        given = self.launch.last(Use.UNIT) if self.launch else None
        if given is None:
            return 1
        filled = fill_variables(given.value, self.variables) or ""
        if filled.isdecimal() and int(filled) > 0:
            return int(filled)
        self._note("cannot be determined here; left out", given.written, given.value)
        return 1

    # Processes

    def _processes_of_options(self, processes: int | str, field: Field | None) -> list[Given]:
        """Writes the number of processes per node.

        Returns:
            The option, if the command has to keep it because the specification cannot express it.
        """
        launch = self.launch
        given = launch.last(Use.PROCESSES) if launch else None
        if given is None:
            automatic = launch.last(Use.AUTOMATIC) if launch else None
            self._put_processes("gpu" if automatic else processes, field)
            return []
        value = fill_variables(given.value, self.variables) or ""
        if value.isdecimal() or value in ("gpu", "auto"):
            counts = [*self.fields]
            if field is not None and str(field.value) == value:
                counts.append(field)
            elif field is not None:
                field.drop(f"the command's own {given.written} counts, which is {value}")
            self._put_processes(int(value) if value.isdecimal() else value, *counts)
            return []
        if field is not None:
            field.drop(f"the command's own {given.written} counts, which only its shell can tell")
        self._note("stays in the command: nproc_per_node cannot express it", given.written, given.value)
        return [given]

    def _put_processes_without_torchrun(self, processes: int | str, field: Field | None) -> None:
        if self._is_python():
            self.draft.put((*self.draft.role, "nproc_per_node"), 1)
            if field is not None:
                field.drop("the command does not start torchrun: it runs once per node, as it did")
            self._note("does not start torchrun: Perdure sets RANK, WORLD_SIZE and the like for it", "", "")
        elif self.command:
            if field is not None and field.present:
                self._put_processes(processes, field)
            hidden = f"; {self.system.hidden}" if self.system.hidden else ""
            self._note(f"if it starts torchrun somewhere inside, the options given there count{hidden}", "", "")

    def _put_processes(self, processes: int | str, *fields: Field | None) -> None:
        present = [field for field in fields if field is not None and field.present]
        if processes == "auto":
            for field in present:
                field.settle()
            place = present[0] if present else self.place
            if not self.pod.gpus and place is not None:
                place.warn_changed(_AUTO, value="auto", part="" if present else "--nproc-per-node")
            return
        self.draft.put((*self.draft.role, "nproc_per_node"), processes, *present)

    # The rest

    def _put_restarts(self) -> None:
        given = self.launch.last(Use.RESTARTS) if self.launch else None
        if given is None:
            return
        value = fill_variables(given.value, self.variables) or ""
        if not value.isdecimal():
            self._note("cannot be determined here; left out", given.written, given.value)
            return
        self.draft.put(("retry", "max_restarts"), int(value), *self.fields)
        self._note(BUDGET, given.written, given.value)

    def _put_timeouts(self) -> None:
        given = self.launch.last(Use.CONFIGURATION) if self.launch else None
        for pair in given.value.split(",") if given else []:
            name, _, value = pair.strip().partition("=")
            filled = fill_variables(value, self.variables) or ""
            if name in _TIMEOUTS and filled.isdecimal():
                self.draft.put(_TIMEOUTS[name], f"{filled}s", *self.fields)
            elif name and self.place is not None and given is not None:
                self.place.warn_part_dropped(
                    f"{given.written} {pair.strip()}", "Perdure's rendezvous has no such setting"
                )

    def _name_dropped(self) -> None:
        for given in self.launch.given if self.launch else []:
            if given.option.use in {Use.DROP, Use.RENDEZVOUS} and self.place is not None:
                self.place.warn_part_dropped(given.written, given.option.message, value=given.value)

    def _drop_places(self) -> None:
        """Drops the variables of the pod that tell a process its place: Perdure sets them itself."""
        for name, field in self.pod.places.items():
            if self.launch is None or not self.launch.in_shell:
                around = (
                    ""
                    if self.launch or self._is_python()
                    else "; if the command starts torchrun, only its ranks see it"
                )
                field.drop(f"Perdure sets this variable for each process{around}")
            elif name in self._read():
                field.drop(
                    f"Perdure sets it in the ranks only, and the shell around torchrun reads ${name}: it is empty there"
                )
            else:
                field.drop("Perdure sets this variable for each rank; the shell around torchrun does not read it")

    def _read(self) -> set[str]:
        return _variables_of(self.command)

    def _is_python(self) -> bool:
        return bool(self.command) and re.fullmatch(r"python[\d.]*", os.path.basename(self.command[0])) is not None

    def _note(self, message: str, part: str, value: str = "") -> None:
        if self.place is not None:
            self.place.warn_changed(message, part=part, value=value)

    def _refuse(self, value: str, expected: str) -> None:
        if self.place is not None:
            self.place.source.problem(self.place.location, value=value, expected=expected)
