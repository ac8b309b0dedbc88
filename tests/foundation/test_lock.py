"""Tests that the locks install the same bytes everywhere, from any package index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.cluster.images import dependencies

ROOT = Path(__file__).resolve().parents[2]
WHOLE, IMAGE = (
    (ROOT / path).read_text(encoding="utf-8") for path in ("requirements.lock", "deploy/images/requirements.lock")
)

both = pytest.mark.parametrize("lock", [WHOLE, IMAGE], ids=["whole", "image"])


def entries(lock: str) -> list[str]:
    return re.split(r"\n(?=\S)", lock)


def pins(lock: str) -> dict[str, str]:
    """Each package's version and hashes, by its name."""
    found = (
        re.match(r"([^=\[]+)(?:\[[^\]]*\])?(==.*?)(?:\n    #|$)", entry, flags=re.DOTALL) for entry in entries(lock)
    )
    return {match[1]: match[2] for match in found if match}


@both
@pytest.mark.parametrize("pattern", [r"://", r"--index-url", r"--extra-index-url", r"--find-links", r"file:", r" @ "])
def test_holds_no_download_address(lock: str, pattern: str):
    assert re.search(pattern, lock) is None


@both
def test_pins_and_hashes_every_package(lock: str):
    unpinned = [entry.splitlines()[0] for entry in entries(lock) if not re.match(r"\S+==\S+", entry)]
    unhashed = [entry.splitlines()[0] for entry in entries(lock) if "--hash=sha256:" not in entry]
    assert unpinned == []
    assert unhashed == []


@pytest.mark.parametrize(
    ("lock", "extras"), [(WHOLE, ("kubernetes", "otlp", "torch", "dev")), (IMAGE, ("kubernetes", "otlp"))]
)
def test_covers_what_pyproject_asks_for(lock: str, extras: tuple[str, ...]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    asked = [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]
    assert {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in asked} <= pins(lock).keys()


def test_the_image_gets_what_the_tests_have():
    assert pins(IMAGE).items() <= pins(WHOLE).items()


def test_the_image_of_the_tests_has_the_packages_of_the_one_that_users_build():
    locked = [Requirement(line.rstrip(" \\")) for line in IMAGE.splitlines() if re.match(r"\S+==", line)]
    installed_here = {
        (canonicalize_name(one.name), str(one.specifier))
        for one in locked
        if one.marker is None or one.marker.evaluate()
    }
    assert {(canonicalize_name(one.name), f"=={one.version}") for one in dependencies()} == installed_here
