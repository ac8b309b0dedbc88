"""Tests that no process that users share matches with a user's pattern: one pattern could stop it for everybody."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.spec.rules import Match

ROOT = Path(__file__).parents[2]

SHARED = (
    *("perdure/base", "perdure/client", "perdure/contract", "perdure/gateway", "perdure/operator", "perdure/page"),
    *("perdure/spec", "workflows", "activities"),
)
"""The code of workers, operators, gateways and pages. Agents serve one job each, and commands their user."""

OWN_PATTERNS = {
    "perdure/contract/checkpoints.py": "names of folders, from constants",
    "perdure/gateway/calls.py": "names of datasets, a constant",
    "perdure/spec/base.py": "each field's own constant pattern",
    "perdure/spec/durations.py": "from constants",
    "perdure/spec/importers/foreign.py": "kinds of jobs, constants",
    "perdure/spec/load.py": "YAML's numbers, from constants",
    "activities/nodes/kubernetes/settings.py": "names of variables, from constants",
    "activities/nodes/kubernetes/site_policy.py": "the administrator's globs",
    "activities/nodes/local/folders.py": "a role's name, escaped, and the job's uid",
    "activities/nodes/ray/bridge.py": "names of nodes, escaped where they are made",
    "activities/nodes/ray/places.py": "names of nodes, escaped where they are made",
    "activities/nodes/ray/watch.py": "names of nodes, escaped where they are made",
    "activities/notifications.py": "names of namespaces, a constant",
}
"""Files that match with a pattern that is no literal, and where the pattern comes from."""

MATCHING = {"compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub"}

HOSTILE = {
    "exponential search": "(a?|b?){60}(?=x)",
    "long compilation": "(?i)" + r"[\x00-\U0010ffff]" * 10,
    "nested counts": "(((a?){60000}){60000})(?=b)",
    "deep nesting": "(" * 95 + ")" * 95 + "(?=b)",
}


def computed_patterns(source: str) -> Iterator[int]:
    """Yields the lines on which something is matched with a pattern that is no literal."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id="fnmatch" | "fnmatchcase") | ast.Attribute(value=ast.Name(id="fnmatch")):
                yield call.lineno
            case ast.Attribute(value=ast.Name(id="re"), attr=name) if name in MATCHING:
                if not isinstance(call.args[0], ast.Constant):
                    yield call.lineno
            case _:
                pass


def test_shared_processes_match_only_with_patterns_of_ours():
    files = [file for folder in SHARED for file in sorted((ROOT / folder).rglob("*.py"))]
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    may_match = {file: source for file, source in sources.items() if re.search(r"\bre\.|fnmatch", source)}
    found = {file for file, source in may_match.items() if any(computed_patterns(source))}
    assert found - OWN_PATTERNS.keys() == set(), "say where its pattern comes from; a user's may run in agents only"
    assert OWN_PATTERNS.keys() - found == set(), "no longer needed"


def test_a_computed_pattern_is_found():
    assert list(computed_patterns("re.search('a', text)\nre.search(pattern, text)\nfnmatchcase(name, glob)")) == [2, 3]


def test_a_hostile_pattern_costs_its_reader_nothing():
    """Beyond its imports the reader has two seconds of processor time, of which it needs milliseconds."""
    program = (
        "import resource, sys; from perdure.spec.rules import Match; "
        "used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime); "
        "resource.setrlimit(resource.RLIMIT_CPU, (used + 2, used + 3)); "
        "[Match(log=pattern) for pattern in sys.argv[1:]]"
    )
    subprocess.run([sys.executable, "-P", "-c", program, *HOSTILE.values()], check=True)


@pytest.mark.parametrize("pattern", ["a*", "(x|)", ".*", "(?:)", "a{0}"])
def test_a_pattern_that_fits_everything_is_refused(pattern: str):
    with pytest.raises(ValueError, match="does not fit an empty line"):
        Match(log=pattern)
