"""Keeps distributed PyTorch training running: a training job is a durable Temporal workflow.

    import perdure

    async with perdure.Client() as client:
        await client.submit(perdure.load_spec("job.yaml"))

Attributes are imported on first use: training scripts import `perdure_training` and need none of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.base.errors import ControlPlaneOverloaded as ControlPlaneOverloaded
    from perdure.base.errors import ControlPlaneUnreachable as ControlPlaneUnreachable
    from perdure.base.errors import ExitCode as ExitCode
    from perdure.base.errors import JobAlreadyRunning as JobAlreadyRunning
    from perdure.base.errors import JobNotFound as JobNotFound
    from perdure.base.errors import JobPaused as JobPaused
    from perdure.base.errors import JoinRefused as JoinRefused
    from perdure.base.errors import LogsUnavailable as LogsUnavailable
    from perdure.base.errors import NotPermitted as NotPermitted
    from perdure.base.errors import NoWorker as NoWorker
    from perdure.base.errors import PayloadKeysError as PayloadKeysError
    from perdure.base.errors import PerdureError as PerdureError
    from perdure.base.errors import Refused as Refused
    from perdure.base.errors import SecretUnavailable as SecretUnavailable
    from perdure.base.errors import StateFolderError as StateFolderError
    from perdure.base.errors import WorkflowTaskFails as WorkflowTaskFails
    from perdure.base.notebook import Table as Table
    from perdure.client.builder import JobBuilder as JobBuilder
    from perdure.client.client import Client as Client
    from perdure.client.logs.lines import LogLine as LogLine
    from perdure.client.sync import SyncClient as SyncClient
    from perdure.client.views import FailingActivity as FailingActivity
    from perdure.client.views import IssuedTicket as IssuedTicket
    from perdure.client.views import JobSnapshot as JobSnapshot
    from perdure.client.views import JobSummary as JobSummary
    from perdure.client.views import Pause as Pause
    from perdure.client.views import Submission as Submission
    from perdure.client.views import TaskFailure as TaskFailure
    from perdure.contract import Accepted as Accepted
    from perdure.contract import ArchiveReport as ArchiveReport
    from perdure.contract import AutoResources as AutoResources
    from perdure.contract import AwaitNodes as AwaitNodes
    from perdure.contract import Check as Check
    from perdure.contract import CheckpointView as CheckpointView
    from perdure.contract import CollectiveCall as CollectiveCall
    from perdure.contract import Considered as Considered
    from perdure.contract import CourseSample as CourseSample
    from perdure.contract import DatasetView as DatasetView
    from perdure.contract import DeviceUsage as DeviceUsage
    from perdure.contract import EndHang as EndHang
    from perdure.contract import Evidence as Evidence
    from perdure.contract import EvidenceSource as EvidenceSource
    from perdure.contract import ExchangePlaces as ExchangePlaces
    from perdure.contract import ExtendFirstStep as ExtendFirstStep
    from perdure.contract import FailureClass as FailureClass
    from perdure.contract import Hang as Hang
    from perdure.contract import HangKind as HangKind
    from perdure.contract import HistoryAnswer as HistoryAnswer
    from perdure.contract import HistoryRequest as HistoryRequest
    from perdure.contract import HostFailures as HostFailures
    from perdure.contract import IncidentView as IncidentView
    from perdure.contract import JobPhase as JobPhase
    from perdure.contract import JobResult as JobResult
    from perdure.contract import JobShape as JobShape
    from perdure.contract import JobStatus as JobStatus
    from perdure.contract import LogPosition as LogPosition
    from perdure.contract import NewWorld as NewWorld
    from perdure.contract import NodeChecks as NodeChecks
    from perdure.contract import NodePhase as NodePhase
    from perdure.contract import NodeStacks as NodeStacks
    from perdure.contract import NodeView as NodeView
    from perdure.contract import NotifierReport as NotifierReport
    from perdure.contract import Observation as Observation
    from perdure.contract import Pace as Pace
    from perdure.contract import PartitionView as PartitionView
    from perdure.contract import PastJob as PastJob
    from perdure.contract import Peaks as Peaks
    from perdure.contract import Progress as Progress
    from perdure.contract import ProgressSource as ProgressSource
    from perdure.contract import RaiseMemory as RaiseMemory
    from perdure.contract import RankPosition as RankPosition
    from perdure.contract import RankStarts as RankStarts
    from perdure.contract import RankStepTimes as RankStepTimes
    from perdure.contract import ReplaceNodes as ReplaceNodes
    from perdure.contract import Resized as Resized
    from perdure.contract import ResourceUse as ResourceUse
    from perdure.contract import RestartCommands as RestartCommands
    from perdure.contract import RestartRanks as RestartRanks
    from perdure.contract import RestoreSource as RestoreSource
    from perdure.contract import RoleNeeds as RoleNeeds
    from perdure.contract import RoleShape as RoleShape
    from perdure.contract import RoleStatus as RoleStatus
    from perdure.contract import RoleUse as RoleUse
    from perdure.contract import RollBack as RollBack
    from perdure.contract import ScalingView as ScalingView
    from perdure.contract import SetAside as SetAside
    from perdure.contract import Shrink as Shrink
    from perdure.contract import SlowCause as SlowCause
    from perdure.contract import Slowness as Slowness
    from perdure.contract import SmallerRequest as SmallerRequest
    from perdure.contract import StackFrame as StackFrame
    from perdure.contract import StartCommands as StartCommands
    from perdure.contract import StartOver as StartOver
    from perdure.contract import Stop as Stop
    from perdure.contract import Straggler as Straggler
    from perdure.contract import Suggestion as Suggestion
    from perdure.contract import Suspect as Suspect
    from perdure.contract import Suspend as Suspend
    from perdure.contract import TargetReport as TargetReport
    from perdure.contract import ThreadStack as ThreadStack
    from perdure.contract import UnprocessedSamples as UnprocessedSamples
    from perdure.contract import Unused as Unused
    from perdure.contract import Wait as Wait
    from perdure.spec.errors import SpecError as SpecError
    from perdure.spec.errors import SpecProblem as SpecProblem
    from perdure.spec.job import JobSpec as JobSpec
    from perdure.spec.load import load_spec as load_spec
    from perdure.spec.validate import parse_spec as parse_spec

    __version__: str

_HOMES = {
    "perdure.base.errors": (
        "ControlPlaneOverloaded",
        "ControlPlaneUnreachable",
        "ExitCode",
        "JobAlreadyRunning",
        "JobNotFound",
        "JobPaused",
        "JoinRefused",
        "LogsUnavailable",
        "NotPermitted",
        "NoWorker",
        "PayloadKeysError",
        "PerdureError",
        "Refused",
        "SecretUnavailable",
        "StateFolderError",
        "WorkflowTaskFails",
    ),
    "perdure.base.notebook": ("Table",),
    "perdure.client.builder": ("JobBuilder",),
    "perdure.client.client": ("Client",),
    "perdure.client.logs.lines": ("LogLine",),
    "perdure.client.sync": ("SyncClient",),
    "perdure.client.views": (
        "FailingActivity",
        "IssuedTicket",
        "JobSnapshot",
        "JobSummary",
        "Pause",
        "Submission",
        "TaskFailure",
    ),
    "perdure.contract": (
        "Accepted",
        "ArchiveReport",
        "AutoResources",
        "AwaitNodes",
        "Check",
        "CheckpointView",
        "CollectiveCall",
        "Considered",
        "CourseSample",
        "DatasetView",
        "DeviceUsage",
        "Evidence",
        "EvidenceSource",
        "ExchangePlaces",
        "EndHang",
        "ExtendFirstStep",
        "FailureClass",
        "Hang",
        "HangKind",
        "HistoryAnswer",
        "HistoryRequest",
        "HostFailures",
        "IncidentView",
        "JobPhase",
        "JobResult",
        "JobShape",
        "JobStatus",
        "LogPosition",
        "NewWorld",
        "NodeChecks",
        "NodePhase",
        "NodeStacks",
        "NodeView",
        "NotifierReport",
        "Observation",
        "Pace",
        "PartitionView",
        "PastJob",
        "Peaks",
        "Progress",
        "ProgressSource",
        "RaiseMemory",
        "RankPosition",
        "RankStarts",
        "RankStepTimes",
        "ReplaceNodes",
        "Resized",
        "ResourceUse",
        "RestartCommands",
        "RestartRanks",
        "RoleUse",
        "RollBack",
        "RestoreSource",
        "ScalingView",
        "SetAside",
        "Shrink",
        "RoleNeeds",
        "RoleShape",
        "RoleStatus",
        "SlowCause",
        "Slowness",
        "SmallerRequest",
        "StackFrame",
        "StartCommands",
        "StartOver",
        "Stop",
        "Straggler",
        "Suggestion",
        "Suspect",
        "Suspend",
        "TargetReport",
        "ThreadStack",
        "UnprocessedSamples",
        "Unused",
        "Wait",
    ),
    "perdure.spec.errors": ("SpecError", "SpecProblem"),
    "perdure.spec.job": ("JobSpec",),
    "perdure.spec.load": ("load_spec",),
    "perdure.spec.validate": ("parse_spec",),
}
"""The modules of the public names."""

__all__ = [
    "Accepted",
    "ArchiveReport",
    "AutoResources",
    "AwaitNodes",
    "Check",
    "CheckpointView",
    "Client",
    "CollectiveCall",
    "Considered",
    "ControlPlaneOverloaded",
    "ControlPlaneUnreachable",
    "CourseSample",
    "DatasetView",
    "DeviceUsage",
    "EndHang",
    "Evidence",
    "EvidenceSource",
    "ExchangePlaces",
    "ExitCode",
    "ExtendFirstStep",
    "FailingActivity",
    "FailureClass",
    "Hang",
    "HangKind",
    "HistoryAnswer",
    "HistoryRequest",
    "HostFailures",
    "IncidentView",
    "IssuedTicket",
    "JobAlreadyRunning",
    "JobBuilder",
    "JobNotFound",
    "JobPaused",
    "JobPhase",
    "JobResult",
    "JobShape",
    "JobSnapshot",
    "JobSpec",
    "JobStatus",
    "JobSummary",
    "JoinRefused",
    "LogLine",
    "LogPosition",
    "LogsUnavailable",
    "NewWorld",
    "NoWorker",
    "NodeChecks",
    "NodePhase",
    "NodeStacks",
    "NodeView",
    "NotPermitted",
    "NotifierReport",
    "Observation",
    "Pace",
    "PartitionView",
    "PastJob",
    "Pause",
    "PayloadKeysError",
    "Peaks",
    "PerdureError",
    "Progress",
    "ProgressSource",
    "RaiseMemory",
    "RankPosition",
    "RankStarts",
    "RankStepTimes",
    "Refused",
    "ReplaceNodes",
    "Resized",
    "ResourceUse",
    "RestartCommands",
    "RestartRanks",
    "RestoreSource",
    "RoleNeeds",
    "RoleShape",
    "RoleStatus",
    "RoleUse",
    "RollBack",
    "ScalingView",
    "SecretUnavailable",
    "SetAside",
    "Shrink",
    "SlowCause",
    "Slowness",
    "SmallerRequest",
    "SpecError",
    "SpecProblem",
    "StackFrame",
    "StartCommands",
    "StartOver",
    "StateFolderError",
    "Stop",
    "Straggler",
    "Submission",
    "Suggestion",
    "Suspect",
    "Suspend",
    "SyncClient",
    "Table",
    "TargetReport",
    "TaskFailure",
    "ThreadStack",
    "UnprocessedSamples",
    "Unused",
    "Wait",
    "WorkflowTaskFails",
    "load_spec",
    "parse_spec",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("perdure")
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(home), name)
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
