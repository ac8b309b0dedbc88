"""Shards of a dataset that ranks could not process: how often each was tried, and whether that tells of the shard or of
what it is stored on."""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract.base import Message
from perdure.contract.datasets import Span

MOST_TRIES = 3
"""Tries of a shard before it is set aside. A try counts where another shard was done since the one before it: then the
shard is bad, and not the storage away."""
PAUSES = (timedelta(seconds=10), timedelta(minutes=1))
"""The times after the first and each later try before a shard is leased again."""
UNREADABLE_AFTER = timedelta(minutes=1)
"""The time without any shard that is done, although some were tried, after which users are told."""
LONGEST_OUTAGE = timedelta(hours=1)
"""The time without any shard that is done after which tries count nevertheless."""
LONGEST_AT_END = timedelta(minutes=10)
"""The same where nothing else is left that could be done."""
MOST_IN_VAIN = 8
"""Shards, or as many as ranks, that fail in vain before none is leased until the pause of one of them is over."""
MOST_FAILED = 500
"""Failed shards that one exchange takes in. Others are granted to their ranks again, as if they had not been tried."""
MOST_FAILURES = 1_000
"""Shards whose tries are counted; a further one is set aside at its first failure."""


class FailedTries(Message):
    """The failed tries of one shard."""

    span: Span
    tries: int
    """Those that count."""
    since: datetime | None = None
    """The first of them; None in a run of an earlier release, whose tries all count."""
    failed_at: datetime | None = None
    """The newest one."""

    def waits(self, now: datetime) -> bool:
        """Whether it is too early for the next one."""
        return self.failed_at is not None and now < self.failed_at + PAUSES[min(self.tries, len(PAUSES)) - 1]

    def is_in_vain(self, done_at: datetime | None, now: datetime, longest: timedelta | None = None) -> bool:
        """Whether no shard was done since this one has failed, and not for too long: its storage may be away.

        Args:
            done_at: When a rank has reported a shard as done last.
            now: The time.
            longest: How long is too long; None for `LONGEST_OUTAGE`.
        """
        longest = LONGEST_OUTAGE if longest is None else longest
        if self.failed_at is None or self.since is None:
            return False
        if done_at is None:
            return now - self.since < longest
        return done_at <= self.failed_at and now - max(self.since, done_at) < longest
