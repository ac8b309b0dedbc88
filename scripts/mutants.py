#!/usr/bin/env python3
"""Shows what tests notice: changes one expression of the source at a time, and counts the changes that fail a test.

    scripts/mutants.py                          forty mutants of the parts in `TARGETS`
    scripts/mutants.py --number 100 --seed 7    others
    scripts/mutants.py --tree ../old            the same mutants against the tests of another checkout, for comparison
    scripts/mutants.py --only repair --long     one part, with the long tests too

It works in a copy of the checkout. A mutant that the part's own tests let live is tried against all tests of the layer,
unless `--own` is given.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSOR_TIME = {"own": 120, "layer": 900}
"""Seconds for the tests of one mutant, however busy the machine is: one that does not end is noticed."""


@dataclass(frozen=True)
class Target:
    """A part of the source, its own tests, and those of its layer."""

    name: str
    source: str
    own: str
    layer: str


TARGETS = (
    Target("repair", "workflows/policy/repair", "tests/policy/repair", "tests/policy"),
    Target("world", "workflows/policy/world", "tests/policy/world", "tests/policy"),
    Target("checkpoints", "workflows/policy/checkpoints", "tests/policy/checkpoints", "tests/policy"),
    Target("spans", "workflows/policy/services/spans.py", "tests/policy/services/test_spans.py", "tests/policy"),
    Target("outbox", "agent/outbox.py", "tests/agent/test_agent_outbox.py", "tests/agent/test_agent_outbox.py"),
)

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_NOT_RUN = ("annotation", "returns", "decorator_list", "type_comment")
"""Parts of the syntax that say nothing of what happens."""


@dataclass(frozen=True)
class Mutant:
    """One change: the file, the line, what it says before and after, and the whole text."""

    file: Path
    line: int
    before: str
    after: str
    text: str


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """The changes of one node; each is given a copy of it."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield lambda one: _with(one, ops=[_COMPARISONS[type(operator)]()])
        case ast.BoolOp():
            yield lambda one: _with(one, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield lambda _: node.operand
        case ast.Constant(value=bool()):
            yield lambda one: _with(one, value=not node.value)
        case ast.Constant(value=int() as number):
            yield lambda one: _with(one, value=number + 1)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            yield lambda one: _with(one, op=_ARITHMETIC[type(node.op)]())
        case ast.If() | ast.IfExp():
            yield lambda one: _with(one, test=ast.UnaryOp(op=ast.Not(), operand=node.test))
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield lambda _: ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield lambda _: ast.Pass()
        case _:
            pass


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def places(tree: ast.AST, path: tuple[tuple[str, int | None], ...] = ()) -> Iterator[tuple[tuple, ast.AST]]:
    """All nodes that run, with the way to each."""
    for name, value in ast.iter_fields(tree):
        if name in _NOT_RUN or (isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST):
                yield (*path, (name, index)), child
                yield from places(child, (*path, (name, index)))


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    tree = ast.parse(file.read_text())
    for path, node in places(tree):
        for change in changes(node):
            mutated = copy.deepcopy(tree)
            parent: ast.AST = mutated
            for name, index in path[:-1]:
                parent = getattr(parent, name) if index is None else getattr(parent, name)[index]
            name, index = path[-1]
            new = change(copy.deepcopy(node))
            if index is None:
                setattr(parent, name, new)
            else:
                getattr(parent, name)[index] = new
            ast.fix_missing_locations(mutated)
            yield Mutant(file, getattr(node, "lineno", 0), _line(node), _line(new), ast.unparse(mutated))


def _line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]


def drawn(target: Target, number: int, seed: int) -> list[Mutant]:
    """Some mutants of a part: always the same ones of the same source."""
    source = ROOT / target.source
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    everything = [mutant for file in files for mutant in mutants_of(file)]
    random.Random(f"{target.name} {seed}").shuffle(everything)
    return everything[:number]


class Copy:
    """A checkout to break."""

    def __init__(self, tree: Path, folder: Path, options: list[str]) -> None:
        self._path = folder / "tree"
        shutil.copytree(tree, self._path, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".hypothesis"))
        self._options = options
        self._environment = os.environ | {
            "PYTHONPATH": str(self._path),
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        where = "import perdure.workflows.policy.decide as a, perdure.agent.outbox as b; print(a.__file__, b.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", where],
            cwd=self._path,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert found.count(str(self._path)) == 2, f"the tests would import {found}"

    def notices(self, tests: str, *without: str, seconds: int = PROCESSOR_TIME["own"]) -> bool:
        """Whether a test fails."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", tests]
        command += [*self._options, *(f"--ignore={one}" for one in without)]
        # The plugin that is left out would know these.
        command += ["-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"]
        # No test knows what it found with another mutant.
        shutil.rmtree(self._path / ".hypothesis", ignore_errors=True)
        with open(os.devnull, "w") as nowhere:
            code = subprocess.run(
                command,
                cwd=self._path,
                env=self._environment,
                stdout=nowhere,
                stderr=nowhere,
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)),
            ).returncode
        assert code in (0, 1, 2) or code < 0, f"pytest ended with {code}: {command}"
        return code != 0

    def tried(self, mutant: Mutant, target: Target, *, own: bool) -> str:
        """Who notices the mutant: the part's own tests, those of its layer, or nobody."""
        file = self._path / mutant.file.relative_to(ROOT)
        original, times = file.read_bytes(), file.stat()
        file.write_text(mutant.text)
        try:
            if self.notices(target.own):
                return "own"
            if own or target.layer == target.own:
                return ""
            return "layer" if self.notices(target.layer, target.own, seconds=PROCESSOR_TIME["layer"]) else ""
        finally:
            file.write_bytes(original)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> None:
    """Prints each mutant, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose tests run")
    parser.add_argument("--only", choices=[target.name for target in TARGETS], action="append")
    parser.add_argument("--own", action="store_true", help="leave out the other tests of the layer")
    parser.add_argument("--long", action="store_true", help="run long tests, too")
    parser.add_argument("--out", type=Path, help="a file for one line of JSON per mutant")
    options = parser.parse_args()
    targets = [target for target in TARGETS if options.only is None or target.name in options.only]
    counts: dict[str, Counter[str]] = {target.name: Counter() for target in targets}
    with tempfile.TemporaryDirectory(prefix="perdure-mutants-") as folder:
        tree = Copy(options.tree.resolve(), Path(folder), [] if options.long else ["--long=without"])
        for target in targets:
            assert not tree.notices(target.own), f"{target.own} fails without a mutant"
        each = [drawn(target, max(options.number // len(targets), 1), options.seed) for target in targets]
        for mutants in zip_longest(*each):
            for target, mutant in zip(targets, mutants, strict=True):
                if mutant is None:
                    continue
                by = tree.tried(mutant, target, own=options.own)
                counts[target.name][by] += 1
                where = f"{mutant.file.relative_to(ROOT)}:{mutant.line}"
                print(f"{by or 'NOBODY':8} {where}: {mutant.before} -> {mutant.after}", flush=True)
                if options.out:
                    said = {"by": by, "where": where, "change": [mutant.before, mutant.after]}
                    with options.out.open("a") as out:
                        out.write(json.dumps(said) + "\n")
    for name, count in counts.items():
        print(f"{name}: {count['own'] + count['layer']} of {count.total()} noticed, {count['own']} by its own tests")


if __name__ == "__main__":
    main()
