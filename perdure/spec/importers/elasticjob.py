"""Imports DLRover's ElasticJob."""

from __future__ import annotations

from .draft import Draft
from .metadata import read_metadata
from .pods import read_pod
from .policies import STARTS
from .reader import Field
from .services import TensorFlowRoles
from .world import Replicas, System, put_world

SYSTEM = System(
    name="DLRover",
    hidden="a dlrover-run there needs DLRover's master: write torchrun instead",
    variables=frozenset(
        {
            *("POD_IP", "NODE_IP", "POD_NAME", "ELASTIC_JOB_NAME", "JOB_UID"),
            *("NODE_TYPE", "NODE_ID", "NODE_NUM", "NODE_RANK", "WORLD_SIZE", "RANK"),
            *("WORKER_TYPE", "WORKER_ID", "WORKER_NUM", "WORKER_RANK"),
            *("DLROVER_MASTER_ADDR", "MONITOR_ENABLED", "TF_CONFIG", "MASTER_ADDR", "MASTER_PORT"),
        }
    ),
)

_JOIN = "timing.rendezvous.join_timeout limits how long a new job waits for its nodes"
_NO_MASTER = "Perdure has no master process"
_NO_CHECK = "Perdure does not test machines before it trains on them"
_ANNOTATIONS = {
    "pending_timeout": _JOIN,
    "pending_fail_strategy": _JOIN,
    "service_type": _NO_MASTER,
    "pre_check_ops": _NO_CHECK,
    "pre_check_bypass": _NO_CHECK,
    "training_elastic_mode": "the world follows roles.worker.nodes",
    "enable_dashboard": "Temporal's UI shows every job",
    "dashboard_port": "Temporal's UI shows every job",
}
"""Settings that DLRover passes to its master."""

_UNWIRED = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy")
_SERVER_STRATEGY = "ParameterServerStrategy"
_OTHER_ROLES = ("chief", "ps", "evaluator")
_NO_LOAD = "Perdure does not resize jobs by load; `perdure scale NAME --role ps N` does"


def read_elastic_job(job: Field, draft: Draft) -> None:
    """Reads an ElasticJob."""
    read_metadata(job, draft, annotations=_ANNOTATIONS)
    spec = job["spec"]
    strategy = spec["distributionStrategy"]
    served = strategy.value == _SERVER_STRATEGY
    if served or strategy.value in (None, "AllreduceStrategy", "Local"):
        strategy.settle()
    else:
        strategy.wrong(f"AllreduceStrategy, Local or {_SERVER_STRATEGY}")
    _drop_of_job(spec, served=served)
    roles = spec["replicaSpecs"]
    roles["dlrover-master"].drop(_NO_MASTER)
    worker = roles["worker"]
    if not worker.present:
        spec.source.problem(worker.location, message="missing", expected="the replicas that train")
        return
    if served:
        _read_served(roles, draft)
        return
    for name in _OTHER_ROLES:
        if roles[name].present:
            roles[name].wrong("a worker only", hint=f"other roles belong to {_SERVER_STRATEGY}")
    _read_worker(worker, draft)


def _read_served(replicas: Field, draft: Draft) -> None:
    """Reads the roles of a job with parameter servers."""
    roles = TensorFlowRoles(draft, system=SYSTEM, containers=("main",))
    for name in (*_OTHER_ROLES, "worker"):
        if (role := replicas[name]).present:
            _drop_of_replicas(role)
            if role["autoScale"].boolean():
                role["autoScale"].drop(_NO_LOAD)
            else:
                role["autoScale"].settle()
            role["priority"].drop("all nodes of a job have one priority_class")
            roles.put(name, role)


def _drop_of_job(spec: Field, *, served: bool) -> None:
    for name in ("optimizeMode", "brainService", "resourceLimits"):
        if served:
            spec[name].drop(_NO_LOAD)
        else:
            spec[name].ignore(SYSTEM.name, "it resizes only jobs with parameter servers")
    spec["envs"].ignore(SYSTEM.name, "write into env what the processes need")
    if spec["suspend"].boolean():
        spec["suspend"].drop(STARTS)
    else:
        spec["suspend"].settle()
    for name in _UNWIRED:
        spec[name].ignore(SYSTEM.name)
    spec["runPolicy"].ignore(SYSTEM.name)


def _read_worker(worker: Field, draft: Draft) -> None:
    replicas = worker["replicas"]
    count = replicas.integer(least=1) or 1
    _drop_of_replicas(worker)
    worker["autoScale"].ignore(SYSTEM.name, "it resizes only jobs with parameter servers")
    priority = worker["priority"]
    if priority.value in ("high", "low"):
        draft.put(("priority_class",), priority.value, priority)
    else:
        priority.drop("all nodes of a job have one priority_class")
    pod = read_pod(worker["template"], draft, containers=("main",))
    put_world(
        draft,
        pod,
        system=SYSTEM,
        replicas=Replicas(least=count, most=count, fields=(replicas,)),
        known={"WORKER_NUM": str(count), "NODE_NUM": str(count)},
    )


def _drop_of_replicas(replicas: Field) -> None:
    replicas["restartCount"].drop(
        "it counts each node's own failures; retry.max_restarts counts those of the whole job within an hour"
    )
    replicas["restartPolicy"].drop("Perdure restarts ranks in place, and replaces lost nodes")
    replicas["restartTimeout"].drop("Perdure detects by a node's lease that it is gone")
    replicas["BatchScheduler"].ignore(SYSTEM.name, "name a queue in the field queue")
    replicas["criticalNodes"].drop("no node is special: a job continues while it has roles.worker.nodes.min of them")
