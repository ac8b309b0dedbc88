"""What jobs are found by: the search attributes that a TrainingJob sets and a client asks for."""

from __future__ import annotations

from temporalio.common import SearchAttributeKey

JOB_PHASE = SearchAttributeKey.for_keyword("JobPhase")
JOB_BACKEND = SearchAttributeKey.for_keyword("JobBackend")
JOB_NAMESPACE = SearchAttributeKey.for_keyword("JobNamespace")
JOB_OWNER = SearchAttributeKey.for_keyword("JobOwner")
WORLD_SIZE = SearchAttributeKey.for_int("WorldSize")
JOB_RESTARTS = SearchAttributeKey.for_int("JobRestarts")
