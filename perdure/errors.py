"""What can go wrong between a user and a job, as types: scripts branch on them, and exit codes follow them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What `perdure` exits with, so that CI can tell a bug in the script from a cluster that broke."""

    OK = 0
    USER_CODE = 1
    """The training script failed."""
    USAGE = 2
    """The command line or the job specification is wrong."""
    INFRASTRUCTURE = 3
    """The machines, and not the script, kept the job from succeeding."""
    CANCELLED = 4
    DEADLINE = 5
    UNREACHABLE = 6
    """The control plane cannot be reached: the job's state is unknown, and it probably continues."""
    DETACHED = 130
    """Ctrl-C: the job continues."""


class PerdureError(Exception):
    """Base of all errors of the client; the message says what is wrong, the remedy what to do about it."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class JobNotFound(PerdureError):
    """No job of that name has run within the server's retention."""


class JobAlreadyRunning(PerdureError):
    """A job's name is its identity while it runs."""


class Refused(PerdureError):
    """The job, or the control plane, said no to a request that was understood."""


class NotPermitted(Refused):
    """The control plane does not let this caller do that, or does not yet: a server that starts may not know its
    callers' rights for a moment."""


class JoinRefused(Refused):
    """The job gives this machine no place."""

    def __init__(self, message: str, *, kind: str, exit_code: ExitCode, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.kind = kind
        """One of `workflows.messages.JoinRefusal`."""
        self.exit_code = exit_code


class ControlPlaneUnreachable(PerdureError):
    """The Temporal server does not answer."""

    exit_code = ExitCode.UNREACHABLE


class NoWorker(ControlPlaneUnreachable):
    """The Temporal server answers, but no Perdure worker does: jobs wait, nodes continue."""


class WorkflowTaskFails(NoWorker):
    """A worker answers, and fails the job's workflow task again and again: the job waits, nodes continue."""


class StateFolderError(ControlPlaneUnreachable):
    """The state folder of the embedded default cannot be used."""


class LogsUnavailable(PerdureError):
    """The log of a node is not where this machine can read it."""

    exit_code = ExitCode.INFRASTRUCTURE
