"""Compares what a job says and does about one fault with what must come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel

from perdure.contract import FailureClass, IncidentView, JobStatus, Observation, Straggler

EARLY = 1.0
"""Seconds by which an incident may begin before the fault was noted: the ranks note it just before it happens."""

REGAINED = 98.0
"""Percent of its steps a second that a job has again, at least, once a slow rank is replaced."""

AGENTS = "agents"
"""What is shown where an agent was started again: a process on the machine, since no job is told of it."""
LINKS = "links"
"""What is shown where the network of a machine is slow and nothing else is wrong: what `perdure check --full` finds."""
SHOWN_ONCE = (AGENTS, LINKS)
"""What is looked for outside of the job's status until it was seen once."""


@dataclass(frozen=True)
class Expected:
    """What must come out of a fault."""

    failure: str
    """The name of the failure class; empty where nothing may be interrupted."""
    culprits: frozenset[int]
    """The nodes (slots) where it began."""
    actions: frozenset[str] = frozenset()
    """The kinds of the actions of the last incident."""
    within: float = 1.0
    """Seconds from the fault until the job must know of it."""
    interruptions: int = 1
    """How often the job is interrupted: a fault that comes again is repaired, and stops the job in the end."""
    before: str = ""
    """Of two faults at once: the class of the incident before, where the job hears of one first. It may tell of both as
    one interruption, too."""
    stops: bool = False
    """The job stops because of it, and does not train again."""
    hang: str = ""
    """The name of the kind of the hang."""
    shown: str = ""
    """Where nothing may be interrupted: the field of the job's status, and of the observation that follows, that names
    the culprits."""

    @property
    def missing(self) -> str:
        """The failure class or observation that this release does not have, and so cannot find; empty where it has."""
        if self.failure:
            return "" if self.failure in FailureClass.__members__ else self.failure
        known = {*SHOWN_ONCE, *JobStatus.model_fields, *Observation.model_fields}
        return "" if self.shown in known else self.shown


class Throughput(BaseModel):
    """Steps a second of a job that replaces a slow rank."""

    before: float
    during: float
    """Between the fault and the moment in which the job acts on it."""
    after: float
    """Once all ranks step again."""

    @property
    def after_pct(self) -> float:
        return round(100 * self.after / self.before, 1) if self.before else 0.0


def steps_per_second(times: Sequence[float], since: float, until: float) -> float:
    """The pace of a rank whose steps ended at these times, between two times; 0 where it made no two steps."""
    within = [time for time in times if since <= time <= until]
    return round((len(within) - 1) / (within[-1] - within[0]), 3) if len(within) > 1 else 0.0


class Outcome(BaseModel):
    """One line of the matrix."""

    name: str
    backend: str
    not_built: str = ""
    """What is missing to find such a fault, or to make it here; it was not injected."""
    problem: str = ""
    """Why the fault could not be tried, or what came instead of what was expected."""
    detected_s: float | None = None
    """Seconds from the fault until the job knew of it; None where it never did."""
    decided_s: float | None = None
    """Seconds from the fault until it had decided what to do."""
    within_s: float = 0.0
    """The goal for the detection."""
    class_ok: bool | None = None
    culprit_ok: bool | None = None
    action_ok: bool | None = None
    steps_lost: int | None = None
    """Steps that were made again; None where that is not known."""
    throughput: Throughput | None = None
    """Only of the row that measures it."""

    @property
    def passed(self) -> bool:
        in_time = self.detected_s is not None and self.detected_s <= self.within_s
        as_fast = self.throughput is None or self.throughput.after_pct >= REGAINED
        return in_time and as_fast and bool(self.class_ok and self.culprit_ok and self.action_ok)

    @property
    def summary(self) -> str:
        if self.not_built:
            return f"not built: {self.not_built}"
        pace = f"; {self.throughput.after_pct} % of the steps a second that it had before" if self.throughput else ""
        return ("passed" if self.passed else self.problem or f"detected after {self.detected_s} s") + pace


@dataclass(frozen=True)
class Story:
    """What was seen after a fault."""

    fault_at: float
    """When the fault happened, in seconds since the epoch."""
    incidents: Sequence[IncidentView]
    trains: bool
    """All ranks have stepped since the last repair, or throughout where there was none."""
    steps_lost: int | None = None
    shown_at: float | None = None
    """When the job's status first showed what becomes an observation only once it is over."""
    shown: frozenset[int] = frozenset()
    """The nodes (slots) that it showed."""

    @property
    def interruptions(self) -> list[IncidentView]:
        return [one for one in self._since if one.observation is None]

    @property
    def observations(self) -> list[IncidentView]:
        return [one for one in self._since if one.observation is not None]

    @property
    def _since(self) -> list[IncidentView]:
        return [one for one in self.incidents if one.noticed_at.timestamp() >= self.fault_at - EARLY]


def judge(expected: Expected, story: Story, *, name: str, backend: str) -> Outcome:
    """Returns the fault's line of the matrix."""
    outcome = Outcome(name=name, backend=backend, within_s=expected.within, steps_lost=story.steps_lost)
    return _judge_observation(outcome, expected, story) if expected.shown else _judge_repair(outcome, expected, story)


def _judge_repair(outcome: Outcome, expected: Expected, story: Story) -> Outcome:
    told = story.interruptions
    if not told:
        wrong = {"class_ok": False, "culprit_ok": False, "action_ok": False}
        return outcome.model_copy(update={"problem": "no incident", **wrong})
    first, last = told[0], told[-1]
    apart = bool(expected.before) and [_class_of(incident, kind=False) for incident in told[:-1]] == [expected.before]
    ends = last.stopped if expected.stops else story.trains and not last.stopped
    compared = {
        "class": (
            _class_of(last if apart else first, kind=bool(expected.hang)),
            f"{expected.failure} {expected.hang}".strip(),
        ),
        "culprit": (
            sorted(_culprits_of(first) | (_culprits_of(last) if apart else set())),
            sorted(expected.culprits),
        ),
        "action": (
            (sorted(action.kind for action in last.actions), len(told) - apart, ends),
            (sorted(expected.actions), expected.interruptions, True),
        ),
    }
    return outcome.model_copy(
        update={
            "detected_s": _since(story, first.noticed_at),
            "decided_s": None if first.decided_at is None else _since(story, first.decided_at),
            "problem": "; ".join(
                f"{what} {found}, not {due}" for what, (found, due) in compared.items() if found != due
            ),
            **{f"{what}_ok": found == due for what, (found, due) in compared.items()},
        }
    )


def _judge_observation(outcome: Outcome, expected: Expected, story: Story) -> Outcome:
    """Judges a fault that must interrupt nothing: the job's status shows it, and an observation if it lasts."""
    seen = [one for one in story.observations if getattr(one.observation, expected.shown, None)]
    named = {node for one in seen for node in _nodes_of(one, expected.shown)} | story.shown
    times = [one.noticed_at.timestamp() for one in seen] + ([] if story.shown_at is None else [story.shown_at])
    wrong = [f"interrupted: {one.title}" for one in story.interruptions]
    if named != expected.culprits:
        wrong.append(f"culprit {sorted(named)}, not {sorted(expected.culprits)}")
    if not story.trains:
        wrong.append("it does not train")
    return outcome.model_copy(
        update={
            "detected_s": round(min(times) - story.fault_at, 3) if times else None,
            "problem": "; ".join(wrong),
            "class_ok": bool(times),
            "culprit_ok": named == expected.culprits,
            "action_ok": story.trains and not story.interruptions,
        }
    )


def _since(story: Story, time: datetime) -> float:
    return round(time.timestamp() - story.fault_at, 3)


def _class_of(incident: IncidentView, *, kind: bool) -> str:
    """The name of the failure class, and of the kind of a hang."""
    names = ["" if incident.failure is None else incident.failure.name]
    hang = getattr(incident, "hang", None)
    if kind and hang is not None:
        names.append(hang.kind.name)
    return " ".join(names)


def _culprits_of(incident: IncidentView) -> set[int]:
    return {node for node in (incident.culprit, *incident.also_failed) if node is not None}


def _nodes_of(incident: IncidentView, shown: str) -> Sequence[int]:
    nodes = getattr(incident.observation, shown)
    if isinstance(nodes, tuple):
        return [one.node if isinstance(one, Straggler) else one for one in nodes]
    return [sign.rank for sign in incident.evidence if sign.rank is not None]


class CleanRun(BaseModel):
    """A training without any fault."""

    profile: str
    alarms: tuple[str, ...] = ()
    """The titles of its incidents and observations: each of them is false."""
    repairs: int = 0
    """The number of times that it was interrupted."""
    problem: str = ""
    """Why it could not be run."""


def judge_clean(profile: str, incidents: Sequence[IncidentView]) -> CleanRun:
    """Returns what a job without faults was said to have."""
    return CleanRun(
        profile=profile,
        alarms=tuple(one.title for one in incidents),
        repairs=sum(one.observation is None for one in incidents),
    )
