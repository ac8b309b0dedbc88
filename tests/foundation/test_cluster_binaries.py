"""Tests of building the cluster's programs with Go, with a message for each. The toolchain is a fake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cluster import binaries

GO = """#!/bin/sh
case "$1" in
get) ;;
build) while [ "$1" != -o ]; do shift; done; echo made > "$2"; chmod +x "$2" ;;
*) exit 1 ;;
esac
"""


def test_each_program_of_a_build_is_named_and_the_time_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    monkeypatch.setattr(binaries, "CACHE", tmp_path / "cache")
    source = binaries.Source(
        name="pair",
        module="example.org/pair",
        version="1.2.3",
        packages={"first-of-pair": "cmd/first", "second-of-pair": "cmd/second"},
        takes="1 to 2 minutes",
    )
    told: list[str] = []
    made = binaries.ensure(told.append, (source,))
    assert [path.read_text() for path in made.values()] == ["made\n", "made\n"]
    assert told[:3] == [
        "Building first-of-pair, second-of-pair 1.2.3 with Go (once; on 2 cores 1 to 2 minutes) ...",
        "  1 of 2: first-of-pair",
        "  2 of 2: second-of-pair",
    ]
    assert re.fullmatch(r"  done in \d+ s: .+", told[-1])
    assert binaries.ensure(told.append, (source,)) == made
    assert len(told) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the cluster runs on Linux")
def test_kubectl_comes_from_its_wheel_with_the_clusters_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binaries, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    told: list[str] = []
    kubectl = binaries.ensure(told.append, (binaries.KUBECTL_SOURCE,))["kubectl"]
    assert told == []
    answer = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, check=True).stdout
    assert f"v{binaries.KUBECTL_SOURCE.minor}." in answer
