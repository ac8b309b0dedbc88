"""Reads what users ask of a job."""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.spec.roles import NodeCount


def node_count(text: str, unit: int) -> NodeCount:
    """Reads `4` or `2:8`.

    Raises:
        ApplicationError: if it is neither, or does not fit the job's unit.
    """
    try:
        count = NodeCount.model_validate(text)
        return NodeCount(min=count.min, max=count.max, unit=unit)
    except ValueError as error:
        problem = str(error).splitlines()[-2 if "\n" in str(error) else 0].strip()
        raise ApplicationError(f'nodes: got "{text}"; {problem}; write 4, or 2:8 for min and max') from None
