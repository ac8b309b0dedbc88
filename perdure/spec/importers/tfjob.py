"""Imports TFJob of Kubeflow's training operator (version 1): its replicas become roles."""

from __future__ import annotations

from .draft import Draft
from .metadata import read_metadata
from .policies import read_run_policy
from .reader import Field
from .services import TensorFlowRoles
from .world import System

SYSTEM = System(name="Kubeflow", variables=frozenset({"TF_CONFIG"}))

_REPLICAS = {"Chief": "chief", "Master": "master", "Worker": "worker", "PS": "ps", "Evaluator": "evaluator"}
_ALL_WORKERS = "AllWorkers"


def read_tf_job(job: Field, draft: Draft) -> None:
    """Reads a TFJob."""
    read_metadata(job, draft)
    spec = job["spec"]
    read_run_policy(spec["runPolicy"], draft)
    replicas = spec["tfReplicaSpecs"]
    if not any(replicas[kind].present for kind in _REPLICAS):
        spec.source.problem(replicas.location, message="missing", expected="Chief, Worker, PS or Evaluator")
        return
    roles = TensorFlowRoles(draft, system=SYSTEM, containers=("tensorflow",))
    for kind, name in _REPLICAS.items():
        if replicas[kind].present:
            roles.put(name, replicas[kind])
            _read_restart_policy(replicas[kind]["restartPolicy"])
    _put_ends(spec["successPolicy"], replicas, draft)
    spec["enableDynamicWorker"].drop("workers are added and removed by `perdure scale NAME --role worker N`")


def _put_ends(policy: Field, replicas: Field, draft: Draft) -> None:
    """Writes the roles that end the job: the chief, or else the workers."""
    if policy.value not in (None, "", _ALL_WORKERS):
        policy.wrong(f"nothing, or {_ALL_WORKERS}")
        return
    chief = next(
        (name for kind, name in _REPLICAS.items() if kind in ("Chief", "Master") and replicas[kind].present), ""
    )
    if policy.value == _ALL_WORKERS:
        draft.put(("roles", "worker", "ends_job"), True if replicas["Worker"].present else None, policy)
    elif chief:
        draft.put(("roles", chief, "ends_job"), True)
    if not policy.settled:
        policy.settle()


def _read_restart_policy(policy: Field) -> None:
    if policy.value in (None, "OnFailure", "Always"):
        policy.settle()
    elif policy.value in ("Never", "ExitCode"):
        policy.drop("retry.max_restarts and retry.fatal_exit_codes limit the restarts of the whole job")
    else:
        policy.wrong("Always, OnFailure, Never or ExitCode")
