"""How long ranks wait at a step before a change that is planned: seconds.

`perdure_training.checkpoint.planned_hold` has them wait. The agent reads this, too: beyond it, ranks that make no step
do not wait by request.
"""

from __future__ import annotations

SAFE_WITHIN = 60.0
"""All ranks must have saved the step, and its copies must have arrived."""
REPORTED_WITHIN = 20.0
"""The agent must have taken rank 0's report of that."""
ENDED_WITHIN = 60.0
"""The ranks then wait to be ended."""
MARGIN = 15.0
"""The others wait longer than rank 0, which has them train on."""
LONGEST = SAFE_WITHIN + REPORTED_WITHIN + ENDED_WITHIN + MARGIN
"""A rank waits from its save on, and longer where the step is stored (`within` of the request)."""
