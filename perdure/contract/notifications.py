"""Notifications: the body that webhooks and commands are given, and the messages by which they get there.

`NotificationBody` is public: docs/notifications.md describes it, and a JSON Schema file is generated from it. Its
fields change by addition only; another meaning of one would be another `version`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Literal
from uuid import UUID, uuid5

from pydantic import ConfigDict, Field

from perdure.contract.base import Message, ShortText, Time
from perdure.contract.names import job_workflow_id
from perdure.contract.vocabulary import FailureClass, JobPhase
from perdure.spec.durations import Duration
from perdure.spec.notifications import Notification, Occasion

__all__ = [
    "CommandAttempt",
    "Notice",
    "NoticeBatch",
    "NotificationAttempt",
    "NotificationBody",
    "NotifiedBudget",
    "NotifiedIncident",
    "NotifiedJob",
    "NotifiedOutcome",
    "NotifierJob",
    "NotifierReport",
    "NotifierState",
    "QueuedNotice",
    "TargetReport",
    "TargetState",
]

_IDS = UUID("6f0d5f0e-6f1c-5d0c-9d2e-3b8c6a4f1a27")
"""The namespace of the IDs of notifications."""


class _Public(Message):
    model_config: ClassVar[ConfigDict] = ConfigDict(use_attribute_docstrings=True)


class NotifiedJob(_Public):
    """The job that a notification is about."""

    namespace: str
    name: str
    uid: str
    """The run's uid: a name may be used again."""
    backend: str
    labels: dict[str, str] = Field(default={})
    """The specification's `labels`."""

    @property
    def workflow_id(self) -> str:
        return job_workflow_id(self.namespace, self.name)


class NotifiedIncident(_Public):
    """An interruption, as `perdure explain` tells it."""

    number: int
    """The number by which `perdure explain NAME NUMBER` shows it."""
    role: str = ""
    failure: FailureClass | None = None
    """Unset for what users requested."""
    culprit: int | None = None
    """The node (slot) where it began, where that is known."""
    host: str = ""
    """The machine of that node, where it is known."""
    rule: str = ""
    """The rule that decided."""
    action: ShortText = ""
    """What the job did, in words."""
    duration_s: float | None = None
    """Seconds from its first evidence until the world stepped again, once it is over."""
    restored: bool | None = None
    """Once it is over, whether the ranks run again."""


class NotifiedBudget(_Public):
    """What is left of the restart budget."""

    restarts: int
    """Restarts within the window."""
    max_restarts: int
    """`retry.max_restarts`."""
    window_s: float
    """`retry.window` in seconds."""


class NotifiedOutcome(_Public):
    """The job's end."""

    phase: JobPhase
    """SUCCEEDED, FAILED or CANCELLED."""
    exit_code: int
    """0 ok, 1 user code failed, 3 infrastructure, 4 cancelled, 5 deadline."""
    reason: ShortText


class Notice(_Public):
    """What a job has to tell, before it is known whom."""

    occasion: Occasion
    """What it is about."""
    state: Literal["begun", "over"] | None = None
    """Of an incident and of a stall: whether it begins or is over."""
    number: int
    """Of the incident; of a stall, the generation of its world; of a budget, all restarts so far."""
    time: Time
    """When it happened."""
    phase: JobPhase
    """The job's phase then."""
    title: ShortText
    """What happened, in one clause."""
    incident: NotifiedIncident | None = None
    """Of an incident."""
    stalled: tuple[int, ...] = ()
    """Of a stall that begins: nodes (slots) whose ranks make no step."""
    budget: NotifiedBudget | None = None
    """Of a restart budget that is nearly spent."""
    outcome: NotifiedOutcome | None = None
    """Of a completion."""
    test: bool = False
    """It is a sample that `perdure notify` sent: nothing has happened."""

    @property
    def key(self) -> str:
        """What distinguishes it from the other notices of its job's run."""
        return f"{self.occasion}/{self.state or ''}/{self.number}/{self.time.isoformat()}"


class NotificationBody(Notice):
    """The JSON body that a webhook of the format `json` and a command's standard input are given."""

    version: Literal[1] = 1
    """Fields may be added within a version. Ignore those that you do not know."""
    id: UUID
    """The same in each delivery of the same notification: drop repeats by it. It is also the header `webhook-id`."""
    job: NotifiedJob
    text: str
    """Title and job in one line, for people."""
    dropped: int = 0
    """Earlier notifications that this receiver was not sent, as too many waited."""

    @classmethod
    def of(cls, job: NotifiedJob, notice: Notice, *, dropped: int = 0) -> NotificationBody:
        """The body about a notice."""
        return cls(
            **notice.part(Notice),
            id=uuid5(_IDS, f"{job.workflow_id}/{job.uid}/{notice.key}"),
            job=job,
            text=f"{job.namespace}/{job.name}: {notice.title}",
            dropped=dropped,
        )


class NoticeBatch(Message):
    """Notices that a job passes on to its deliveries; the signal `notify`."""

    notices: tuple[Notice, ...] = ()
    lost: int = 0
    """Notices before these that the job could not pass on."""
    last: bool = False
    """The job closes: no more follow."""


class QueuedNotice(Message):
    """A notice that waits for its delivery."""

    notice: Notice
    since: Time


class TargetState(Message):
    """The deliveries to one target."""

    queue: tuple[QueuedNotice, ...] = ()
    sent: int = 0
    given_up: int = 0
    dropped: int = 0
    untold: int = 0
    """Dropped notices of which the target does not know."""
    last_error: ShortText = ""
    """Why the delivery that was given up last failed."""
    allowance: float = 0.0
    """Deliveries that may follow without a pause, at `counted_at`."""
    counted_at: Time | None = None


class NotifierState(Message):
    """The whole state of the deliveries, which continue-as-new carries."""

    targets: dict[str, TargetState] = Field(default={})
    seen: tuple[str, ...] = ()
    """Keys of the newest notices."""
    last: bool = False


class NotifierJob(Message):
    """The argument of the workflow that delivers a run's notifications."""

    job: NotifiedJob
    targets: dict[str, Notification]
    """The specification's `notifications`."""
    patience: Duration = timedelta(days=1)
    """The time for which the delivery of one notification is tried."""
    after_end: Duration = timedelta(seconds=90)
    """The time for which commands wait for a machine of the job after its end: machines stay for a minute at most, and
    one may be lost with a command that it has taken."""
    carried: NotifierState = NotifierState()
    """The state of the run before."""


class TargetReport(Message):
    """How the deliveries to one target are."""

    name: str
    sent: int = 0
    waiting: int = 0
    given_up: int = 0
    """Notifications whose delivery failed for good."""
    dropped: int = 0
    """Notifications that were not tried, as too many waited."""
    last_error: ShortText = ""
    """Why the newest try failed, or what it waits for; empty where nothing waits and nothing was given up."""


class NotifierReport(Message):
    """Answer to the query `report`, and the result."""

    targets: tuple[TargetReport, ...] = ()


class NotificationAttempt(Message):
    """The argument of the activity that delivers one notification to one target."""

    target: str
    notification: Notification
    body: NotificationBody


class CommandAttempt(Message):
    """The argument of the activity that runs the command of one notification on a machine of the job. The command is
    the one in the machine's own specification."""

    target: str
    body: NotificationBody
