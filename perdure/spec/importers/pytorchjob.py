"""Imports PyTorchJob of Kubeflow's training operator (version 1)."""

from __future__ import annotations

import shlex
from typing import Any

from .draft import Draft
from .launchers import Launch, LauncherError, Use, read_launch
from .metadata import read_metadata
from .pods import Pod, expand_words, read_pod, starts_torchrun, words_start_torchrun
from .policies import put_restarts, read_run_policy
from .reader import Field, as_list, as_mapping
from .world import Replicas, System, put_world

SYSTEM = System(
    name="Kubeflow",
    tells_nodes=True,
    variables=frozenset(
        {
            *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
            *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
            *("PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_RDZV_CONF", "PET_MAX_RESTARTS"),
        }
    ),
)
_OURS = "Perdure's rendezvous takes its place"


def read_pytorch_job(job: Field, draft: Draft) -> None:
    """Reads a PyTorchJob; master and workers become one role, since every node runs the same."""
    read_metadata(job, draft)
    spec = job["spec"]
    read_run_policy(spec["runPolicy"], draft)
    roles = spec["pytorchReplicaSpecs"]
    master, worker = roles["Master"], roles["Worker"]
    present = [role for role in (worker, master) if role.present]
    if not present:
        spec.source.problem(roles.location, message="missing", expected="Master, Worker or both")
        return
    elastic = spec["elasticPolicy"]
    count = sum(_replicas(role) for role in present)
    template = present[0]
    for role in present:
        _read_restart_policy(role["restartPolicy"], draft)
    pod = read_pod(template["template"], draft, containers=("pytorch",))
    per_node = [field for field in (spec["nprocPerNode"], elastic["nProcPerNode"]) if field.present]
    for other in present[1:]:
        _settle_same_command(other["template"], template["template"])
        if _choose_by_rank(other["template"], pod):
            draft.put((*draft.role, "nproc_per_node"), 1)
            for field in per_node:
                field.drop("neither command starts torchrun: it runs once per node, as it did")
            per_node = []
        _compare(other["template"], template["template"].value)
    processes = _processes(spec["nprocPerNode"], elastic["nProcPerNode"])
    put_world(
        draft,
        pod,
        system=SYSTEM,
        replicas=_range(elastic, count, tuple(role["replicas"] for role in present)),
        processes=processes,
        processes_field=next(iter(per_node), None),
        known={"PET_NNODES": str(count), "PET_NPROC_PER_NODE": str(processes), "WORLD_SIZE": str(count)},
    )
    _read_elastic_policy(elastic, draft)


def _replicas(role: Field) -> int:
    count = role["replicas"].integer(least=1)
    return 1 if count is None else count


def _range(elastic: Field, count: int, fields: tuple[Field, ...]) -> Replicas:
    least, most = elastic["minReplicas"], elastic["maxReplicas"]
    if not elastic.present:
        return Replicas(least=count, most=count, fields=fields)
    return Replicas(
        least=least.integer(least=1) or count,
        most=most.integer(least=1) or count,
        fields=(*fields, least, most),
        first=count,
    )


def _processes(per_node: Field, deprecated: Field) -> int | str:
    if deprecated.present and per_node.present:
        deprecated.ignore(SYSTEM.name, "nprocPerNode counts")
    field = per_node if per_node.present else deprecated
    if not field.present:
        return "auto"
    value = field.value
    if value in ("auto", "gpu"):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and value.isdecimal() and int(value):
        return int(value)
    field.wrong("auto, gpu or a number of processes", hint="Perdure does not count CPU cores")
    return "auto"


def _read_restart_policy(policy: Field, draft: Draft) -> None:
    match policy.value:
        case "Never":
            draft.put(("retry", "max_restarts"), 0, policy)
        case "ExitCode":
            policy.drop("Perdure judges failures by more than exit codes; retry.fatal_exit_codes stop a job at once")
        case "OnFailure" | "Always" | None:
            policy.settle()
        case _:
            policy.wrong("Always, OnFailure, Never or ExitCode")


def _read_elastic_policy(elastic: Field, draft: Draft) -> None:
    restarts = elastic["maxRestarts"]
    if draft.get(("retry", "max_restarts")) is None:
        put_restarts(draft, restarts)
    else:
        restarts.drop("another field, or the command, already sets retry.max_restarts")
    elastic["metrics"].drop("Perdure does not resize jobs by load; `perdure scale NAME MIN:MAX` does")
    for name in ("rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "standalone"):
        elastic[name].drop(_OURS)
    for pair in elastic["rdzvConf"].items():
        name, value = pair["key"].text(), pair["value"].text()
        if name in ("join_timeout", "last_call_timeout") and value and value.isdecimal():
            field = {"join_timeout": "join_timeout", "last_call_timeout": "last_call"}[name]
            draft.put(("timing", "rendezvous", field), f"{value}s", pair["key"], pair["value"])
        else:
            pair.drop("Perdure's rendezvous has no such setting")


def _settle_same_command(other: Field, template: Field) -> None:
    """Settles the other replicas' commands that differ from the workers' only in options that Perdure's rendezvous
    replaces, such as `--node_rank`; a warning names these."""
    for mine, theirs in zip(template["spec"]["containers"].items(), other["spec"]["containers"].items(), strict=False):
        own, launch = _launch_of(mine), _launch_of(theirs)
        if own is None or launch is None or own.essence() != launch.essence():
            continue
        command = theirs["command"] if theirs["command"].present else theirs["args"]
        for given in launch.given:
            if given.option.use in {Use.RENDEZVOUS, Use.DROP}:
                command.warn_part_dropped(given.written, given.option.message, value=given.value)
        theirs["command"].settle()
        theirs["args"].settle()


def _choose_by_rank(other: Field, pod: Pod) -> bool:
    """Has rank 0 run the master's command where it differs from the workers': both form one world, and so one role.

    Returns:
        Whether they differ; False, too, where one starts torchrun, whose ranks are counted over all nodes.
    """
    containers = other["spec"]["containers"].items()
    if len(containers) != 1 or pod.command is None or starts_torchrun(containers[0]):
        return False
    command, arguments = containers[0]["command"], containers[0]["args"]
    words = [*(expand_words(command, pod) or []), *(expand_words(arguments, pod) or [])]
    if not command.present or words == pod.command or words_start_torchrun(pod.command):
        return False
    command.warn_changed("rank 0 runs it, and all others the workers' command: they are one world, in one role")
    command.settle()
    arguments.settle()
    first, others = shlex.join(words), shlex.join(pod.command)
    pod.command = ["sh", "-c", f'if [ "$RANK" = 0 ]; then exec {first}; fi; exec {others}']
    return True


def _launch_of(container: Field) -> Launch | None:
    words = [*(container["command"].texts() or []), *(container["args"].texts() or [])]
    try:
        return read_launch(words)
    except LauncherError:
        return None


def _compare(field: Field, value: Any) -> None:
    """Accounts for the other replicas' template, which equals the workers' or is not used."""
    mapping, items = as_mapping(value), as_list(value)
    if field.settled:
        return
    if field.value == value:
        field.settle()
    elif mapping is not None and as_mapping(field.value) is not None:
        for name, item in field.entries().items():
            _compare(item, mapping.get(name))
    elif items is not None and len(as_list(field.value) or []) == len(items):
        for item, expected in zip(field.items(), items, strict=True):
            _compare(item, expected)
    else:
        _differs(field)


def _differs(field: Field) -> None:
    if {"command", "args", "image"} & set(map(str, field.location)):
        field.wrong("the same as the workers'", hint="every node of a Perdure job runs the same command and image")
    else:
        field.drop("the workers' template counts for every node")
