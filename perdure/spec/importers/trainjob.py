"""Imports TrainJob of Kubeflow's Trainer (version 2), with the runtime that it refers to."""

from __future__ import annotations

from collections.abc import Sequence

from .draft import Draft
from .jobset import read_job_set_spec
from .metadata import drop_metadata, read_metadata
from .pods import Overrides, Pod
from .policies import drop_suspend, put_restarts, put_seconds
from .reader import Field
from .world import Replicas, System, put_world

SYSTEM = System(
    name="Kubeflow",
    tells_nodes=True,
    variables=frozenset(
        {
            *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
            *("JOB_COMPLETION_INDEX", "JOB_INDEX"),
        }
    ),
)

RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_NODE = "node"
"""The Trainer's name for the part that trains, and for its container."""

_APPLIED = "nothing patches the runtime here; write it into the runtime, or into the specification"


def read_train_job(job: Field, draft: Draft, runtimes: Sequence[Field]) -> None:
    """Reads a TrainJob.

    Args:
        job: The TrainJob.
        draft: The specification.
        runtimes: The runtimes that are available; the one that the job refers to must be among them.
    """
    read_metadata(job, draft)
    spec = job["spec"]
    runtime = _find(spec["runtimeRef"], runtimes)
    trainer = spec["trainer"]
    spec["initializer"].drop("Perdure fetches neither data nor models; let the command do it, or have them in a volume")
    for name in ("runtimePatches", "podTemplateOverrides", "podSpecOverrides", "labels", "annotations"):
        spec[name].drop(_APPLIED)
    drop_suspend(spec["suspend"])
    put_seconds(draft, ("limits", "active_deadline"), spec["activeDeadlineSeconds"], least=1)
    spec["managedBy"].drop("Perdure's own workflows manage the job")
    if runtime is None:
        return
    _read_runtime(runtime, trainer, draft)


def _find(reference: Field, runtimes: Sequence[Field]) -> Field | None:
    kind, name = reference["kind"].text() or RUNTIMES[0], reference["name"].text()
    group = reference["apiGroup"]
    group.settle()
    reference["kind"].settle()
    if name is None:
        reference.source.problem(reference["name"].location, message="missing", expected="the name of a runtime")
        return None
    for runtime in runtimes:
        if runtime["kind"].value == kind and runtime["metadata"]["name"].value == name:
            reference["name"].settle()
            return runtime
    reference["name"].wrong(
        "a runtime in the same file, or in one given by --with",
        hint=f"kubectl get {kind.lower()} {name} -o yaml > runtime.yaml",
    )
    return None


def _read_runtime(runtime: Field, trainer: Field, draft: Draft) -> None:
    for name in ("apiVersion", "kind"):
        runtime[name].settle()
    drop_metadata(runtime["metadata"])
    spec = runtime["spec"]
    policy = spec["mlPolicy"]
    for name in ("mpi", "flux", "jax", "xgboost"):
        if policy[name].present:
            policy[name].wrong("torch", hint="Perdure runs PyTorch jobs")
    spec["podGroupPolicy"].drop(
        "Perdure's backend for Kubernetes requests its nodes as one group; name a queue in queue"
    )
    template = spec["template"]
    drop_metadata(template["metadata"])
    elastic = policy["torch"]["elasticPolicy"]
    put_restarts(draft, elastic["maxRestarts"])
    elastic["metrics"].drop("Perdure does not resize jobs by load; `perdure scale NAME MIN:MAX` does")
    part = read_job_set_spec(
        template["spec"],
        draft,
        named=_part_name(template["spec"]),
        overrides=Overrides(
            image=trainer["image"],
            command=trainer["command"],
            args=trainer["args"],
            env=trainer["env"],
            resources=trainer["resourcesPerNode"],
        ),
    )
    if part is None:
        return
    processes, field = _processes(trainer, policy["torch"]["numProcPerNode"], part.pod)
    replicas = _nodes(trainer["numNodes"], policy["numNodes"], elastic, part.replicas)
    nodes = str(replicas.most) if replicas.least == replicas.most else f"{replicas.least}:{replicas.most}"
    put_world(
        draft,
        part.pod,
        system=SYSTEM,
        replicas=replicas,
        processes=processes,
        processes_field=field,
        known={"PET_NNODES": nodes, "PET_NPROC_PER_NODE": str(processes)},
    )


def _part_name(spec: Field) -> str:
    """The name of the part that the Trainer trains in; its label marks it."""
    for part in spec["replicatedJobs"].items():
        step = part["template"]["metadata"]["labels"][_STEP]
        if step.value == "trainer" and (name := part["name"].text()):
            step.settle()
            return name
    return _NODE


def _nodes(of_job: Field, of_runtime: Field, elastic: Field, of_template: Replicas) -> Replicas:
    """Determines the nodes in the Trainer's own order: an elastic policy, the job, the runtime's policy, the
    template."""
    bounds = (elastic["minNodes"], elastic["maxNodes"])
    least, most = (field.integer(least=1) for field in bounds)
    if least or most:
        for field in (of_job, of_runtime):
            field.drop("elasticPolicy sets the number of nodes")
        replicas = Replicas(least=least or most or 1, most=most or least or 1, fields=bounds)
    elif (count := of_job.integer(least=1)) is not None:
        of_runtime.settle()
        replicas = Replicas(least=count, most=count, fields=(of_job,))
    elif (count := of_runtime.integer(least=1)) is not None:
        replicas = Replicas(least=count, most=count, fields=(of_runtime,))
    else:
        return of_template
    for field in of_template.fields:
        field.settle()
    return replicas


def _processes(trainer: Field, of_runtime: Field, pod: Pod) -> tuple[int | str, Field | None]:
    """The value that the Trainer passes to torchrun: for a job with resources of its own but no GPU, it counts CPUs."""
    of_job = trainer["numProcPerNode"]
    field = of_job if of_job.present else of_runtime
    of_runtime.settle()
    value = field.value
    counted = pod.cpus if trainer["resourcesPerNode"].present else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value, field
    if value in (None, "auto") and pod.gpus:
        return "gpu", field
    if value in (None, "auto", "cpu") and counted:
        return counted, field
    if value in (None, "auto"):
        return "auto", field
    if value == "gpu":
        return "gpu", field
    field.wrong("auto, gpu or a number of processes", hint="Perdure does not count CPU cores")
    return "auto", None
