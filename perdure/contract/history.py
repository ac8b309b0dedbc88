"""Jobs of the past: what is kept of them beyond Temporal's retention, and questions about it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from perdure.contract.base import Message, ShortText, Time, shorten
from perdure.contract.peaks import Peaks
from perdure.contract.vocabulary import FailureClass, JobPhase

if TYPE_CHECKING:
    from perdure.spec.job import JobSpec

__all__ = [
    "HistoryAnswer",
    "HistoryRequest",
    "HostFailures",
    "JobShape",
    "PastJob",
    "RoleNeeds",
    "RoleShape",
    "RoleUse",
]

MOST_LABELS = 64
_LONGEST_NAME = 400
"""Characters of the name of an image, a script or a machine."""

_Name = Annotated[str, AfterValidator(lambda text: shorten(text, _LONGEST_NAME))]

_NUMBERS = re.compile(r"\d+")


class RoleShape(Message):
    """What jobs that are alike have in common in one role."""

    role: _Name
    image: _Name = ""
    """Empty where its nodes are processes of a machine."""
    command: _Name = ""
    """The program, its script and the names of its options. Values are left out: they differ between jobs that are
    alike, and some of them are secret."""


class JobShape(Message):
    """What jobs that are alike have in common."""

    roles: tuple[RoleShape, ...] = ()
    labels: dict[str, str] = Field(default={})

    @classmethod
    def of(cls, job: JobSpec) -> JobShape:
        """The shape of a specification."""
        roles = (
            RoleShape(role=name, image=role.image or "", command=command_shape(role.command))
            for name, role in job.roles.items()
        )
        return cls(roles=tuple(roles), labels=dict(list(job.labels.items())[:MOST_LABELS]))


class HistoryRequest(Message):
    """A question about jobs of the past."""

    namespace: str | None = None
    """Only jobs of this namespace; None: of all that the worker serves."""
    since: Time | None = None
    """Only jobs that ended later, or have not ended."""
    image: str | None = None
    """Only jobs with a role of this image, with or without its tag."""
    like: str | None = None
    """Only jobs that are like the newest one of this name, which is in `namespace`."""
    shape: JobShape | None = None
    """Only jobs like this one."""
    limit: int = Field(default=50, ge=1, le=1_000)
    """The most jobs to return, the most similar and newest first; sums are over all of them."""


class RoleUse(Message):
    """What the nodes of one role of a job have used."""

    role: _Name
    nodes: int = 0
    """The most nodes that a world of it had."""
    peaks: Peaks | None = None


class PastJob(Message):
    """What is kept of one job."""

    name: str
    namespace: str
    uid: str
    backend: str = ""
    owner: str = ""
    shape: JobShape = JobShape()
    phase: JobPhase
    reason: ShortText = ""
    started_at: Time
    finished_at: Time | None = None
    nodes: int = 0
    """The most nodes that a world of it had."""
    worlds: int = 0
    restarts: int = 0
    step: int | None = None
    """The last step that is known."""
    step_seconds: float | None = None
    """Seconds of a usual step in its newest world."""
    lost_seconds: float = 0
    """The time in which interruptions kept it from training."""
    node_hours: float = 0
    """Hours of all its nodes in worlds."""
    use: tuple[RoleUse, ...] = ()
    """What the nodes of each role have used, where that is known."""
    alike: int = 0
    """How much it is like the requested job: a point each for the image, the command and the labels."""


class HostFailures(Message):
    """The failures that began on one machine."""

    host: str
    failures: int
    jobs: int
    """The number of jobs that they interrupted."""
    classes: dict[FailureClass, int] = Field(default={})
    lost_seconds: float = 0
    last_at: Time


class RoleNeeds(Message):
    """What the roles of the jobs with one image and command usually needed."""

    image: str
    command: str
    jobs: int
    succeeded: int
    nodes: float
    """The median of the most nodes in a world."""
    seconds: float | None = None
    """The median duration of those that succeeded."""
    measured: int = 0
    """The jobs whose use of their machines is known: they succeeded, or were measured for an hour."""
    memory: int | None = None
    """Bytes of memory that a node used at most; jobs that used more than four times the median do not count."""
    cpu: float | None = None
    """The same of processors, as the highest mean over a minute."""
    gpu_memory: int | None = None
    """The same of bytes of a GPU."""
    shm: int | None = None
    """The same of bytes of /dev/shm."""
    names: tuple[str, ...] = ()
    """The newest jobs of which these figures are."""


class HistoryAnswer(Message):
    """What the history has on a question."""

    jobs: tuple[PastJob, ...] = ()
    found: int = 0
    """The number of jobs that the question is about, of which `jobs` are the first."""
    hosts: tuple[HostFailures, ...] = ()
    """The most failures first."""
    needs: tuple[RoleNeeds, ...] = ()
    """The most jobs first."""
    recorded_at: Time | None = None
    """Until when the history is complete; None before the first record."""


def command_shape(command: Sequence[str]) -> str:
    """The program of a command, its scripts and modules, and the names of its options."""
    return " ".join(_shape_words(command))


def _shape_words(command: Sequence[str]) -> Iterable[str]:
    before = ""
    for position, word in enumerate(command):
        if before in ("-c", "-lc"):
            # A script of its own. Its numbers are settings.
            yield hashlib.sha256(_NUMBERS.sub("", word).encode()).hexdigest()[:8]
        elif word.startswith("-"):
            yield word.partition("=")[0]
        elif position == 0 or before == "-m" or word.endswith((".py", ".sh")):
            yield PurePath(word).name
        before = word
