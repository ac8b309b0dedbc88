"""Imports JobSet, and Kubernetes' own Job with an index per pod."""

from __future__ import annotations

from dataclasses import dataclass

from .draft import Draft
from .metadata import drop_metadata, read_metadata
from .pods import Overrides, Pod, read_pod, starts_torchrun
from .policies import drop_suspend, put_restarts, put_seconds
from .reader import Field
from .world import Replicas, System, put_world

JOB = System(name="Kubernetes", variables=frozenset({"JOB_COMPLETION_INDEX"}))
JOB_SET = System(
    name="JobSet",
    variables=frozenset({"JOB_COMPLETION_INDEX", "JOB_INDEX", "JOB_GLOBAL_INDEX", "REPLICATED_JOB_NAME"}),
)

_ONE_ROLE = "a Perdure job has one role, and this is not the one that trains; run it as a job of its own"
_ADDRESSES = "nodes find each other through Perdure's rendezvous"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The part of a JobSet that trains."""

    pod: Pod
    replicas: Replicas


def read_indexed_job(job: Field, draft: Draft) -> None:
    """Reads a Job whose pods have an index."""
    read_metadata(job, draft)
    spec = job["spec"]
    replicas = _read_job(spec, draft)
    pod = read_pod(spec["template"], draft, containers=())
    put_world(draft, pod, system=JOB, replicas=replicas)


def read_job_set(job: Field, draft: Draft) -> None:
    """Reads a JobSet, one part of which trains."""
    read_metadata(job, draft)
    trainer = read_job_set_spec(job["spec"], draft)
    if trainer is not None:
        put_world(draft, trainer.pod, system=JOB_SET, replicas=trainer.replicas)


def read_job_set_spec(
    spec: Field, draft: Draft, *, named: str | None = None, overrides: Overrides | None = None
) -> Trainer | None:
    """Reads a JobSetSpec; the runtimes of Kubeflow's Trainer contain one, too.

    Args:
        spec: The JobSetSpec.
        draft: The specification.
        named: The part that trains and its container; by default the one that starts torchrun.
        overrides: Fields elsewhere that replace the container's.

    Returns:
        The part that trains; None if it cannot be determined.
    """
    policy = spec["failurePolicy"]
    put_restarts(draft, policy["maxRestarts"])
    policy["restartStrategy"].drop("Perdure restarts ranks in place, and replaces only what is lost")
    policy["rules"].drop("Perdure judges failures by more than their reasons; `perdure explain` shows how")
    drop_suspend(spec["suspend"])
    put_seconds(draft, ("ttl_after_finished",), spec["ttlSecondsAfterFinished"])
    spec["network"].drop(_ADDRESSES)
    spec["coordinator"].drop(_ADDRESSES)
    spec["successPolicy"].drop("a job has succeeded when all its ranks have")
    spec["startupPolicy"].drop("a Perdure job has one role")
    spec["managedBy"].drop("Perdure's own workflows manage the job")
    spec["volumeClaimPolicies"].drop("Perdure makes no claims; make them before, and name them in volumes")
    parts = spec["replicatedJobs"].items()
    trainer = _choose(spec["replicatedJobs"], parts, named)
    if trainer is None:
        return None
    for part in parts:
        if part.location != trainer.location:
            part.drop(_ONE_ROLE)
    trainer["name"].settle()
    trainer["groupName"].drop("a Perdure job has one role")
    trainer["dependsOn"].drop("a Perdure job has one role; make sure that the other one has ended before")
    template = trainer["template"]
    drop_metadata(template["metadata"])
    count = trainer["replicas"]
    jobs = count.integer(least=1) or 1
    inner = _read_job(template["spec"], draft)
    pod = read_pod(template["spec"]["template"], draft, containers=(named,) if named else (), overrides=overrides)
    nodes = inner.most * jobs
    return Trainer(pod=pod, replicas=Replicas(least=nodes, most=nodes, fields=(*inner.fields, count)))


def _choose(parts_field: Field, parts: list[Field], named: str | None) -> Field | None:
    if named is not None:
        chosen = [part for part in parts if part["name"].value == named]
        expected = f'one part called "{named}"'
    else:
        chosen = parts if len(parts) == 1 else [part for part in parts if _starts_torchrun(part)]
        expected = "one part whose container starts torchrun"
    if len(chosen) == 1:
        return chosen[0]
    parts_field.source.problem(
        parts_field.location, message=f"{len(chosen)} of the {len(parts)} parts train", expected=expected
    )
    return None


def _starts_torchrun(part: Field) -> bool:
    containers = part["template"]["spec"]["template"]["spec"]["containers"]
    return any(starts_torchrun(container) for container in containers.items())


def _read_job(spec: Field, draft: Draft) -> Replicas:
    """Reads a JobSpec without its template."""
    parallelism, completions = spec["parallelism"], spec["completions"]
    count = parallelism.integer(least=1) or 1
    expected = completions.integer(least=1)
    if expected == count:
        completions.settle()
    else:
        completions.drop(f"all {count} pods train together until the job ends")
    mode = spec["completionMode"]
    if mode.value == "Indexed":
        mode.settle()
    else:
        mode.drop("Perdure gives each node a rank")
    backoff = spec["backoffLimit"]
    if draft.get(("retry", "max_restarts")) is None:
        put_restarts(draft, backoff)
    else:
        backoff.drop("failurePolicy.maxRestarts already sets retry.max_restarts")
    put_seconds(draft, ("limits", "active_deadline"), spec["activeDeadlineSeconds"], least=1)
    put_seconds(draft, ("ttl_after_finished",), spec["ttlSecondsAfterFinished"])
    drop_suspend(spec["suspend"])
    _read_failure_policy(spec["podFailurePolicy"], draft)
    for name in ("backoffLimitPerIndex", "maxFailedIndexes"):
        spec[name].drop("no node is special: retry.max_restarts counts the whole job's restarts")
    spec["podReplacementPolicy"].drop("Perdure replaces a node once it is known to be lost")
    spec["successPolicy"].drop("a job has succeeded when all its ranks have")
    spec["managedBy"].drop("Perdure's own workflows manage the job")
    for name in ("selector", "manualSelector"):
        spec[name].drop("Perdure knows its pods by their names")
    return Replicas(least=count, most=count, fields=(parallelism,))


def _read_failure_policy(policy: Field, draft: Draft) -> None:
    for rule in policy["rules"].items():
        codes = rule["onExitCodes"]
        values = codes["values"]
        numbers = [number for item in values.items() if (number := item.integer(least=1)) is not None]
        if (
            rule["action"].value == "FailJob"
            and codes["operator"].value == "In"
            and len(numbers) == len(values.items())
            and all(number <= 255 for number in numbers)
            and set(rule.entries()) == {"action", "onExitCodes"}
            and set(codes.entries()) <= {"operator", "values", "containerName"}
        ):
            known: list[int] = draft.get(("retry", "fatal_exit_codes")) or []
            draft.put(("retry", "fatal_exit_codes"), sorted({*known, *numbers}), rule)
        else:
            rule.drop("Perdure judges failures by more than this; retry.fatal_exit_codes stop a job at once")
