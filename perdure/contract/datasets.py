"""Messages about datasets: between agents and the `Dataset` workflow of each dataset of a job.

A dataset of `size` samples that is read `epochs` times is one line of positions, 0 to `size * epochs`: position p is
sample p % size of epoch p // size, in the order of the epoch's shuffle. So leases, what is done and where training was
at a checkpoint are all sets of spans of one line, which take no memory for the samples in them.

A stream is a line, too: each of its partitions has a part of it that is as long as no partition will ever be, in place
of an epoch. What the partitions hold so far can be leased.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from perdure.base.words import count, do
from perdure.contract.agents import AgentMessage
from perdure.contract.base import Message, ShortText, shorten
from perdure.contract.routes import Destination, Route, RoutedMessage

__all__ = [
    "DatasetAnswer",
    "DatasetNeeded",
    "DatasetParameters",
    "DatasetRequest",
    "DatasetView",
    "FailedShard",
    "PartitionView",
    "Position",
    "SetAside",
    "ShardAnswer",
    "ShardRequest",
    "ShardsSetAside",
    "Term",
    "UnprocessedSamples",
    "UnreadableDataset",
]

DATASET_NAME = r"^[a-zA-Z][a-zA-Z0-9._-]{0,62}$"
"""It begins with a letter: group IDs are numbers, and share the job's names."""
LARGEST_POSITION = 2**62
PARTITION_SIZE = 2**48
"""The part of the line that a partition has: offsets are smaller."""
MOST_PARTITIONS = 256
"""Partitions of a stream: each request names them."""
MOST_SPANS = 256
"""Spans of one list in a message."""
MOST_SHARDS = 1_000_000
"""Shards that a rank can request at once."""

_LONGEST_REASON = 200
"""Characters of an error in a sentence that names several."""

Span = tuple[int, int]
"""The positions from the first number, included, to the second, excluded."""


def _ordered(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    before = 0
    for first, end in spans:
        if not before <= first < end <= LARGEST_POSITION:
            raise ValueError(f"[{first}, {end}) is empty, out of order, or no span of positions")
        before = end
    return spans


Spans = Annotated[tuple[Span, ...], AfterValidator(_ordered)]
"""Spans in ascending order that do not overlap."""
SomeSpans = Annotated[Spans, Field(max_length=MOST_SPANS)]


class DatasetParameters(Message):
    """What a dataset is. All ranks name the same parameters."""

    size: int = Field(ge=1, le=PARTITION_SIZE)
    """Samples; of a stream, `PARTITION_SIZE`."""
    shard_size: int = Field(ge=1, le=2**32)
    """Samples of one shard: what a rank is given at once. The last shard of an epoch may be smaller."""
    epochs: int = Field(default=1, ge=0, le=2**20)
    """How often the dataset is read; 0 for endlessly. Of a stream, the number of its partitions."""
    shuffle: bool = False
    """Whether the samples of each epoch are permuted, each epoch differently. Ranks compute the permutation."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    partitions: tuple[Annotated[str, StringConstraints(min_length=1, max_length=100)], ...] = Field(
        default=(), max_length=MOST_PARTITIONS
    )
    """The names of a stream's partitions. Empty unless the dataset is a stream."""
    starts: tuple[Annotated[int, Field(ge=0, lt=PARTITION_SIZE)], ...] = ()
    """The first offset of each partition."""

    @model_validator(mode="after")
    def _is_one_line(self) -> Self:
        if self.size * max(self.epochs, 1) > LARGEST_POSITION:
            raise ValueError("the dataset is too large for its epochs")
        shape = (self.size, self.epochs, len(self.starts), len(set(self.partitions)), self.shuffle)
        number = len(self.partitions)
        if self.partitions and shape != (PARTITION_SIZE, number, number, number, False):
            raise ValueError("a stream has partitions with different names, a start for each, and no shuffle")
        return self

    @property
    def end(self) -> int | None:
        """The first position after the last one; None for endless epochs."""
        return self.size * self.epochs if self.epochs else None


class Position(Message):
    """The samples that training has consumed: all positions before `next` except the holes."""

    next: int = Field(default=0, ge=0, le=LARGEST_POSITION)
    holes: Spans = ()


class Term(Message):
    """The time in which leases are valid: of one world, until a rank loads a position.

    Terms are ordered. A request of a newer term ends all older leases: every rank of an older world has ended, and what
    was consumed after the loaded position is consumed again.
    """

    generation: int = Field(ge=0)
    rewinds: int = Field(default=0, ge=0)
    """The number of positions that the ranks have loaded in this generation. Each rank loads the same ones."""

    @property
    def order(self) -> tuple[int, int]:
        return self.generation, self.rewinds


class FailedShard(Message):
    """A shard that a rank could not process."""

    span: Span
    error: ShortText = ""
    number: int = Field(default=0, ge=0)
    """Counts the rank's failures in this term, so that one which is reported again is one try; 0 from a library that
    does not count them."""


class ShardRequest(Message):
    """What one rank has done since its last request, what it holds, and what it needs.

    A request can be repeated: it says what the rank holds, so a grant that was lost on its way is given again.
    """

    rank: int = Field(ge=0, lt=2**31)
    """The global rank."""
    world_size: int = Field(default=1, ge=1, lt=2**31)
    """Ranks that read the dataset. Near its end each is granted no more than its share of what is left."""
    holds: SomeSpans = ()
    """Positions that were granted and are neither done nor failed."""
    done: SomeSpans = ()
    failed: tuple[FailedShard, ...] = Field(default=(), max_length=MOST_SPANS)
    shards: int = Field(default=0, ge=0, le=MOST_SHARDS)
    """Further shards that the rank needs now."""
    position: Position | None = None
    """The position that the rank has loaded, in the first request of a term that begins with one."""
    grown: tuple[Annotated[int, Field(ge=0, le=PARTITION_SIZE)], ...] = Field(default=(), max_length=MOST_PARTITIONS)
    """For a stream: the end of each partition, as far as this rank knows; `PARTITION_SIZE` for one without an end."""
    complete: bool = False
    """For a stream: its partitions will not grow any more."""
    needs_base: bool = False
    """Whether the answer must hold the position at which the term began."""
    continues: bool = False
    """The rank's process was started in an older generation, as its agent knows: it has what it was granted there."""


class ShardAnswer(Message):
    """The answer to one rank."""

    granted: Spans = ()
    """Leases that the rank does not hold yet."""
    drained: bool = False
    """No further shard can be leased now: all are leased, done or set aside."""
    base: Position | None = None
    refused: ShortText = ""
    """Why the rank gets nothing, for its user."""
    superseded: bool = False
    """A newer term has begun: of a newer world, or another rank has loaded a position."""
    not_taken: bool = False
    """The position that the rank has loaded moves nothing: others have gone on from there."""


class DatasetRequest(RoutedMessage, route=Route(Destination.DATASET, "exchange")):
    """Argument of the update `exchange`: the requests of several ranks of one node."""

    parameters: DatasetParameters
    term: Term
    ranks: tuple[ShardRequest, ...] = Field(max_length=256)
    keeps_processes: bool = False
    """Processes of older generations continue in the term's."""


class DatasetAnswer(Message):
    """Result of the update `exchange`: an answer to each request, in their order."""

    ranks: tuple[ShardAnswer, ...]


class DatasetNeeded(AgentMessage, route=Route(Destination.GROUP, "dataset_needed")):
    """A rank uses a dataset whose workflow is not known to the server. The group starts it."""

    name: str = Field(pattern=DATASET_NAME)
    parameters: DatasetParameters


class SetAside(Message):
    """Samples that no rank will process, because each try failed."""

    epoch: int
    first: int
    """The first sample's position in the epoch."""
    end: int
    error: ShortText = ""
    partition: str = ""
    """The partition of a stream; `first` and `end` are then offsets."""

    @property
    def summary(self) -> str:
        """What it is and why, for users."""
        error = f" ({shorten(self.error, _LONGEST_REASON)})" if self.error else ""
        where = f"partition {self.partition}" if self.partition else f"epoch {self.epoch}"
        return f"{where}, {self.first:,} to {self.end - 1:,}{error}"


class UnprocessedSamples(Message):
    """What no rank of a job will process of one dataset."""

    dataset: str
    samples: int
    shards: tuple[SetAside, ...] = ()
    """The first of them."""

    @property
    def summary(self) -> str:
        """A sentence for users."""
        named = "; ".join(one.summary for one in self.shards)
        rest = self.samples - sum(one.end - one.first for one in self.shards)
        more = f"; and {count(rest, 'more sample')}" if rest > 0 else ""
        samples, were = count(self.samples, "sample"), do(self.samples, "were")
        return f"{samples} of dataset {self.dataset} {were} set aside, as each try failed: {named}{more}"


class UnreadableDataset(Message):
    """A dataset of which each try of a shard has failed for a while: what it is stored on may be away."""

    dataset: str
    since: datetime
    """The first of these failures."""
    error: ShortText = ""
    """The newest one."""

    @property
    def summary(self) -> str:
        """A sentence for users."""
        error = f" ({shorten(self.error, _LONGEST_REASON)})" if self.error else ""
        since = f"{self.since:%H:%M:%S} UTC"
        return f"nothing of dataset {self.dataset} could be read since {since}{error}: its ranks wait and try again"


class ShardsSetAside(Message):
    """A dataset has set shards aside, or it cannot be read, or can again. Signal `shards_set_aside` to its job, with
    all that was set aside so far."""

    uid: str
    unprocessed: UnprocessedSamples
    unreadable: UnreadableDataset | None = None


class PartitionView(Message):
    """One partition of a stream."""

    name: str
    next: int
    """The first offset that is not done."""
    end: int | None
    """The end that ranks have reported; None for one without an end."""


class DatasetView(Message):
    """What is known of a dataset: its query `progress`, and the workflow's result."""

    done: int = 0
    """Samples that are done, in all epochs."""
    leased: int = 0
    total: int | None = None
    """All samples, in all epochs; None where no end is known."""
    partitions: tuple[PartitionView, ...] = ()
    """The partitions of a stream."""
    set_aside_samples: int = 0
    set_aside: tuple[SetAside, ...] = ()
    """The first of them, with their errors."""
    state_bytes: int = 0
    """The size of the workflow's state."""
