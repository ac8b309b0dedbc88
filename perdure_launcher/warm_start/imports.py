"""Imports in advance the modules that ranks will import, and detects imports that would have another result in a rank.

A module may be imported before its rank exists only if the result is the same as in the rank. So imports run with the
script's folder on the path, as in the rank, and their side effects are checked: threads, open files and devices do not
survive a fork, a process would belong to no rank, and variables that the script sets, or that contain the rank's
number, have other values in the rank.
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

from ..torch_internals import plugin_loader
from .environ_tracker import ALL, track_reads
from .fork_safety import ProcessResources, holds_devices, list_children
from .generators import python_generators, types_created_since_freeze
from .learning import Learned, installed_roots
from .names import of_one_rank
from .plan import Plan
from .start_method import FORK, STANDBY, StartMethod
from .traces import changes

_ALWAYS = ("torch", "torch._dynamo")
"""The first optimizer imports torch._dynamo, which takes as long again as torch."""

_READ_BY_LIBRARIES = re.compile(
    r"(?:OMP|KMP|GOMP|MKL|OPENBLAS|NUMEXPR|VECLIB|MALLOC|LD|GLIBC|PYTORCH|ATEN|C10)_\w+"
    r"|TORCH_(?!NCCL_|ELASTIC_|HOME$|EXTENSIONS_DIR$|CUDA_ARCH_LIST$)\w+"
)
"""Variables that native libraries, and torch's own, read when they are loaded; such reads cannot be tracked. Those of
process groups, and of what is compiled or downloaded, are read later."""
_READ_BY_DRIVERS = re.compile(r"(?:CUDA|NVIDIA|HIP|ROCR|HSA|GPU)_\w+")
"""Variables that drivers of GPUs read when they are initialized; such reads cannot be tracked either."""
_HARMLESS_READERS = frozenset({"perdure_launcher", "networkx", "fsspec"})
"""Perdure's launcher, whose variables ranks do not have, and packages that iterate over all variables to find those
with their own prefix."""
_LONGEST_SCRIPT = 1 << 20


class Unfit(Exception):
    """No rank can be started from this interpreter; the message says why."""

    def __init__(self, reason: str, *, for_forks_only: bool = False) -> None:
        super().__init__(reason)
        self.for_forks_only = for_forks_only
        """The reason applies to forks only, not to standbys."""


class Refused(Exception):
    """A package cannot be imported in advance; the message says why."""

    def __init__(self, package: str, reason: str, *, by_forks_only: bool = False) -> None:
        super().__init__(reason)
        self.package = package
        self.by_forks_only = by_forks_only
        """The reason applies to forks only: a standby may import the package."""


@dataclass
class Imports:
    """The imports of this process, and the variables that they read."""

    plan: Plan
    method: StartMethod = FORK
    """The start method of ranks from this process."""
    _always: set[str] = field(default_factory=set[str])
    """Variables that the modules read which are always imported."""
    _learned: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Variables by the package that has read them."""
    generators: list[random.Random] = field(default_factory=list[random.Random])
    """Generators of the modules that are always imported; each fork seeds them again."""

    def always(self) -> None:
        """Imports the modules that every rank with torch needs.

        Raises:
            Unfit: if the result cannot be forked, or if the script changes how torch is imported.
        """
        known = set(sys.modules)
        with _as_in_the_rank(self.plan), track_reads(lambda _, name: self._always.add(name)):
            for name in _ALWAYS:
                importlib.import_module(name)
        if names := _from_script(self.plan, set(sys.modules) - known):
            raise Unfit(f"torch imports {', '.join(names)} from the script's own folder")
        if names := _set_before_torch(self.plan, self._always):
            raise Unfit(f"the script sets {', '.join(names)}, which is read when torch is imported")
        if plugin_loader() is None:
            raise Unfit("this torch has no function that loads its plugins after it is imported")
        if self.method.same_process:
            return
        if threads := ProcessResources.now().threads:
            raise Unfit(f"its imports started {threads} threads, which a fork would lose", for_forks_only=True)
        if _has_touched_devices():
            raise Unfit("its imports initialised CUDA, which cannot be used after a fork", for_forks_only=True)
        self.generators = python_generators()
        _freeze()

    def import_learned(
        self, learned: Learned, *, without: Collection[str], attend: Callable[[], None] | None = None
    ) -> None:
        """Imports the modules that ranks reported, without some packages.

        Args:
            learned: The report of a rank.
            without: Packages to leave out.
            attend: Called before each import by a process that serves ranks. Without it, the side effects of each
                import are checked.

        Raises:
            Refused: if a module cannot be imported in advance. This process must not be used any more.
        """
        before = dict(os.environ)
        with _as_in_the_rank(self.plan), track_reads(self._note):
            leftovers = _Leftovers(self.method, learned, self.generators)
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
        if self.method.same_process:
            return
        if _has_touched_devices():
            raise Refused("torch", "imports initialised CUDA")
        _freeze()

    def find_contradiction(self, changed: Iterable[str]) -> str:
        """Returns why ranks that set these variables themselves must not be started from here; empty if they may be."""
        read = self._always.union(*self._learned.values())
        names = sorted(
            name for name in changed if not of_one_rank(name) and (name in read or _READ_BY_LIBRARIES.fullmatch(name))
        )
        return f"the script sets {', '.join(names)}, which is read while modules are imported" if names else ""

    @property
    def read_of_place(self) -> frozenset[str]:
        """Variables that differ between ranks in general, but that imports have read, so that a rank must have the same
        values."""
        return self.method.places & self._always.union(*self._learned.values())

    def _refuse_what_read_its_place(self, package: str, without: Collection[str]) -> None:
        for reader, names in self._learned.items():
            if reader in _HARMLESS_READERS:
                continue
            places = {name for name in names if of_one_rank(name)} - self.method.places
            if ALL in names or places:
                what = "the whole environment" if ALL in names else ", ".join(sorted(places))
                # A package that is left out may be imported by another package, which is then left out as well.
                raise Refused(
                    package if reader in without else reader,
                    f"{reader} reads {what} when it is imported",
                    by_forks_only=ALL not in names and places <= STANDBY.places,
                )

    def _note(self, package: str, name: str) -> None:
        self._learned.setdefault(package, set()).add(name)


class _Leftovers:
    """Refuses packages because of the side effects of their import."""

    def __init__(self, method: StartMethod, learned: Learned, generators: Iterable[random.Random]) -> None:
        self._method = method
        self._generators = generators
        self._resources = None if method.same_process else ProcessResources.now()
        self._children = list_children()
        self._set_for_drivers = sorted(name for name in learned.changed if _READ_BY_DRIVERS.fullmatch(name))

    def refuse(self, package: str) -> None:
        """Checks the side effects of the last import.

        Raises:
            Refused: if the rank would lack a side effect of the import, or share it.
        """
        if self._resources is not None:
            if lost := ProcessResources.now().first_new_since(self._resources):
                raise Refused(package, lost, by_forks_only=True)
            if made := types_created_since_freeze(without=self._generators):
                raise Refused(package, f"its import made generators ({', '.join(made)})", by_forks_only=True)
            # Checked once: the next check finds only generators that the next import has created.
            gc.freeze()
        if list_children() != self._children:
            raise Refused(package, "its import left a process running")
        if self._set_for_drivers and self._method.same_process and holds_devices():
            raise Refused(
                package, f"its import initializes a GPU, and the script sets {', '.join(self._set_for_drivers)}"
            )


def _has_touched_devices() -> bool:
    import torch

    return torch.cuda.is_initialized() or holds_devices()


def _freeze() -> None:
    """Excludes all current objects from garbage collection, so that forks share their memory instead of copying it at
    their first collection."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _as_in_the_rank(plan: Plan) -> Generator[None]:
    """Adds the script's folder to the path and sets the script's name, which Python itself does only later in its
    start."""
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
    """Returns the folder that Python will put first on the path; None if it adds none."""
    if sys.flags.safe_path:
        return None
    if plan.script is None:
        return os.getcwd()
    return os.path.dirname(os.path.realpath(plan.script))


def _from_script(plan: Plan, names: Iterable[str]) -> list[str]:
    """Returns the modules among these that come from the script's folder and are therefore the user's own."""
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
    """Returns the variables that the script's text sets before its first import of torch, and that this import
    reads."""
    try:
        text = Path(plan.script or "").read_text(encoding="utf-8", errors="replace")[:_LONGEST_SCRIPT]
    except OSError:
        return []
    torch = re.search(r"^[ \t]*(?:import|from)[ \t]+torch\b", text, re.MULTILINE)
    above = text[: torch.start()] if torch else text
    names = re.findall(r"environ(?:\[\s*|\.setdefault\(\s*)['\"](\w+)['\"](?:\]\s*=(?!=)|\s*,)", above)
    return sorted({name for name in names if name in read or _READ_BY_LIBRARIES.fullmatch(name)})
