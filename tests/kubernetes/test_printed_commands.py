"""Tests of the kubectl and helm commands that the docs print, as far as they need no cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.commands import COMMANDS, Command
from tests.support.allocation import REPOSITORY

PLACEHOLDERS = {"…": "x", "$namespace": "nlp"}


def printed(program: str, *, containing: str = "") -> pytest.MarkDecorator:
    found = [one for one in COMMANDS if one.program == program and (not containing or containing in one.words)]
    return pytest.mark.parametrize("command", list(dict.fromkeys(found)), ids=str)


def run(folder: Path, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *(PLACEHOLDERS.get(word, word) for word in words)],
        cwd=REPOSITORY,
        env={**os.environ, "KUBECONFIG": os.devnull, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@printed("kubectl")
def test_kubectl_knows_the_command_and_its_options(command: Command, kubectl: Path, tmp_path: Path):
    done = run(tmp_path, kubectl, *command.words[1:], "--help")
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert re.search(rf"^ +kubectl {command.words[1]}\b", done.stdout, re.MULTILINE), f"{command}: no such command"


@printed("kubectl", containing="create")
def test_kubectl_makes_what_it_is_told(command: Command, kubectl: Path, tmp_path: Path):
    for name in ("client.pem", "client.key", "ca.pem", "keys.json"):
        (tmp_path / name).write_text("x")
    words = [re.sub(r"=([\w-]+\.(?:pem|key|json))$", rf"={tmp_path}/\1", word) for word in command.words[1:]]
    if words[1] == "token":  # Only a server makes one.
        done = run(tmp_path, kubectl, *words, "--server", "https://127.0.0.1:1", "--token", "t")
        assert "connection refused" in done.stderr, f"{command}: {done.stderr}"
        return
    done = run(tmp_path, kubectl, *words, "--dry-run=client", "--output", "name")
    assert done.returncode == 0, f"{command}: {done.stderr}"


@printed("helm")
def test_helm_knows_the_command_and_its_options(command: Command, helm: Path, tmp_path: Path):
    done = run(tmp_path, helm, *command.words[1:], "--help")
    assert done.returncode == 0, f"{command}: {done.stderr}"


@printed("helm", containing="deploy/helm/perdure")
def test_the_chart_takes_the_values(command: Command, helm: Path, tmp_path: Path):
    words = [word for word in command.words[2:] if word not in ("--wait", "--reset-then-reuse-values")]
    done = run(tmp_path, helm, "template", *words)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert "kind: Deployment" in done.stdout
