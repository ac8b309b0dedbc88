"""Tests that the release's number is the same wherever it is written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import perdure_launcher
from perdure.workflows.policy.behavior import CURRENT
from tests.support.allocation import REPOSITORY

VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def test_the_chart_the_launcher_and_the_training_library_are_of_the_same_release():
    chart = yaml.safe_load((REPOSITORY / "deploy/helm/perdure/Chart.yaml").read_text())
    library = tomllib.loads((REPOSITORY / "deploy/perdure-training/pyproject.toml").read_text())["project"]["version"]
    assert {chart["version"], chart["appVersion"], perdure_launcher.__version__, library} == {VERSION}


def test_images_are_named_after_the_release():
    places = [
        *REPOSITORY.glob("deploy/kustomize/**/*.yaml"),
        REPOSITORY / "deploy/images/Dockerfile",
        REPOSITORY / "docs/install-kubernetes.md",
    ]
    named = {(path, number) for path in places for number in image_versions(path)}
    assert {number for _, number in named} == {VERSION}, named


def image_versions(path: Path) -> list[str]:
    return re.findall(r"(?:perdure:|newTag: |kubernetes\.io/version: \")(\d+\.\d+\.\d+)", path.read_text())


def test_the_newest_behavior_is_of_this_release_or_the_next_one():
    release = tuple(int(part) for part in CURRENT.name.removeprefix("RELEASE_").split("_"))
    major, minor, _ = (int(part) for part in VERSION.split("."))
    assert release <= (major, minor + 1) or release == (major + 1, 0)
