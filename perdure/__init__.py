"""Keeps distributed PyTorch training running: a training job is a durable Temporal workflow.

    import perdure

    async with perdure.Client() as client:
        await client.submit(perdure.load_spec("job.yaml"))

Attributes are imported on first use: training scripts import `perdure_training` and need none of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.base.errors import *
    from perdure.client.client import Client
    from perdure.client.logs.lines import LogLine
    from perdure.client.sync import SyncClient
    from perdure.client.views import *
    from perdure.contract import *
    from perdure.spec.errors import SpecError
    from perdure.spec.job import JobSpec
    from perdure.spec.load import load_spec
    from perdure.spec.validate import parse_spec

    __version__: str

_HOMES = (
    *("perdure.base.errors", "perdure.spec.errors", "perdure.spec.job", "perdure.spec.load", "perdure.spec.validate"),
    *("perdure.contract", "perdure.client.views", "perdure.client.logs.lines"),
    *("perdure.client.client", "perdure.client.sync"),
)
"""The modules of the public names. Those that take longer to import come later."""

__all__ = [
    "Accepted",
    "CheckpointView",
    "Client",
    "Considered",
    "ControlPlaneUnreachable",
    "DeviceUsage",
    "Evidence",
    "EvidenceSource",
    "ExitCode",
    "FailureClass",
    "IncidentView",
    "IssuedTicket",
    "JobAlreadyRunning",
    "JobNotFound",
    "JobPaused",
    "JobPhase",
    "JobResult",
    "JobSnapshot",
    "JobSpec",
    "JobStatus",
    "JobSummary",
    "JoinRefused",
    "LogLine",
    "LogPosition",
    "LogsUnavailable",
    "NoWorker",
    "NodePhase",
    "NodeStacks",
    "NodeView",
    "NotPermitted",
    "Observation",
    "Pause",
    "PayloadKeysError",
    "PerdureError",
    "Progress",
    "ProgressSource",
    "RankPosition",
    "RankStarts",
    "Refused",
    "ResourceUse",
    "RestoreSource",
    "SecretUnavailable",
    "SetAside",
    "SpecError",
    "StackFrame",
    "StateFolderError",
    "Submission",
    "Suspect",
    "SyncClient",
    "TaskFailure",
    "ThreadStack",
    "UnprocessedSamples",
    "WorkflowTaskFails",
    "load_spec",
    "parse_spec",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("perdure")
    if name in __all__:
        from importlib import import_module

        homes = (import_module(home) for home in _HOMES)
        return next(getattr(home, name) for home in homes if hasattr(home, name))
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
