"""Imports MPIJob of Kubeflow's MPI operator: a launcher that starts when the workers' SSH servers answer.

Perdure makes no SSH keys. It lists the workers in a file for `mpirun`, named by the variables that the operator sets.
"""

from __future__ import annotations

import re

from .draft import Draft
from .metadata import read_metadata
from .pods import Pod, read_pod
from .policies import read_run_policy
from .reader import Field
from .world import miss_command

_SSH_PORT = 22
_SERVER = ["/usr/sbin/sshd", "-De"]
"""What the operator starts in workers that name no command."""
_HOSTS = "/tmp/hostfile"
_HOST_FILES = ("OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE")
"""Variables by which Open MPI, MPICH and Intel MPI find the file."""
_LIST_HOSTS = (
    "import json, os; "
    "print(*(address.rpartition(':')[0] + '{slots}' "
    "for address in json.loads(os.environ['PERDURE_ROLES'])['worker']['addresses']), sep='\\n')"
)
_MOUNTED = re.compile(r"/etc/mpi/(?P<file>[\w.-]+)")
"""Files that the operator mounts in all pods."""
_KEYS = (
    "the operator mounts a key for SSH in all pods, and Perdure makes none: have one in the image, or mount a Secret "
    "by pod_template"
)
_IMPLEMENTATIONS = ("OpenMPI", "Intel", "MPICH")


def read_mpi_job(job: Field, draft: Draft) -> None:
    """Reads an MPIJob."""
    read_metadata(job, draft)
    spec = job["spec"]
    read_run_policy(spec["runPolicy"], draft)
    replicas = spec["mpiReplicaSpecs"]
    launcher, worker = replicas["Launcher"], replicas["Worker"]
    for one in (launcher, worker):
        if not one.present:
            spec.source.problem(one.location, message="missing", expected="Launcher and Worker")
            return
    implementation = spec["mpiImplementation"]
    if implementation.value not in (None, *_IMPLEMENTATIONS):
        implementation.wrong(", ".join(_IMPLEMENTATIONS))
    implementation.settle()
    slots = spec["slotsPerWorker"].integer(least=1) or 1
    spec["slotsPerWorker"].settle()
    separator = " slots=" if implementation.value in (None, "OpenMPI") else ":"
    _read_launcher(launcher, draft, slots=f"{separator}{slots}")
    _read_worker(worker, draft)
    spec["sshAuthMountPath"].drop(_KEYS)
    spec["launcherCreationPolicy"].drop("the launcher starts when the workers' servers answer")
    spec["runLauncherAsWorker"].drop("the launcher's node is not in the list of hosts")


def _read_launcher(launcher: Field, draft: Draft, *, slots: str) -> None:
    pod, place = _read_role(launcher, draft, "launcher")
    _use_own_hosts(pod, draft)
    if place is not None:
        place.warn_changed(f"is started by a shell that first writes the workers to {_HOSTS}; {_KEYS}", value="")
    if pod.command:
        listing = f'python3 -c "{_LIST_HOSTS.format(slots=slots)}" > {_HOSTS}'
        shell = ["sh", "-c", f'{listing} && exec "$@"', "mpi", *pod.command]
        draft.put((*draft.role, "command"), shell, *pod.command_fields)
    for name in _HOST_FILES:
        if name not in pod.variables:
            draft.put((*draft.env, name), _HOSTS)
    draft.put((*draft.role, "nproc_per_node"), 1)
    draft.put((*draft.role, "depends_on"), {"worker": "ready"})
    draft.put((*draft.role, "ends_job"), True)


def _use_own_hosts(pod: Pod, draft: Draft) -> None:
    """Replaces the operator's list of hosts in the launcher's command and variables by the one that its shell writes.

    A launcher such as DeepSpeed's trains on its own node alone if the file is not there, without an error.
    """
    pod.command = [_with_own_hosts(word) for word in pod.command] if pod.command else pod.command
    for name, text in pod.variables.items():
        if draft.get((*draft.env, name)) == text:
            draft.put((*draft.env, name), _with_own_hosts(text))
    fields = (*pod.command_fields, *(field for _, field in draft.fields_below(draft.env)))
    for field in fields:
        if "hostfile" in (found := _mounted_in(field)):
            field.warn_changed(f"is {_HOSTS} here", part="/etc/mpi/hostfile", value="")
        _name_mounted(field, found - {"hostfile"})


def _with_own_hosts(text: str) -> str:
    return _MOUNTED.sub(lambda found: _HOSTS if found["file"] == "hostfile" else found[0], text)


def _mounted_in(field: Field) -> set[str]:
    return {found["file"] for found in _MOUNTED.finditer(str(field.value))}


def _name_mounted(field: Field, files: set[str]) -> None:
    for file in sorted(files):
        field.warn_changed("the operator mounts this file, and Perdure does not", part=f"/etc/mpi/{file}", value="")


def _read_worker(worker: Field, draft: Draft) -> None:
    pod, _ = _read_role(worker, draft, "worker")
    for field in (*pod.command_fields, *(field for _, field in draft.fields_below(draft.env))):
        _name_mounted(field, _mounted_in(field))
    draft.put((*draft.role, "command"), pod.command or _SERVER, *pod.command_fields)
    draft.put((*draft.role, "ready"), {"port": _SSH_PORT})
    draft.put((*draft.role, "restart_with"), ["launcher"])
    draft.put((*draft.role, "restart_on_scale"), ["launcher"])


def _read_role(replicas: Field, draft: Draft, name: str) -> tuple[Pod, Field | None]:
    """Reads what launcher and workers have in common.

    Returns:
        The pod, and the field of its command.
    """
    draft.begin_role(name)
    count = replicas["replicas"]
    draft.put((*draft.role, "nodes"), count.integer(least=1) or 1, count)
    replicas["restartPolicy"].drop("a process that fails is started again; retry.max_restarts limits how often")
    pod = read_pod(replicas["template"], draft, containers=(f"mpi-{name}", name, "mpi"))
    place = next((field for field in pod.command_fields if field.present), None)
    if pod.command is None and (name == "launcher" or place is not None):
        miss_command(draft, place)
    for field in (*pod.places.values(), *pod.options.values()):
        field.drop("Perdure sets this variable for each process")
    return pod, place
