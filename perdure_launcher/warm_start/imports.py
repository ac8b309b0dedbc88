"""Imports ahead what ranks will import, and finds what would come out otherwise in the rank itself.

A module may be imported before its rank exists only if it would have come out the same in the rank. So imports run with
the script's place on the path, as theirs would, and are watched: threads, open files and devices do not survive a fork,
a process would belong to no rank, a variable that the script sets, or that places the rank, has another value there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import re
import sys
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .environ_tracker import ALL, reading
from .fork_safety import Marks, holds_devices, list_children
from .generators import made_since_frozen, pythons_generators
from .learning import Learned, installed_roots
from .names import of_one_rank
from .plan import Plan
from .start_method import FORK, STANDBY, Way
from .traces import changes

_ALWAYS = ("torch", "torch._dynamo")
"""torch._dynamo is imported by the first optimizer, and costs as much again as torch."""

_READ_BY_LIBRARIES = re.compile(r"(?:OMP|KMP|GOMP|MKL|OPENBLAS|NUMEXPR|VECLIB|MALLOC|LD|GLIBC)_\w+")
"""Variables that native libraries read when they are loaded, which cannot be watched."""
_READ_BY_DRIVERS = re.compile(r"(?:CUDA|NVIDIA|HIP|ROCR|HSA|GPU)_\w+")
"""The same, of the drivers of GPUs, when they are woken."""
_HARMLESS_READERS = frozenset({"perdure_launcher", "networkx", "fsspec"})
"""Ours, whose variables ranks do not have; those that go through all variables for the ones with their own prefix."""
_LONGEST_SCRIPT = 1 << 20


class Unfit(Exception):
    """No rank can come from this interpreter; the message says why."""

    def __init__(self, reason: str, *, for_forks_only: bool = False) -> None:
        super().__init__(reason)
        self.for_forks_only = for_forks_only
        """A standby may do the same."""


class Refused(Exception):
    """A package cannot be imported ahead; the message says why."""

    def __init__(self, package: str, reason: str, *, by_forks_only: bool = False) -> None:
        super().__init__(reason)
        self.package = package
        self.by_forks_only = by_forks_only
        """A standby may import it."""


@dataclass
class Imports:
    """What was imported, and the variables that were read meanwhile."""

    plan: Plan
    way: Way = FORK
    """To the rank."""
    _always: set[str] = field(default_factory=set[str])
    """Variables read by what is always imported."""
    _learned: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Variables by the package that read them."""
    generators: list[random.Random] = field(default_factory=list[random.Random])
    """Those of what is always imported, which each fork seeds anew."""

    def always(self) -> None:
        """Imports what every rank of torch's needs.

        Raises:
            Unfit: if the result cannot be forked, or the script would have prepared the import in its own way.
        """
        known = set(sys.modules)
        with _as_in_the_rank(self.plan), reading(lambda _, name: self._always.add(name)):
            for name in _ALWAYS:
                importlib.import_module(name)
        if names := _from_script(self.plan, set(sys.modules) - known):
            raise Unfit(f"torch imports {', '.join(names)} from the script's own folder")
        if names := _set_before_torch(self.plan, self._always):
            raise Unfit(f"the script sets {', '.join(names)}, which is read when torch is imported")
        if self.way.same_process:
            return
        if threads := Marks.now().threads:
            raise Unfit(f"its imports started {threads} threads, which a fork would lose", for_forks_only=True)
        if _has_touched_devices():
            raise Unfit("its imports initialised CUDA, which cannot be used after a fork", for_forks_only=True)
        self.generators = pythons_generators()
        _freeze()

    def learned(self, learned: Learned, *, without: Collection[str], attend: Callable[[], None] | None = None) -> None:
        """Imports what ranks have imported, but for some packages.

        Args:
            learned: What that is.
            without: Packages to leave out.
            attend: Called before each import, by a process that has ranks to look after. One that has none can tell
                what an import leaves behind.

        Raises:
            Refused: if one of them cannot be imported ahead. This process is then of no use any more.
        """
        before = dict(os.environ)
        with _as_in_the_rank(self.plan), reading(self._note):
            leftovers = _Leftovers(self.way, learned, self.generators)
            for name in learned.modules:
                package = name.partition(".")[0]
                if name in sys.modules or package in without:
                    continue
                if attend is not None:
                    attend()
                known = set(sys.modules)
                try:
                    importlib.import_module(name)
                except Exception as error:
                    raise Refused(package, f"{name} cannot be imported by itself: {error!r}") from error
                if names := _from_script(self.plan, set(sys.modules) - known):
                    raise Refused(package, f"it imports {', '.join(names)} from the script's own folder")
                if attend is None:
                    leftovers.refuse(package)
                self._refuse_what_read_its_place(package, without)
        own = changes(before, dict(os.environ))
        set_by_script = {name for name, value in learned.changed.items() if own.get(name, ALL) != value}
        for package, names in self._learned.items():
            if package not in without and (read := names & set_by_script):
                raise Refused(package, f"it reads {', '.join(sorted(read))}, which the script sets")
        if self.way.same_process:
            return
        if _has_touched_devices():
            raise Refused("torch", "imports initialised CUDA")
        _freeze()

    def contradicted_by(self, changed: Iterable[str]) -> str:
        """Why ranks that set these variables themselves must not come from here; empty where they may."""
        read = self._always.union(*self._learned.values())
        names = sorted(
            name for name in changed if not of_one_rank(name) and (name in read or _READ_BY_LIBRARIES.fullmatch(name))
        )
        return f"the script sets {', '.join(names)}, which is read while modules are imported" if names else ""

    @property
    def read_of_place(self) -> frozenset[str]:
        """Variables that may differ between ranks, and that must not any more."""
        return self.way.places & self._always.union(*self._learned.values())

    def _refuse_what_read_its_place(self, package: str, without: Collection[str]) -> None:
        for reader, names in self._learned.items():
            if reader in _HARMLESS_READERS:
                continue
            places = {name for name in names if of_one_rank(name)} - self.way.places
            if ALL in names or places:
                what = "the whole environment" if ALL in names else ", ".join(sorted(places))
                # One that is left out may still be imported by another, which then is left out too.
                raise Refused(
                    package if reader in without else reader,
                    f"{reader} reads {what} when it is imported",
                    by_forks_only=ALL not in names and places <= STANDBY.places,
                )

    def _note(self, package: str, name: str) -> None:
        self._learned.setdefault(package, set()).add(name)


class _Leftovers:
    """Refuses packages for what their import has left behind."""

    def __init__(self, way: Way, learned: Learned, generators: Iterable[random.Random]) -> None:
        self._way = way
        self._generators = generators
        self._marks = None if way.same_process else Marks.now()
        self._children = list_children()
        self._set_for_drivers = sorted(name for name in learned.changed if _READ_BY_DRIVERS.fullmatch(name))

    def refuse(self, package: str) -> None:
        """Refuses the package that was imported last.

        Raises:
            Refused: if the rank would be without something that its own import leaves behind, or not its owner.
        """
        if self._marks is not None:
            if lost := Marks.now().beyond(self._marks):
                raise Refused(package, lost, by_forks_only=True)
            if made := made_since_frozen(without=self._generators):
                raise Refused(package, f"its import made generators ({', '.join(made)})", by_forks_only=True)
            # Looked at once: the next import is asked only for what it has made itself.
            gc.freeze()
        if list_children() != self._children:
            raise Refused(package, "its import left a process running")
        if self._set_for_drivers and self._way.same_process and holds_devices():
            raise Refused(package, f"its import wakes a GPU, and the script sets {', '.join(self._set_for_drivers)}")


def _has_touched_devices() -> bool:
    import torch

    return torch.cuda.is_initialized() or holds_devices()


def _freeze() -> None:
    """Has what is there now never collected: forks share its memory, and do not copy it at their first collection."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _as_in_the_rank(plan: Plan) -> Generator[None]:
    """Python's start continues after us: only then does it add the script's folder to the path, and name the script."""
    main = sys.modules["__main__"]
    folder = _script_folder(plan)
    if folder is not None:
        sys.path.insert(0, folder)
    script = plan.script
    if script is not None:
        main.__file__ = os.path.abspath(script)
    try:
        yield
    finally:
        if folder is not None:
            sys.path.remove(folder)
            sys.path_importer_cache.pop(folder, None)
        if script is not None:
            del main.__file__


def _script_folder(plan: Plan) -> str | None:
    """What Python will put first on the path."""
    if sys.flags.safe_path:
        return None
    if plan.script is None:
        return os.getcwd()
    return os.path.dirname(os.path.realpath(plan.script))


def _from_script(plan: Plan, names: Iterable[str]) -> list[str]:
    """Those of these modules that come from beside the script, and are the user's own."""
    folder = _script_folder(plan)
    if folder is None:
        return []
    roots = installed_roots()
    origins = {name: getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) for name in names}
    return sorted(
        name
        for name, origin in origins.items()
        if isinstance(origin, str) and origin.startswith(f"{folder}{os.sep}") and not origin.startswith(roots)
    )


def _set_before_torch(plan: Plan, read: Collection[str]) -> list[str]:
    """Variables that the script's text sets above its first import of torch, and that this import reads."""
    try:
        text = Path(plan.script or "").read_text(encoding="utf-8", errors="replace")[:_LONGEST_SCRIPT]
    except OSError:
        return []
    torch = re.search(r"^[ \t]*(?:import|from)[ \t]+torch\b", text, re.MULTILINE)
    above = text[: torch.start()] if torch else text
    names = re.findall(r"environ(?:\[\s*|\.setdefault\(\s*)['\"](\w+)['\"](?:\]\s*=(?!=)|\s*,)", above)
    return sorted({name for name in names if name in read or _READ_BY_LIBRARIES.fullmatch(name)})
