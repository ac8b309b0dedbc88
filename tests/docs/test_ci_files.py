"""Tests that what `deploy/ci` gives to CI systems, and the examples of its use in docs/ci.md, are what these systems
read: by actionlint, and by the schemas that GitHub and GitLab publish for editors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from tests.docs.pages import ROOT, Page

ACTION = "deploy/ci/github"
TEMPLATE = "deploy/ci/gitlab/perdure.yml"
GUIDE = Page(ROOT / "docs/ci.md")


def example(words: str) -> str:
    """The example of the guide that has these words."""
    [text] = [block.text for block in GUIDE.blocks if block.language == "yaml" and words in block.text]
    return text


def problems_by_schema(schema: str, folder: Path, *contents: str) -> str:
    """What `check-jsonschema` says about files; empty where it finds nothing."""
    paths = [folder / f"{schema}-{number}.yml" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", *map(str, paths)])
    return done.output if done.exit_code else ""


def problems_by_actionlint(program: Path, workflow: str, folder: Path) -> str:
    """What actionlint says about a repository that has the action and this workflow; empty where it finds nothing."""
    workflows = folder / ".github/workflows"
    workflows.mkdir(parents=True)
    (workflows / "nightly.yml").write_text(workflow)
    shutil.copytree(ROOT / ACTION, folder / ACTION)
    # It looks for actions of the repository that the working directory is in.
    (folder / ".git").mkdir()
    done = subprocess.run([program, "-no-color"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done
    return done.stdout + done.stderr


def pipeline(template: str, use: str) -> str:
    """What GitLab makes of a file that includes the template: hidden jobs are left out, and their keys are those of the
    jobs that extend them."""
    hidden = yaml.safe_load(template)
    jobs: dict[str, Any] = yaml.safe_load(use)
    assert jobs.pop("include") == f"/{TEMPLATE}"
    for job in jobs.values():
        base = hidden[job.pop("extends")]
        job |= {key: value | job.get(key, {}) if key == "variables" else value for key, value in base.items()}
    return yaml.safe_dump(jobs)


def test_the_action_and_the_example_of_its_use_are_right(actionlint: Path, tmp_path: Path) -> None:
    workflow = example(f"uses: ./{ACTION}")
    assert problems_by_actionlint(actionlint, workflow, tmp_path) == ""
    assert problems_by_schema("github-workflows", tmp_path, workflow) == ""
    assert problems_by_schema("github-actions", tmp_path, (ROOT / ACTION / "action.yml").read_text()) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("file: jobs/", "fil: jobs/", 'input "fil" is not defined in action "Run a Perdure job"'),
        ('cron: "0 2 * * *"', 'cron: "0 2"', "invalid CRON"),
        ("runs-on:", "run-on:", '"run-on"'),
    ],
)
def test_a_mistake_in_a_workflow_is_found(actionlint: Path, tmp_path: Path, right: str, wrong: str, told: str) -> None:
    workflow = example(f"uses: ./{ACTION}")
    assert right in workflow
    assert told in problems_by_actionlint(actionlint, workflow.replace(right, wrong), tmp_path)


def test_the_template_and_the_example_of_its_use_are_right(tmp_path: Path) -> None:
    template = (ROOT / TEMPLATE).read_text()
    use = example(f"include: /{TEMPLATE}")
    assert problems_by_schema("gitlab-ci", tmp_path, template, use, pipeline(template, use)) == ""


@pytest.mark.parametrize(("right", "wrong"), [("when: always", "when: ever"), ("script:", "scripts:")])
def test_a_mistake_in_the_template_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    template = (ROOT / TEMPLATE).read_text()
    assert right in template
    content = pipeline(template.replace(right, wrong), example(f"include: /{TEMPLATE}"))
    assert "nightly" in problems_by_schema("gitlab-ci", tmp_path, content)


def test_the_forms_for_issues_are_right(tmp_path: Path) -> None:
    forms = [path.read_text() for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert forms
    assert problems_by_schema("github-issue-forms", tmp_path, *forms) == ""
