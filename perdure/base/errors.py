"""Errors of the client, as types that scripts can handle, and the exit codes that follow from them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `perdure`, by which CI can tell a bug in the script from a failure of the cluster."""

    OK = 0
    USER_CODE = 1
    """The training script failed."""
    USAGE = 2
    """The command line or the job specification is wrong."""
    INFRASTRUCTURE = 3
    """The machines, not the script, kept the job from succeeding."""
    CANCELLED = 4
    DEADLINE = 5
    UNREACHABLE = 6
    """The control plane cannot be reached: the job's state is unknown, and it probably continues."""
    DETACHED = 130
    """Ctrl-C: the job continues."""


class PerdureError(Exception):
    """Base of all errors of the client; the message names the error, the remedy what to do about it."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class JobNotFound(PerdureError):
    """No job of that name has run within the server's retention."""


class JobAlreadyRunning(PerdureError):
    """A job of that name is running or, if the name may not be used again, has run."""


class Refused(PerdureError):
    """The job or the control plane rejected a valid request."""


class NotPermitted(Refused):
    """The control plane does not permit the call to this caller, or not yet: a server that is starting may not know its
    callers' permissions for a moment."""


class JoinRefused(Refused):
    """The job gives this machine no place."""

    def __init__(self, message: str, *, kind: str, exit_code: ExitCode, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.kind = kind
        """One of `perdure.contract.JoinRefusal`."""
        self.exit_code = exit_code


class ControlPlaneUnreachable(PerdureError):
    """The Temporal server does not answer."""

    exit_code = ExitCode.UNREACHABLE


class ControlPlaneOverloaded(ControlPlaneUnreachable):
    """The Temporal server answers that it lacks the capacity for a call now; the remedy names the setting."""


class NoWorker(ControlPlaneUnreachable):
    """The Temporal server answers, but no Perdure worker does: jobs wait, nodes continue."""


class WorkflowTaskFails(NoWorker):
    """A worker answers, and fails the job's workflow task again and again: the job waits, nodes continue."""


class JobPaused(NoWorker):
    """An operator has paused the job's workflow in Temporal: the job decides and answers nothing until it is unpaused,
    nodes continue."""


class StateFolderError(ControlPlaneUnreachable):
    """The state folder of the embedded default cannot be used."""


class PayloadKeysError(PerdureError):
    """The keys that encrypt payloads cannot be used."""


class SecretUnavailable(PerdureError):
    """This machine does not have a secret that a job names, or cannot use it."""


class LogsUnavailable(PerdureError):
    """This machine cannot read the log of a node."""

    exit_code = ExitCode.INFRASTRUCTURE
