"""The contract between the parts of the control plane: one model per signal, update, query and activity argument.

| module | messages |
|-|-|
| `agents` | from agents to groups and jobs |
| `commands` | from groups to agents |
| `backends` | between groups and backends |
| `groups` | between jobs and groups |
| `logs` | from users to agents: requests for a node's log |
| `joining` | between a job and machines that a user or a scheduler started |
| `users` | from users to jobs |
| `workdirs` | from clients to uploads of code, and on to backends |
| `datasets` | between agents and the datasets of their job |
| `store` | between agents and the store of their job |
| `views` | from jobs and groups to users |
| `vocabulary` | the enumerations that all of them share |
| `base` | base classes and text limits |

Each model is defined in one module. All can be imported from here, because most callers need several of the modules.
"""

from workflows.messages.agents import (
    AgentMessage,
    DeviceUsage,
    Failure,
    FailureKind,
    Finished,
    GroupMissing,
    Heartbeat,
    Joined,
    LeaseTaken,
    LeaseView,
    Metrics,
    Progress,
    RankExit,
    RankStarts,
    Ready,
    Stall,
    Stepping,
)
from workflows.messages.backends import (
    CreatedNode,
    GroupRef,
    JobCheck,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeOrder,
    NodeRef,
    NodeRequest,
    NodesCreated,
    NodesRef,
    NodesRequest,
    SiteFacts,
    SiteReport,
    WatchRequest,
)
from workflows.messages.base import Message
from workflows.messages.commands import (
    ApplyWorld,
    CheckConnection,
    CommandAnswer,
    CompleteGeneration,
    LeaseRequest,
    RestartCommand,
    StopNode,
)
from workflows.messages.datasets import (
    DatasetAnswer,
    DatasetNeeded,
    DatasetParameters,
    DatasetRequest,
    DatasetView,
    FailedShard,
    Position,
    SetAside,
    ShardAnswer,
    ShardRequest,
    Term,
)
from workflows.messages.groups import (
    Adopt,
    DesiredNode,
    GroupDesire,
    GroupTransitions,
    Member,
    NodeTransition,
    TransitionKind,
    World,
)
from workflows.messages.identity import Incarnation, NodeCredentials, NodeId
from workflows.messages.joining import JoinAnswer, JoinRefusal, JoinRequest
from workflows.messages.logs import LogChunk, LogPosition, ReadLog
from workflows.messages.store import (
    StoreAction,
    StoreAnswer,
    StoreAnswers,
    StoreCall,
    StoreChanged,
    StoreNeeded,
    StoreRequest,
    StoreView,
)
from workflows.messages.users import Accepted, ReasonRequest, RelaunchRequest, ScaleRequest
from workflows.messages.views import Considered, Evidence, IncidentView, JobResult, JobStatus, NodeView, Observation
from workflows.messages.vocabulary import (
    EvidenceSource,
    FailureClass,
    JobPhase,
    LossCause,
    NodePhase,
    ProgressSource,
)
from workflows.messages.workdirs import WorkdirRequest

__all__ = [
    "Accepted",
    "Adopt",
    "AgentMessage",
    "ApplyWorld",
    "CheckConnection",
    "CommandAnswer",
    "CompleteGeneration",
    "Considered",
    "CreatedNode",
    "DatasetAnswer",
    "DatasetNeeded",
    "DatasetParameters",
    "DatasetRequest",
    "DatasetView",
    "DesiredNode",
    "DeviceUsage",
    "Evidence",
    "EvidenceSource",
    "FailedShard",
    "Failure",
    "FailureClass",
    "FailureKind",
    "Finished",
    "GroupDesire",
    "GroupMissing",
    "GroupRef",
    "GroupTransitions",
    "Heartbeat",
    "Incarnation",
    "IncidentView",
    "JobCheck",
    "JobPhase",
    "JobResult",
    "JobStatus",
    "JoinAnswer",
    "JoinRefusal",
    "JoinRequest",
    "Joined",
    "LeaseRequest",
    "LeaseTaken",
    "LeaseView",
    "LogChunk",
    "LogPosition",
    "LossCause",
    "Member",
    "Message",
    "Metrics",
    "NodeCredentials",
    "NodeEvent",
    "NodeEventKind",
    "NodeEvents",
    "NodeId",
    "NodeOrder",
    "NodePhase",
    "NodeRef",
    "NodeRequest",
    "NodeTransition",
    "NodeView",
    "NodesCreated",
    "NodesRef",
    "NodesRequest",
    "Observation",
    "Position",
    "Progress",
    "ProgressSource",
    "RankExit",
    "RankStarts",
    "ReadLog",
    "Ready",
    "ReasonRequest",
    "RelaunchRequest",
    "RestartCommand",
    "ScaleRequest",
    "SetAside",
    "ShardAnswer",
    "ShardRequest",
    "SiteFacts",
    "SiteReport",
    "Stall",
    "Stepping",
    "StopNode",
    "StoreAction",
    "StoreAnswer",
    "StoreAnswers",
    "StoreCall",
    "StoreChanged",
    "StoreNeeded",
    "StoreRequest",
    "StoreView",
    "Term",
    "TransitionKind",
    "WatchRequest",
    "WorkdirRequest",
    "World",
]
