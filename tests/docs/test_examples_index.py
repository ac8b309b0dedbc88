"""Tests that the index of the examples has every example, and that the tests that it names run it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.docs.pages import ROOT, Page

EXAMPLES = ROOT / "examples"


def numbered_files() -> list[Path]:
    """The files of the numbered examples, without those that a run of one leaves."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "examples"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split() if re.match(r"examples/\d", name)]
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_each_example_is_in_the_index_with_a_test_that_names_it() -> None:
    rows = re.findall(
        r"^\| \[([\w-]+)\]\((.+?)\) \| (.+) \| (.+) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name, *_ in rows} == folders
    for name, first, _, tests in rows:
        assert first.startswith(f"{name}/")
        sources = [(ROOT / test).read_text(encoding="utf-8") for test in re.findall(r"`(tests/[\w/]+\.py)`", tests)]
        assert sources
        for source in sources:
            # The README's test runs the commands that the README prints.
            assert name in source or "README.md" in source, f"{tests} does not name {name}"


def test_numbered_examples_have_no_gaps_and_are_all_shown() -> None:
    numbered = sorted(EXAMPLES.glob("[0-9]*"))
    assert [int(path.name[:2]) for path in numbered] == list(range(1, len(numbered) + 1))
    shown = {(EXAMPLES / link).resolve() for link in Page(EXAMPLES / "README.md").links}
    assert [str(path) for path in numbered_files() if path not in shown] == []


def test_an_example_begins_with_a_sentence_about_what_it_shows() -> None:
    for path in numbered_files():
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "".join(json.loads(text)["cells"][0]["source"])
        lines = [line for line in text.splitlines() if not line.startswith("#!")]
        assert re.match(r'("""|# )[A-Z].*[.:]', lines[0]), f"{path}: {lines[0]}"


def test_examples_that_other_tests_use_exist() -> None:
    named: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for parts in re.findall(r'(?:ROOT|REPOSITORY|parents\[\d\]) / "examples"((?: / "[^"]+")+)', source):
            named["/".join(re.findall(r'"([^"]+)"', parts))] = path.name
    assert len(named) > 3
    assert {name: path for name, path in named.items() if not (EXAMPLES / name).exists()} == {}
