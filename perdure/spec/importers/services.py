"""Writes roles that form no torch world: TensorFlow's chief, workers, parameter servers and evaluator.

Each process serves the others at a port of its own, and Perdure sets TF_CONFIG for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .draft import Draft
from .pods import Pod, read_pod
from .reader import Field
from .world import System, miss_command, name_variables

_FIRST_PORT = 2222
"""TensorFlow's usual port; on one machine, nodes have it and those that follow."""
_APART = 100
"""Ports from one role to the next, so that each can have more nodes."""

_EVALUATOR = "evaluator"
_COORDINATORS = ("chief", "master")
_RESTARTS = {"worker": "restart_on_scale", "ps": "restart_with"}
"""What a coordinator must start again with: it learns the addresses at its start, and loses what a server holds."""


class TensorFlowRoles:
    """The roles of one job, which get their ports in turn."""

    def __init__(self, draft: Draft, *, system: System, containers: Sequence[str]) -> None:
        self._draft = draft
        self._system = system
        self._containers = containers
        self._port = _FIRST_PORT

    def put(self, name: str, role: Field) -> None:
        """Reads the replicas of one role, with their template, and writes it."""
        draft, replicas = self._draft, role["replicas"]
        count = replicas.integer(least=1) or 1
        draft.begin_role(name)
        draft.put((*draft.role, "nodes"), count, replicas)
        pod = read_pod(role["template"], draft, containers=self._containers)
        self._put_command(pod)
        if name == _EVALUATOR:
            draft.put((*draft.role, "nproc_per_node"), 1)
            draft.put((*draft.role, "on_failure"), "ignore")
        else:
            draft.put((*draft.role, "ready"), {"port": self._port})
            self._port += max(count, _APART)
        coordinators = [other for other in _COORDINATORS if draft.get(("roles", other)) is not None]
        if name in _RESTARTS and coordinators:
            draft.put((*draft.role, _RESTARTS[name]), coordinators)

    def _put_command(self, pod: Pod) -> None:
        draft = self._draft
        place = next((field for field in pod.command_fields if field.present), None)
        if pod.command is None:
            miss_command(draft, place)
        draft.put((*draft.role, "command"), pod.command or None, *pod.command_fields)
        for field in pod.places.values():
            field.drop("Perdure sets this variable for each process")
        for field in pod.options.values():
            field.drop("the command does not start torchrun, whose option it is")
        if place is not None:
            own = self._system.name.lower()
            if any(own in word for word in pod.command or []):
                place.warn_changed(f"programs of {self._system.name}'s need its master, which is absent here", part=own)
            name_variables(place, pod, pod.command or [], self._system, besides={"TF_CONFIG"})
