"""The relations between the roles of a job: their order, those that end it, and those that start again together.

They are stated on each role, and mean something only beside the others, so they are checked and read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from .roles import OnFailure, Role

_TRAINING_ROLES = ("trainer", "worker", "chief")


class WrongRelation(ValueError):
    """A relation between roles that cannot be; `location` is below `roles`."""

    def __init__(self, location: tuple[str, ...], text: str) -> None:
        super().__init__(text)
        self.location = location


def check_relations(roles: Mapping[str, Role]) -> None:
    """Checks what roles state of each other.

    Raises:
        WrongRelation: if a role names one that does not exist, or if their relations contradict each other.
    """
    for name, role in roles.items():
        _check_name(name, roles)
        referring = {
            "depends_on": role.depends_on,
            "restart_with": role.restart_with,
            "restart_on_scale": role.restart_on_scale,
            "collocate": role.collocate,
        }
        for field, others in referring.items():
            for other in others:
                _check_reference(name, field, other, roles)
        _check_collocation(name, roles)
        for other in role.depends_on:
            if roles[other].on_failure is OnFailure.IGNORE:
                raise WrongRelation(
                    (name, "depends_on", other),
                    f"{other} has on_failure: ignore, so it may never be {role.depends_on[other]}; set its on_failure "
                    "to role or job",
                )
    try:
        order_of(roles)
    except CycleError as error:
        cycle: list[str] = error.args[1]
        raise WrongRelation(
            (cycle[-1], "depends_on"),
            f"the roles wait for each other: {' -> '.join(reversed(cycle))}; remove one of these from depends_on",
        ) from None
    ending = roles_that_end(roles)
    if not ending:
        raise WrongRelation((), "every role has ends_job: false, so nothing ends the job; remove it from one role")
    for name in ending:
        if roles[name].on_failure is OnFailure.IGNORE:
            raise WrongRelation(
                (name, "on_failure"),
                "is ignore, and the job succeeds when this role has; set it to role, or ends_job to false",
            )


def order_of(roles: Mapping[str, Role]) -> tuple[str, ...]:
    """Returns the names of the roles, each after those that it waits for.

    Raises:
        CycleError: if they wait for each other.
    """
    if not any(role.depends_on for role in roles.values()):
        # Each decision asks, and hardly any job has such roles.
        return tuple(roles)
    return tuple(TopologicalSorter({name: tuple(role.depends_on) for name, role in roles.items()}).static_order())


def roles_that_end(roles: Mapping[str, Role]) -> tuple[str, ...]:
    """Returns the names of the roles with whose completion the job succeeds."""
    if stated := tuple(name for name, role in roles.items() if role.ends_job):
        return stated
    unstated = tuple(name for name, role in roles.items() if role.ends_job is None)
    training = tuple(name for name in unstated if name in _TRAINING_ROLES)
    return training or tuple(name for name in unstated if roles[name].ready is None) or unstated


def roles_restarted_with(name: str, roles: Mapping[str, Role], *, scaled: bool = False) -> tuple[str, ...]:
    """Returns the names of the other roles that start again when one does, in the order of the specification.

    Args:
        name: The role that starts again.
        roles: All roles of the job.
        scaled: Whether it does so because it has another number of nodes.
    """
    new = [name, *(roles[name].restart_on_scale if scaled else ())]
    found = set(new)
    while new:
        role = roles[new.pop()]
        others = set(roles if role.on_failure is OnFailure.JOB else role.restart_with) - found
        found |= others
        new += others
    return tuple(other for other in roles if other in found and other != name)


def roles_collocated_with(name: str, roles: Mapping[str, Role]) -> tuple[str, ...]:
    """Returns the names of the other roles whose nodes share machines with this one's, in the order of the
    specification."""
    found, new = {name}, {name}
    while new:
        new = {
            other
            for other, role in roles.items()
            if any(one in role.collocate or other in roles[one].collocate for one in new)
        } - found
        found |= new
    return tuple(other for other in roles if other in found and other != name)


def _check_collocation(name: str, roles: Mapping[str, Role]) -> None:
    for other in roles[name].collocate:
        if roles[other].nodes != roles[name].nodes:
            raise WrongRelation(
                (name, "collocate"),
                f"node N of {name} shares the machine of node N of {other}, and they have {roles[name].nodes} and "
                f"{roles[other].nodes} nodes; set the same number",
            )


def _check_name(name: str, roles: Mapping[str, Role]) -> None:
    parts = name.split("-")
    for end, part in enumerate(parts):
        if part.isdecimal() and (other := "-".join(parts[:end])) in roles:
            raise WrongRelation(
                (name,),
                f"begins like the names of the nodes of the role {other}, such as {other}-0; rename one of them",
            )


def _check_reference(name: str, field: str, other: str, roles: Mapping[str, Role]) -> None:
    if other == name:
        raise WrongRelation((name, field), "names the role itself; remove it")
    if other not in roles:
        known = ", ".join(known for known in roles if known != name) or "no other role"
        raise WrongRelation((name, field), f'names "{other}", which is no role of this job; it has {known}')
