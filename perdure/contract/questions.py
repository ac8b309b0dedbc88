"""Questions of users to a node's agent: each is an argument of the workflow `AskNode`, which hands it to the agents'
activity that it names."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

from perdure.contract.identity import NodeId


class Question(NodeId):
    """Base of all questions. They change nothing and need no token."""

    subject: ClassVar[str]

    @property
    def takes(self) -> timedelta:
        """The time that the answer may take once the agent has the question."""
        return timedelta()

    @property
    def summary(self) -> str:
        """The question, for people who see its workflow."""
        return f"{self.subject} of node {self.rank}.{self.incarnation}"
