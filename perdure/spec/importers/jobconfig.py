"""Imports the JobConfig of DLRover's unified API, which its job builders write: jobs of several roles on Ray.

A workload becomes a role, and each of its groups of instances a node.
"""

from __future__ import annotations

import math
import re
import shlex

from ..base import OWN_VARIABLES
from ..fields import Location
from .draft import Draft
from .metadata import put_name, to_name
from .policies import put_restarts
from .reader import Field

_LONGEST_ROLE = 20

_NO_MASTER = "Perdure has no master process"
_BUDGETS = "retry.max_restarts counts the restarts of the whole job within retry.window"
_CONFIGURATION = "Perdure hands no configuration to programs: write it into the command, or into a file that it reads"
_TOGETHER = "each role has nodes of its own"
_MACHINES = "machines are found by the nodes and resources of each role"
_PROCESS_GROUP = "the program's own call of torch.distributed.init_process_group has it"

_OF_JOB = {
    **dict.fromkeys(("master_cpu", "master_mem", "master_memory", "master_max_restart"), _NO_MASTER),
    **dict.fromkeys(("master_create_timeout", "timeout", "master_isolation_schedule_resource"), _NO_MASTER),
    **dict.fromkeys(("master_state_backend_type", "master_state_backend_config"), _NO_MASTER),
    "node_max_restart": _BUDGETS,
    "failover_trigger_strategy": "Perdure repairs failures at once",
}
_OF_TRAINING = {
    "user_config": _CONFIGURATION,
    "node_number": _MACHINES,
    "device_per_node": _MACHINES,
    "collocations": _TOGETHER,
}
_OF_WORKLOAD = {
    "per_node_max_failure": _BUDGETS,
    "max_restart": _BUDGETS,
    "group": _TOGETHER,
    "config": _CONFIGURATION,
    "rank_based_gpu_selection": "each rank sees all devices of its node, and chooses by LOCAL_RANK",
    "node_group_failover": "nodes are replaced singly",
    "comm_pre_check": "the field preflight has machines checked before they train",
    "comm_auto_setup_process_group": "the program calls torch.distributed.init_process_group itself",
    "comm_backend": _PROCESS_GROUP,
    "comm_timeout_s": _PROCESS_GROUP,
}
"""Fields without a counterpart, with the message for values other than false, 0 and nothing."""

_FUNCTION = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\.|::)(?P<name>[A-Za-z_]\w*)")


def read_job_config(job: Field, draft: Draft) -> None:
    """Reads a JobConfig."""
    put_name(draft, job["job_name"])
    put_restarts(draft, job["job_max_restart"])
    _drop(job, _OF_JOB)
    training = job["dl_config"]
    _drop(training, _OF_TRAINING)
    _put_variables(training["global_envs"], ("env",), draft)
    stream = training["stream_type"]
    if stream.value == "TASK_STREAM":
        stream.settle()
    else:
        stream.drop("roles exchange data by their own code; depends_on states their order")
    devices = training["accelerator_type"]
    if devices.value in ("GPU", "CPU"):
        devices.settle()
    else:
        devices.drop("resources.gpu counts the GPUs of a node")
    workloads = training["workloads"]
    found = workloads.entries()
    if not found:
        workloads.source.problem(workloads.location, message="missing", expected="the workloads, by name")
    reach = job["failover_exec_strategy"]
    for name, workload in found.items():
        place: Location = ("roles", to_name(name)[:_LONGEST_ROLE].strip("-"))
        if not place[1] or draft.get(place) is not None:
            workload.refuse("expected a name that is one among the roles, as lowercase letters, digits and hyphens")
            continue
        if place[1] != name:
            workload.warn_changed(f"is the role {place[1]}: names of roles are lowercase", value="")
        _read_workload(workload, place, draft, alone=len(found) == 1, gpus=devices.value != "CPU")
        if reach.value == 1 and len(found) > 1:
            draft.put((*place, "on_failure"), "job", reach)
    if not reach.settled:
        reach.drop("a failure is repaired in its role: see roles.<name>.on_failure")


def _read_workload(workload: Field, place: Location, draft: Draft, *, alone: bool, gpus: bool) -> None:
    backend = workload["backend"]
    if backend.value in (None, "elastic", "simple"):
        backend.settle()
    else:
        backend.wrong("elastic or simple", hint="start the class by a command of your own")
    total, per_group = _first(workload, "total", "num", "number"), workload["per_group"]
    count, each = total.integer(least=1) or 1, per_group.integer(least=1) or 1
    if count % each:
        total.wrong(f"a multiple of per_group, which is {each}")
    draft.put((*place, "nodes"), max(count // each, 1), total)
    draft.put((*place, "nproc_per_node"), each, per_group)
    entry = _first(workload, "entry_point", "entrypoint")
    draft.put((*place, "command"), _command(entry, elastic=backend.value == "elastic"), entry)
    driver = workload["is_driver"]
    ends = driver.boolean() is not False
    if alone:
        driver.settle()
    else:
        draft.put((*place, "ends_job"), ends, driver)
    _put_variables(_first(workload, "envs", "env", "environment"), (*place, "env"), draft)
    _read_resources(_first(workload, "resource", "res"), each, (*place, "resources"), draft, gpus=gpus)
    _drop(workload, _OF_WORKLOAD)


def _command(entry: Field, *, elastic: bool) -> list[str] | None:
    text = (entry.text() or "").strip()
    if not text:
        entry.source.problem(entry.location, message="missing", expected="a script with its arguments, or a function")
        return None
    function = None if text.endswith(".py") else _FUNCTION.fullmatch(text)
    if function is not None:
        entry.warn_changed("the function is called without DLRover's runtime, whose calls and configuration are absent")
        call = ["python", "-c", f"from {function['module']} import {function['name']}; {function['name']}()"]
        return ["torchrun", "--no-python", *call] if elastic else call
    try:
        words = shlex.split(text)
    except ValueError as error:
        entry.wrong("a script with its arguments, or a function", message=str(error))
        return None
    return ["torchrun" if elastic else "python", *words]


def _read_resources(resource: Field, each: int, place: Location, draft: Draft, *, gpus: bool) -> None:
    """Writes the resources of a node, which has `each` instances of the workload."""
    cpu, memory = resource["cpu"], _first(resource, "memory", "mem")
    if cores := _number(cpu):
        draft.put((*place, "cpu"), f"{cores * each:.15g}", cpu)
    if megabytes := _number(memory):
        draft.put((*place, "memory"), f"{math.ceil(megabytes * each)}Mi", memory)
    accelerator = _first(resource, "accelerator", "acc", "gpu")
    devices = (_number(accelerator) or 0) * each
    if devices and gpus:
        draft.put((*place, "gpu"), math.ceil(devices), accelerator)
        if devices != math.ceil(devices):
            accelerator.warn_changed(f"a node has whole devices, here {math.ceil(devices)}: roles share none")
    elif devices:
        accelerator.drop("accelerator_type is CPU")
    custom = dict.fromkeys(("user_defined", "ud_resource"), "Perdure requests no custom resources of Ray")
    _drop(resource, {"disk": "volumes state the storage of nodes", **custom})


def _number(field: Field) -> float | None:
    if field.value is None:
        return None
    if not isinstance(field.value, int | float) or isinstance(field.value, bool) or not 0 <= field.value <= 10**9:
        field.wrong("a number that is not negative")
        return None
    if not field.value:
        field.settle()
    return field.value


def _put_variables(variables: Field, place: Location, draft: Draft) -> None:
    for name, field in variables.entries().items():
        if name in OWN_VARIABLES or name.startswith(("PET_", "PERDURE_")):
            field.drop("Perdure sets this variable for each process")
        else:
            draft.put((*place, name), field.text(), field)


def _first(mapping: Field, *names: str) -> Field:
    """The first of several names of a field that has a value; the others are dropped."""
    fields = [mapping[name] for name in names]
    chosen = next((field for field in fields if field.present), fields[0])
    for field in fields:
        if field is not chosen:
            field.drop(f"{chosen.path} counts instead")
    return chosen


def _drop(mapping: Field, messages: dict[str, str]) -> None:
    for name, message in messages.items():
        if mapping[name].value:
            mapping[name].drop(message)
        else:
            mapping[name].settle()
