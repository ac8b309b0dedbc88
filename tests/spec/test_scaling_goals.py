"""Goals of `scaling`: each field belongs to a policy, and what makes no sense is named with its remedy."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.scaling import Scaling
from perdure.spec.validate import parse_spec


def scaling(**fields: Any) -> Scaling:
    role = {"nodes": "2:8", "command": ["torchrun", "train.py"], "scaling": fields}
    return parse_spec({"name": "job", "roles": {"worker": role}}).roles["worker"].scaling


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"policy": "deadline"},
            "policy is deadline, and finish_by is not given; set it, such as 2026-",
        ),
        ({"policy": "deadline", "finish_by": "2026-12-01T08:00:00"}, "expected a time with its zone such as"),
        (
            {"policy": "deadline", "finish_by": 1_790_000_000},
            "finish_by: got 1790000000; expected a time with",
        ),
        ({"policy": "deadline", "finish_by": "tomorrow"}, 'finish_by: got "tomorrow"; expected a time with its zone'),
        ({"policy": "budget"}, "policy is budget; give either max_cost, with price, or max_gpu_hours"),
        ({"policy": "budget", "max_cost": 9, "price": 1, "max_gpu_hours": 9}, "give either max_cost, with price, or"),
        ({"policy": "budget", "max_cost": 9}, "price is not; set price to that of a node for an hour"),
        ({"policy": "budget", "max_gpu_hours": float("inf")}, "max_gpu_hours: Input should be a finite number"),
        ({"policy": "budget", "max_gpu_hours": 0}, "max_gpu_hours: "),
        ({"finish_by": "2026-12-01T08:00:00Z"}, "policy is max, which has no use for it; set policy to deadline"),
        ({"policy": "efficient", "max_gpu_hours": 9}, "which has no use for it; set policy to budget"),
        ({"policy": "manual", "steps": 0}, "steps: got 0; expected an integer of at least 1"),
    ],
)
def test_a_goal_that_makes_no_sense_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=r"roles\.worker\.scaling") as refused:
        scaling(**fields)
    assert problem in str(refused.value)


def test_a_time_of_any_zone_is_a_deadline() -> None:
    for written in ("2026-12-01T08:00:00Z", "2026-12-01T09:00:00+01:00", datetime(2026, 12, 1, 8, tzinfo=UTC)):
        assert scaling(policy="deadline", finish_by=written).finish_by == datetime(2026, 12, 1, 8, tzinfo=UTC)
