"""Reads what agents answer. An agent that was taken over, or that another program stands in for, answers what it likes.

The SDK fails the workflow task where it cannot read the result of an activity, and does so again each time: the group
would decide nothing any more, for none of its nodes. So results of agents are taken as they came.
"""

from __future__ import annotations

from typing import TypeVar

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import FailureError

Answer = TypeVar("Answer")


class UnreadableAnswer(ValueError):
    """An agent has answered what is no answer."""


def read_answer(raw: RawValue, kind: type[Answer]) -> Answer:
    """Returns the answer.

    Raises:
        UnreadableAnswer: if it is none of this type.
    """
    try:
        value = workflow.payload_converter().from_payload(raw.payload, kind)
    except (FailureError, LookupError, RuntimeError, ValueError) as error:
        raise UnreadableAnswer("its agent has answered what cannot be read") from error
    if not isinstance(value, kind):
        raise UnreadableAnswer(f"its agent has answered with {type(value).__name__}")
    return value
