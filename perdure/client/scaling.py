"""Changes how many nodes a running job has, and how it chooses their number."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from perdure.base.errors import PerdureError
from perdure.client.job_calls import JobCalls
from perdure.contract import Accepted, JobStatus, ScaleRequest
from perdure.spec.durations import parse_duration
from perdure.spec.scaling import FIELDS_OF, ScalingPolicy

_SHARING: Final = ("share", "priority")


class ScalingCalls(JobCalls):
    """A connection that changes how jobs are scaled."""

    async def scale(
        self,
        name: str,
        nodes: int | str = "",
        *,
        scaling: Mapping[str, Any] | None = None,
        namespace: str | None = None,
        role: str | None = None,
        reason: str = "",
        older: bool = False,
    ) -> Accepted:
        """Changes the number of nodes of the job, or of one role of several, or how it chooses that number.

        Args:
            name: The job's name.
            nodes: `4`, `"2:8"` for min and max, or `"auto"` for what the specification states; empty: as it is.
            scaling: The whole `scaling` of the role, as a specification has it: `{"policy": "deadline", "finish_by":
                "2026-12-01T08:00:00Z"}`. It replaces the present one, which is `JobStatus.goal`; None: as it is.
            namespace: The job's namespace.
            role: The role that is meant, for a job with several.
            reason: The reason that the job keeps.
            older: Whether it is done also where a world of that size cannot load the newest state: its ranks continue
                with an older one, or begin anew.

        Raises:
            Refused: if the job does not accept that.
        """
        request = _request(nodes, scaling, role, reason, older=older)
        return await self._update(name, namespace, "scale", request, Accepted)

    async def preview_scale(
        self,
        name: str,
        nodes: int | str = "",
        *,
        scaling: Mapping[str, Any] | None = None,
        namespace: str | None = None,
        role: str | None = None,
        older: bool = False,
    ) -> JobStatus:
        """Returns what the status would be right after `scale` with these arguments, and changes nothing: its `scaling`
        has what the job would choose.

        Raises:
            Refused: if the job would not accept that.
        """
        request = _request(nodes, scaling, role, "", older=older)
        return await self._query(name, namespace, "preview_scale", JobStatus, request)


def new_goal(present: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a whole `scaling` with some fields changed, and without those that another policy has no use for.

    Args:
        present: The present `scaling`.
        changes: The fields that are given. Without `policy`, a goal means the policy that it belongs to.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    implied = [policy for name, policy in FIELDS_OF.items() if name in given]
    otherwise = present.get("policy", ScalingPolicy.MAX)
    if otherwise == ScalingPolicy.MAX and "min_efficiency" in given:
        otherwise = ScalingPolicy.EFFICIENT
    policy = given.get("policy") or next(iter(implied), otherwise)
    foreign = {name for name, owner in FIELDS_OF.items() if owner != policy}
    # A budget is given in one unit.
    replaced = {name for name in FIELDS_OF if policy == ScalingPolicy.BUDGET and implied} | {"policy"}
    shares = () if policy == ScalingPolicy.MAX else _SHARING
    kept = {name: value for name, value in present.items() if name not in {*foreign, *replaced, *shares}}
    return {**kept, "policy": str(policy), **given}


def finish_time(given: str, field: str) -> str:
    """Reads a time with its zone, or a duration from now on, for `finish_by`.

    Args:
        given: What a user has given.
        field: What the user knows it as.

    Raises:
        PerdureError: if it is neither.
    """
    try:
        return (datetime.now(UTC).replace(microsecond=0) + parse_duration(given)).isoformat()
    except (ValueError, OverflowError):
        pass
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise PerdureError(
            f'{field}: got "{given}"; expected a time with its zone such as 2026-12-01T08:00:00Z, or a duration '
            "from now on such as 6h"
        )
    return time.isoformat()


def _request(
    nodes: int | str, scaling: Mapping[str, Any] | None, role: str | None, reason: str, *, older: bool
) -> ScaleRequest:
    given = None if scaling is None else dict(scaling)
    return ScaleRequest(nodes=str(nodes), role=role, reason=reason, scaling=given, older=older)
