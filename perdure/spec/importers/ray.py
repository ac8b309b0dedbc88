"""Imports Ray jobs: job files as `ray job submit`, the SDK and DLRover's submitter take them, and KubeRay's RayJob.

A Ray job is one driver on one node. If the driver starts torchrun, or trains by itself, it becomes a node of Perdure.
Perdure cannot see work that a driver does through Ray's own actors and tasks.
"""

from __future__ import annotations

from typing import Any, cast

import yaml

from .draft import Draft
from .launchers import LauncherError, read_launch
from .metadata import put_label, put_name, read_metadata
from .pods import Pod, read_pod
from .policies import drop_suspend, put_restarts, put_seconds
from .reader import Field
from .shell import as_words
from .world import Replicas, System, put_world

SYSTEM = System(name="Ray", variables=frozenset({"RAY_ADDRESS", "RAY_JOB_ID", "RAY_HEAD_IP"}))

_ENVIRONMENT = ("ray", "runtime_env")
_CLUSTER = "Perdure makes no Ray cluster"
_DRIVER = (
    "Ray runs it once, and Perdure on every node; workers that it starts through Ray Train or Ray's tasks need a Ray "
    "cluster, and Perdure does not see them: give the script that trains as the command instead"
)


def read_job_file(job: Field, draft: Draft) -> None:
    """Reads the arguments of `JobSubmissionClient.submit_job`, which are those of `ray job submit`, as a file."""
    for name in ("submission_id", "job_id", "name"):
        if job[name].present and draft.get(("name",)) is None:
            put_name(draft, job[name])
        else:
            job[name].drop("the job has another name already")
    for label, field in job["metadata"].entries().items():
        put_label(draft, label, field)
    _read_runtime_environment(job["runtime_env"], draft)
    if draft.get(("workdir",)) is None:
        _read_working_directory(job["working_dir"], draft)
    else:
        job["working_dir"].drop("runtime_env already sets it")
    job["address"].drop("on the backend ray, the worker's PERDURE_RAY_ADDRESS names the cluster")
    for name in ("headers", "cookies", "verify", "no_wait"):
        job[name].drop("Perdure talks to Temporal, and not to Ray's dashboard")
    pod = Pod()
    _read_entrypoint(job["entrypoint"], pod)
    pod.variables.update(cast("dict[str, str]", draft.get(("env",)) or {}))
    _read_amount(job["entrypoint_num_cpus"], "cpu", draft)
    _read_amount(job["entrypoint_memory"], "memory", draft)
    pod.gpus = _read_gpus(job["entrypoint_num_gpus"], draft)
    for name, field in job["entrypoint_resources"].entries().items():
        if isinstance(field.value, int | float) and not isinstance(field.value, bool):
            draft.put((*draft.role, "ray", "resources", name), field.value, field)
        else:
            field.wrong("a number")
    for name, field in job["entrypoint_label_selector"].entries().items():
        draft.put((*draft.role, "ray", "labels", name), field.text(), field)
    _finish(draft, pod, Replicas(least=1, most=1, stated=False))


def read_submission(job: Field, draft: Draft) -> None:
    """Reads the file of DLRover's submitter of Ray jobs."""
    dashboard = job["dashboardUrl"]
    draft.cluster = dashboard.text() or ""
    dashboard.drop("on the backend ray, the worker's PERDURE_RAY_ADDRESS names the cluster; it has to be the same")
    pod = Pod()
    words = job["command"]
    if isinstance(words.value, list):
        pod.command_fields, pod.command = (words,), words.texts()
    else:
        _read_entrypoint(words, pod)
    _read_working_directory(job["workingDir"], draft)
    requirements = job["requirements"]
    packages = requirements.value
    if isinstance(packages, str) and "\n" not in packages.strip():
        _have_filled("pip", requirements, draft)
    else:
        listed = packages.split("\n") if isinstance(packages, str) else requirements.texts()
        kept = [line.strip() for line in listed or () if line.strip()]
        draft.put((*_ENVIRONMENT, "pip"), kept or None, requirements)
    _finish(draft, pod, Replicas(least=1, most=1, stated=False))


def read_ray_job(job: Field, draft: Draft) -> None:
    """Reads KubeRay's RayJob; its one group of workers, or else its head, are the nodes."""
    read_metadata(job, draft)
    spec = job["spec"]
    _read_life(spec, draft)
    cluster = spec["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"].items()
    head = cluster["headGroupSpec"]
    pod, replicas = Pod(), Replicas(least=1, most=1, stated=False)
    if len(groups) == 1:
        head.drop("Perdure makes no Ray cluster, and needs no head")
        pod, replicas = _read_group(groups[0], draft)
    elif groups:
        cluster["workerGroupSpecs"].wrong("at most one group", hint="a Perdure job has one role")
    elif head.present:
        for name in ("serviceType", "headService", "enableIngress", "rayStartParams"):
            head[name].drop(_CLUSTER)
        pod = read_pod(head["template"], draft, containers=("ray-head",))
    for name in (
        *("rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headServiceAnnotations", "suspend"),
        *("gcsFaultToleranceOptions", "authOptions", "managedBy", "upgradeStrategy"),
    ):
        cluster[name].drop(_CLUSTER)
    _read_runtime_environment_text(spec["runtimeEnvYAML"], draft)
    for field in pod.command_fields:
        field.drop("KubeRay starts Ray there; the command of the job is its entrypoint")
    _read_entrypoint(spec["entrypoint"], pod)
    _finish(draft, pod, replicas)


def _read_life(spec: Field, draft: Draft) -> None:
    put_restarts(draft, spec["backoffLimit"])
    put_seconds(draft, ("limits", "active_deadline"), spec["activeDeadlineSeconds"], least=1)
    put_seconds(draft, ("ttl_after_finished",), spec["ttlSecondsAfterFinished"])
    drop_suspend(spec["suspend"])
    for label, field in spec["metadata"].entries().items():
        put_label(draft, label, field)
    for name in ("shutdownAfterJobFinishes", "deletionStrategy"):
        spec[name].drop("Perdure removes all nodes when the job ends, and keeps their logs")
    for name in ("clusterSelector", "submissionMode", "submitterPodTemplate", "submitterConfig", "jobId"):
        spec[name].drop("no job is submitted to a Ray cluster")
    for name in ("entrypointNumCpus", "entrypointNumGpus", "entrypointResources"):
        spec[name].drop("a node's needs are in roles.worker.resources")
    spec["managedBy"].drop("Perdure's own workflows manage the job")
    spec["schedule"].drop("start jobs by Temporal's schedules")


def _read_group(group: Field, draft: Draft) -> tuple[Pod, Replicas]:
    for name in ("groupName", "rayStartParams", "scaleStrategy", "suspend", "idleTimeoutSeconds"):
        group[name].drop(_CLUSTER)
    count, hosts = group["replicas"], group["numOfHosts"]
    replicas, per_replica = count.integer() or 1, hosts.integer(least=1) or 1
    least, most = group["minReplicas"], group["maxReplicas"]
    low, high = least.integer() or 0, most.integer()
    low, high = (low or replicas) * per_replica, max(high or replicas, replicas) * per_replica
    pod = read_pod(group["template"], draft, containers=("ray-worker",))
    fields = tuple(field for field in (count, hosts, least, most) if field.present)
    return pod, Replicas(least=low, most=high, fields=fields, first=replicas * per_replica)


def _finish(draft: Draft, pod: Pod, replicas: Replicas) -> None:
    entrypoint = next((field for field in pod.command_fields if field.present), None)
    if entrypoint is not None and not _starts_torchrun(pod):
        entrypoint.warn_changed(_DRIVER)
    put_world(draft, pod, system=SYSTEM, replicas=replicas)


def _starts_torchrun(pod: Pod) -> bool:
    try:
        return read_launch(pod.command or []) is not None
    except LauncherError:
        return True


def _read_entrypoint(entrypoint: Field, pod: Pod) -> None:
    """Reads the entrypoint as text for a shell, as Ray does."""
    pod.command_fields = (entrypoint,)
    text = entrypoint.text()
    if text is None or not text.strip():
        entrypoint.source.problem(entrypoint.location, message="missing", expected="the command of the job")
        return
    pod.command = as_words(text) or ["bash", "-c", text]


def _read_amount(field: Field, name: str, draft: Draft) -> None:
    if isinstance(field.value, int | float) and not isinstance(field.value, bool):
        draft.put((*draft.role, "resources", name), str(field.value), field)
    elif field.present:
        field.wrong("a number")


def _read_gpus(field: Field, draft: Draft) -> int:
    value = field.value
    if not field.present:
        return 0
    if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
        draft.put((*draft.role, "resources", "gpu"), int(value), field)
        return int(value)
    field.wrong("a whole number of GPUs")
    return 0


def _read_runtime_environment_text(text: Field, draft: Draft) -> None:
    written = text.text()
    if written is None:
        return
    try:
        data: Any = yaml.safe_load(written)
    except yaml.YAMLError as error:
        text.wrong("a runtime environment in YAML", message=str(error).replace("\n", " "))
        return
    _read_runtime_environment(text.read_contained(data), draft)


def _read_runtime_environment(environment: Field, draft: Draft) -> None:
    for name, field in environment["env_vars"].entries().items():
        draft.put(("env", name), field.text(), field)
    _read_working_directory(environment["working_dir"], draft)
    excludes = environment["excludes"]
    if draft.get(("workdir", "path")) is not None:
        draft.put(("workdir", "exclude"), excludes.texts(), excludes)
    else:
        excludes.drop("it belongs to a folder that is carried over")
    image = environment["image_uri"]
    container = environment["container"]
    for field in (image, container["image"]):
        draft.put((*draft.role, "image"), field.text(), field)
    for name in ("worker_path", "run_options"):
        container[name].drop("Perdure starts containers its own way")
    for name in ("pip", "uv", "conda", "py_modules"):
        field = environment[name]
        if isinstance(field.value, str) and (name != "conda" or field.value.endswith((".yaml", ".yml"))):
            _have_filled(name, field, draft)
        else:
            draft.put((*_ENVIRONMENT, name), field.value, field)
    limit = environment["config"]["setup_timeout_seconds"]
    draft.put((*_ENVIRONMENT, "config", "setup_timeout_seconds"), limit.value, limit)
    for name in ("eager_install", "log_files"):
        environment["config"][name].drop("Ray builds the environment when it starts a node")
    for name in ("worker_process_setup_hook", "nsight", "rocprof_sys", "mpi", "py_executable", "java_jars"):
        environment[name].drop("it belongs to Ray's own workers")


def _have_filled(name: str, file: Field, draft: Draft) -> None:
    """Has the user write what a file of the submitting machine says."""
    draft.must_fill((*_ENVIRONMENT, name), f"is the file {file.value} there; expected its content")
    file.drop("a file of the submitting machine")


def _read_working_directory(folder: Field, draft: Draft) -> None:
    path = folder.text()
    if path is None:
        return
    if "://" in path:
        draft.put((*_ENVIRONMENT, "working_dir"), path, folder)
    elif path.endswith(".zip"):
        folder.drop("Perdure unpacks no archives; name a folder in workdir.path")
    else:
        draft.put(("workdir", "path"), path, folder)
