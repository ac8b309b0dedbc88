"""Requests of users to replay the next step, which all ranks take up at the same one.

Ranks see a request at different times. So every few seconds they exchange the newest one that each of them has seen,
and replay the step at which the exchange brings a new one.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from perdure_training.node_api.progress_file import speaks_for_rank
from perdure_training.node_api.rank_environment import PROGRESS_VARIABLE, generation_of
from perdure_training.node_api.replay_files import ReplayAnswer, answer_path, read_request, write_answer
from perdure_training.replay.replicas import Replicas

logger = logging.getLogger(__name__)

_SECONDS = 5.0
"""Between two exchanges of a few bytes, which take less than a millisecond."""
_MICROSECONDS = 1e6


class ReplayRequests:
    """The requests to the ranks of one process group; none outside of a job."""

    def __init__(self, replicas: Replicas) -> None:
        """Creates the object, and lets the agent know that this rank can replay steps."""
        self._replicas = replicas
        self._progress = Path(os.environ[PROGRESS_VARIABLE]) if speaks_for_rank(os.environ) else None
        self._newest = self._answered = 0
        self._calls, self._until_exchange = 1, 1
        self._exchanged_at: float | None = None
        alone = "the script trains in one process: there is no other one to compare it with"
        self._write(ReplayAnswer(problem=alone if replicas.count == 1 else ""))

    def is_due(self) -> bool:
        """Returns whether this step is to be replayed. All ranks call it at each step; at some it is a collective."""
        if self._progress is None:
            return False
        self._until_exchange -= 1
        if self._until_exchange:
            return False
        now = time.monotonic()
        usual = (now - self._exchanged_at) / self._calls if self._exchanged_at is not None else _SECONDS
        seen = read_request(self._progress.parent, generation=generation_of(os.environ))
        rows = self._replicas.gather([seen, round(usual * _MICROSECONDS)])
        self._exchanged_at = time.monotonic()
        self._newest = max(request for request, _ in rows)
        slowest = max(1, *(step for _, step in rows)) / _MICROSECONDS
        self._calls = self._until_exchange = max(round(_SECONDS / slowest), 1)
        return self._newest > self._answered

    def answer(self, answer: ReplayAnswer) -> None:
        """Answers the newest request, if it has no answer yet."""
        if self._newest > self._answered:
            self._answered = self._newest
            self._write(replace(answer, request=self._newest))

    def close(self, answer: ReplayAnswer) -> None:
        """Answers all later requests in advance: no further step is replayed."""
        self._write(replace(answer, request=self._newest))

    def _write(self, answer: ReplayAnswer) -> None:
        if self._progress is None:
            return
        try:
            path = answer_path(self._progress, int(os.environ["RANK"]))
            write_answer(path, answer, generation=generation_of(os.environ))
        except (OSError, ValueError) as error:
            logger.warning("perdure: a request to replay a step is not answered: %s", error)
