"""Tests of what the on-call day takes from the output of `kubectl describe` and from incidents."""

from __future__ import annotations

from benchmarks.oncall.events import EVENTS
from benchmarks.oncall.scene import newest_warning

DESCRIBED = """\
Name:         oncall
Status:
  Warning  Sign  is no event
Events:
  Type     Reason            Age                From               Message
  ----     ------            ----               ----               -------
  Warning  FailedScheduling  40s                default-scheduler  0/2 nodes are available: no machine  fits
  Normal   Scheduled         30s                default-scheduler  Successfully assigned nlp/oncall to real-0
  Warning  Evicted           12s (x3 over 40s)  kubelet            The node was low on resource: ephemeral-storage.
  Normal   Killing           12s                kubelet            Stopping container training
"""


def test_the_newest_warning_is_the_last_in_the_list_of_events() -> None:
    assert newest_warning(DESCRIBED) == "Evicted: The node was low on resource: ephemeral-storage."
    assert newest_warning(DESCRIBED.partition("  Warning  Evicted")[0]) == (
        "FailedScheduling: 0/2 nodes are available: no machine  fits"
    )
    assert newest_warning(DESCRIBED.partition("Events:")[0]) == ""


def test_names_of_events_are_unambiguous() -> None:
    assert len({event.name for event in EVENTS}) == len(EVENTS)
