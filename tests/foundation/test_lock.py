"""The lock must install the same bytes everywhere, and from wherever the user's own index is."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
ENTRIES = re.split(r"\n(?=\S)", LOCK)


def locked_names() -> set[str]:
    return {entry.split("==")[0].split("[")[0] for entry in ENTRIES if "==" in entry.splitlines()[0]}


@pytest.mark.parametrize("pattern", [r"://", r"--index-url", r"--extra-index-url", r"--find-links", r"file:", r" @ "])
def test_holds_no_download_address(pattern: str):
    assert re.search(pattern, LOCK) is None


def test_pins_and_hashes_every_package():
    unpinned = [entry.splitlines()[0] for entry in ENTRIES if not re.match(r"\S+==\S+", entry)]
    unhashed = [entry.splitlines()[0] for entry in ENTRIES if "--hash=sha256:" not in entry]
    assert unpinned == []
    assert unhashed == []


def test_covers_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["local"], *extras["kubernetes"], *extras["torch"], *extras["dev"]]
    names = {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in asked}
    assert names <= locked_names()
