"""Tests the files for people who join: the changelog, the hooks and the templates of GitHub."""

from __future__ import annotations

import re
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from perdure.cli.main import app
from tests.docs.pages import ROOT

GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))


def hooks() -> list[dict[str, Any]]:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"], "hooks download nothing"
    return repositories[0]["hooks"]


def checks() -> list[str]:
    """The commands of `make check`, for all files."""
    printed = subprocess.run(
        ["make", "--dry-run", "check", "--assume-old=setup"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in printed.stdout.splitlines() if line.startswith(".venv/")]


def test_the_hooks_are_the_parts_of_make_check() -> None:
    assert sorted(hook["entry"] for hook in hooks()) == sorted(check.removesuffix(" .") for check in checks())
    assert len(hooks()) == len(checks()) > 3


@pytest.mark.parametrize("hook", hooks(), ids=lambda hook: hook["id"])
def test_a_hook_starts_a_program_of_the_environment(hook: dict[str, Any]) -> None:
    assert hook["language"] == "system"
    takes_files = f"{hook['entry']} ." in checks()
    assert hook.get("pass_filenames", True) == takes_files, "a check of everything is given no names"
    program = hook["entry"].split()[0]
    done = subprocess.run([program, "--help"], cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0


def test_each_change_has_an_entry_where_a_reader_looks() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    releases: list[tuple[int, ...]] = []
    for heading in headings[1:]:
        match = re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (in preparation|\d{4}-\d\d-\d\d)", heading)
        assert match, heading
        releases.append(tuple(int(part) for part in match.groups()[:3]))
        if match[4] == "in preparation":
            assert len(releases) == 1, "only the newest release can be in preparation"
        else:
            date.fromisoformat(match[4])
    assert releases == sorted(set(releases), reverse=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tuple(int(part) for part in version.split(".")) <= releases[0]
    kinds = {heading.partition(":")[0] for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_only_what_exists(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    for command in re.findall(r"`perdure (--)?(\w+)", path.read_text()):
        assert command[0] or command[1] in root.commands
    if path.name == "config.yml":
        return
    assert form["name"]
    assert form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    identities = [part["id"] for part in asked]
    assert len(identities) == len(set(identities)) > 2
    assert all(part["attributes"]["label"] for part in asked)


def test_a_bug_is_reported_with_what_perdure_says_of_it() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    labels = " ".join(part["attributes"].get("label", "") for part in form["body"])
    assert "perdure doctor" in labels
    assert "perdure explain" in labels


@pytest.mark.parametrize("name", ["pull_request_template.md", "CODEOWNERS", "ISSUE_TEMPLATE/bug.yml"])
def test_what_a_template_of_github_names_exists(name: str) -> None:
    text = (GITHUB / name).read_text(encoding="utf-8")
    named = re.findall(r"\b[A-Z]+\.md\b", text) + re.findall(r"`(tests/\w+)`", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_owners_are_of_files_that_exist() -> None:
    lines = (GITHUB / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    owned = [line.split() for line in lines if line and not line.startswith("#")]
    assert owned[0] == ["*", "@perdure/maintainers"]
    for pattern, *owners in owned[1:]:
        assert (ROOT / pattern.strip("/")).exists(), pattern
        assert owners
