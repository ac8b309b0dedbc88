"""Checkpoints: where they are, how often they are made, and which are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from .base import Integer, Matching, Section, Template
from .durations import Duration, format_duration, parse_duration


def _read_interval(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        if value != "auto" and value < 1:
            raise ValueError("expected a number of steps of at least 1, a duration such as 10m, or auto")
        return value
    try:
        duration = parse_duration(value) if not isinstance(value, float) else None
    except ValueError:
        duration = None
    if not duration:
        raise ValueError("expected a number of steps, a duration such as 10m, or auto")
    return duration


def _write_interval(value: Any) -> Any:
    return format_duration(value) if isinstance(value, timedelta) else value


CheckpointInterval = Annotated[
    timedelta | int | Literal["auto"],
    BeforeValidator(_read_interval),
    PlainSerializer(_write_interval),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^(auto|(\d+(\.\d+)?(ms|s|m|h|d) *)+)$"},
                {"type": "integer", "minimum": 1, "description": "steps"},
            ],
            "examples": ["auto", 500, "10m"],
        }
    ),
]
"""`auto`, a number of steps, or a duration."""


def _is_absolute(text: str) -> str:
    if not text.startswith(("/", "~", "$")):
        raise ValueError("expected an absolute path, or one that begins with ~ or a variable such as $SCRATCH")
    return text


WatchedPath = Annotated[Template, AfterValidator(_is_absolute)]
"""The path of a folder on the node."""


class KeepBest(Section):
    """The best checkpoints by a metric that the script gives to `Checkpointer.save(…, metrics={…})`."""

    metric: Annotated[str, Matching(pattern=r"\S{1,64}", expected="the name of a metric of at most 64 characters")]
    """The metric's name, such as `val_loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""
    count: Integer = Field(default=1, ge=1)
    """The number of checkpoints that are kept for it."""


class Checkpoint(Section):
    """Checkpoints in storage, of scripts that use `perdure_training.checkpoint`, and copies of what other scripts save.
    `${job.name}` and `${job.namespace}` are filled in."""

    storage: Template | None = None
    """URL of a folder, as fsspec takes it (`s3://…`, `gs://…`, `file:///…`). The nodes' agents write to it; ranks need
    neither its credentials nor its libraries. A job that finds checkpoints there continues with the newest one, so
    different trainings need different folders. It may be left out where `watch` is set."""
    every: CheckpointInterval = "auto"
    """A number of steps, a duration such as `10m`, or `auto`: as often as costs least in the long run, by the time that
    a checkpoint takes and the failures so far, between 30 s and 1 h."""
    save_timeout: Duration = timedelta(minutes=1)
    """The longest time that a planned change (suspend, scale, replace a node) waits until a checkpoint is durable,
    which is made before it; 0: none is made. A node that is ended by a signal waits, too, for half of
    `limits.termination_grace_period` at most."""
    keep_last: Integer = Field(default=3, ge=1)
    """The number of the newest checkpoints that are kept."""
    keep_every: Integer | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this number are kept for good; unset: none."""
    keep_best: KeepBest | None = None
    """The best checkpoints by a metric are kept beside these; unset: none."""
    on_unusable: Literal["stop", "start_over"] = "stop"
    """The reaction where the storage has checkpoints and none of them can be loaded, since all are damaged: the job
    stops and names each with its damage, or the script starts over. Nothing of them is deleted in either case."""
    watch: WatchedPath | None = None
    """A folder on the node to which a script saves by itself that uses no `perdure_training.checkpoint`. What is
    complete in it is copied to the storage, or without a `storage` to the memory of another node, and a node that
    lacks it gets it back before its command starts. `~` and variables of the command's environment, as in
    `$SCRATCH/saves`, are filled in. Unset: none."""

    @property
    def copies_to_nodes(self) -> bool:
        """Whether nodes keep copies of what the scripts of other nodes save."""
        return self.watch is not None and self.storage is None

    @model_validator(mode="after")
    def _has_a_place(self) -> Checkpoint:
        if self.storage is None and self.watch is None:
            raise ValueError(
                "has neither storage nor watch; expected the URL of a folder as storage, or a path as watch"
            )
        return self
