"""Tests that each command of Temporal's own tools that docs/operations.md describes is run by a test.

`test_docs_commands.py` does the same for the commands of `perdure`, of all pages.
"""

from __future__ import annotations

import ast

from tests.docs.pages import ROOT
from tests.support.source import parse

_TOOLS = "tests/system/test_temporal_tools.py"
_OPERATORS = "tests/workflows/test_operators.py"
_GROUPS = "tests/workflows/test_group_resets.py"
_COMPANIONS = "tests/workflows/test_companion_resets.py"
_PAUSES = "tests/client/test_pauses.py"
_SCHEDULES = "tests/workflows/test_schedules.py"

RUN_BY: dict[str, tuple[str, ...]] = {
    "`cancel`": (f"{_OPERATORS}::test_a_batch_that_ends_jobs_ends_their_groups_and_nodes",),
    "`terminate`": (f"{_TOOLS}::test_a_terminated_job_leaves_nothing_and_its_name_is_free",),
    "`reset` of a running job": (f"{_TOOLS}::test_a_reset_job_adopts_its_nodes_and_trains_on",),
    "`reset` of a node group": (
        f"{_GROUPS}::test_a_job_trains_on_when_its_group_is_reset_to_its_first_task",
        f"{_GROUPS}::test_a_group_that_is_reset_to_a_task_before_a_node_was_replaced_has_the_new_node",
    ),
    "`reset` of a dataset or a store": (
        f"{_COMPANIONS}::test_a_dataset_that_is_reset_has_every_sample_read_once",
        f"{_COMPANIONS}::test_a_store_that_is_reset_keeps_its_keys",
    ),
    "`reset` of a `ScheduledJob`": (f"{_COMPANIONS}::test_a_job_trains_on_when_the_workflow_of_its_schedule_is_reset",),
    "`reset` of a job that has ended": (f"{_TOOLS}::test_a_job_that_failed_is_reset_once_its_script_is_mended",),
    "`cancel`, `terminate` or `delete` of a node group, a dataset or a store alone": (
        f"{_OPERATORS}::test_a_group_a_store_and_a_dataset_that_are_cancelled_alone_or_signaled_in_a_batch_go_on",
        f"{_OPERATORS}::test_a_deleted_group_is_started_again_and_keeps_its_nodes",
        f"{_OPERATORS}::test_a_store_and_a_dataset_that_are_gone_begin_again_when_they_are_needed",
    ),
    "`delete` of a job": (f"{_OPERATORS}::test_nodes_of_a_deleted_job_are_wound_down",),
    "`activity reset`": (
        f"{_OPERATORS}::test_a_watch_that_is_reset_is_begun_again",
        f"{_OPERATORS}::test_a_lease_that_is_reset_is_held_again",
    ),
    "`schedule create --type ScheduledJob`": (
        f"{_SCHEDULES}::test_a_schedule_that_starts_a_job_twice_leaves_the_running_one_alone",
    ),
    "`list --query \"JobPhase = 'RUNNING'\"`": (
        f"{_TOOLS}::test_jobs_are_listed_by_their_phase_and_each_of_them_is_suspended",
    ),
    '`update execute --name suspend --input \'{"reason": "maintenance"}\'`': (
        f"{_TOOLS}::test_jobs_are_listed_by_their_phase_and_each_of_them_is_suspended",
    ),
    "a batch (`--query`)": (
        f"{_OPERATORS}::test_a_group_a_store_and_a_dataset_that_are_cancelled_alone_or_signaled_in_a_batch_go_on",
        f"{_OPERATORS}::test_a_batch_that_ends_jobs_ends_their_groups_and_nodes",
    ),
    "`pause` of a workflow": (
        f"{_PAUSES}::test_a_paused_job_keeps_its_nodes_and_continues_once_it_is_unpaused",
        f"{_PAUSES}::test_a_paused_job_is_named_by_all_commands_and_hides_no_other",
        f"{_PAUSES}::test_a_paused_group_keeps_its_nodes_and_is_named",
    ),
    "`activity pause`": (
        f"{_PAUSES}::test_a_paused_lease_is_named_with_its_node_and_held_again_once_it_is_unpaused",
        f"{_OPERATORS}::test_a_watch_that_is_paused_is_named_and_sees_what_was_lost_once_it_is_unpaused",
    ),
    "`start --input-file`": (
        f"{_TOOLS}::test_plain_json_is_enough",
        f"{_TOOLS}::test_a_wrong_field_fails_once_with_the_text",
    ),
}
"""By the first column of the table, the tests that run it against a real server."""


def described() -> list[str]:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    section = page.split("\n## Temporal's own tools\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    return [row for row in rows if row != "what happens"]


def test_each_command_that_the_page_describes_has_tests_that_run_it():
    assert described() == list(RUN_BY)


def test_these_tests_exist():
    missing: list[str] = []
    for test in sorted({test for tests in RUN_BY.values() for test in tests}):
        file, _, name = test.partition("::")
        body = parse(ROOT / file).body
        if name not in {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(test)
    assert missing == []
