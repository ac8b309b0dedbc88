"""Which release's behavior a run follows, so that a newer worker can take over a run that an older one began.

A run whose history an older release wrote must be replayed to the same commands: the same activities, timers, children
and signals in the same order. So a change that alters commands for events that such a history may hold is guarded by
`Behavior`, and takes effect in the next run: a job continues as new at its first quiet moment under a newer worker.

Rules:
    - One member per release that changes commands. Changes within a release share its member.
    - `perdure.workflows.patching` reads it from the run's history, once, when the run begins.
    - A member is removed when no job that began under it can be open: two minor releases later, said in the notes of
      that release.
"""

from __future__ import annotations

from enum import IntEnum


class Behavior(IntEnum):
    """The commands that a run makes for the same events, named after the release that introduced them."""

    RELEASE_0_3 = 3
    RELEASE_0_4 = 4

    @classmethod
    def _missing_(cls, value: object) -> Behavior | None:
        """Reads a newer release's behavior as the newest known one: a carried state gets its behavior anew when a run
        begins."""
        return max(cls) if isinstance(value, int) and value > max(cls) else None


OLDEST = min(Behavior)
CURRENT = max(Behavior)
