"""Imports ahead what ranks will import, and finds what a fork could not carry over.

A module may be imported before its rank exists only if it would have come out the same in the rank. So imports run with
the script's place on the path, as theirs would, and are watched: threads, processes, open files and CUDA do not survive
a fork, and a variable that places the rank, or that the script sets, has another value there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from .learning import Learned, installed_roots
from .names import DEVICES, of_one_rank
from .plan import Plan
from .traces import changes

_ALWAYS = ("torch", "torch._dynamo")
"""torch._dynamo is imported by the first optimizer, and costs as much again as torch."""

_READ_BY_LIBRARIES = re.compile(r"(?:OMP|KMP|GOMP|MKL|OPENBLAS|NUMEXPR|VECLIB|MALLOC|LD|GLIBC)_\w+")
"""Variables that native libraries read when they are loaded, which cannot be watched."""
_ALL = "*"
_HARMLESS_READERS = frozenset({"perdure_launcher", "networkx", "fsspec"})
"""Ours, whose variables ranks do not have; those that go through all variables for the ones with their own prefix."""
_LONGEST_SCRIPT = 1 << 20

_PATHS = sysconfig.get_paths()
_STANDARD = (_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep)
_INSTALLED = (_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep)


class Unfit(Exception):
    """This interpreter cannot be forked from; the message says why."""


class Refused(Exception):
    """A package cannot be imported ahead; the message says why."""

    def __init__(self, package: str, reason: str) -> None:
        super().__init__(reason)
        self.package = package


@dataclass
class Imports:
    """What was imported, and the variables that were read meanwhile."""

    plan: Plan
    _always: set[str] = field(default_factory=set[str])
    """Variables read by what is always imported."""
    _learned: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Variables by the package that read them."""

    def always(self) -> None:
        """Imports what every rank of torch's needs.

        Raises:
            Unfit: if the result cannot be forked, or the script would have prepared the import in its own way.
        """
        known = set(sys.modules)
        with _as_in_the_rank(self.plan), _reading(lambda _, name: self._always.add(name)):
            for name in _ALWAYS:
                importlib.import_module(name)
        if names := _from_script(self.plan, set(sys.modules) - known):
            raise Unfit(f"torch imports {', '.join(names)} from the script's own folder")
        if names := _set_before_torch(self.plan, self._always):
            raise Unfit(f"the script sets {', '.join(names)}, which is read when torch is imported")
        if threads := _threads():
            raise Unfit(f"its imports started {threads} threads, which a fork would lose")
        if _cuda_is_initialised():
            raise Unfit("its imports initialised CUDA, which cannot be used after a fork")
        _freeze()

    def learned(self, learned: Learned, *, without: Collection[str], attend: Callable[[], None] | None = None) -> None:
        """Imports what ranks have imported, but for some packages.

        Args:
            learned: What that is.
            without: Packages to leave out.
            attend: Called before each import, by a process that has ranks to look after. One that only tries has none,
                and so can tell what an import leaves behind.

        Raises:
            Refused: if one of them cannot be imported ahead. This process is then of no use any more.
        """
        before = dict(os.environ)
        with _as_in_the_rank(self.plan), _reading(self._note):
            marks = _Marks.now()
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
                if attend is None and (found := _Marks.now().beyond(marks)):
                    raise Refused(package, found)
                self._refuse_what_read_its_place(package, without)
        own = changes(before, dict(os.environ))
        set_by_script = {name for name, value in learned.changed.items() if own.get(name, _ALL) != value}
        for package, names in self._learned.items():
            if package not in without and (read := names & set_by_script):
                raise Refused(package, f"it reads {', '.join(sorted(read))}, which the script sets")
        if _cuda_is_initialised():
            raise Refused("torch", "imports initialised CUDA")
        _freeze()

    def contradicted_by(self, changed: Iterable[str]) -> str:
        """Why ranks that set these variables themselves must not be forked; empty where they may."""
        read = self._always.union(*self._learned.values())
        names = sorted(
            name for name in changed if not of_one_rank(name) and (name in read or _READ_BY_LIBRARIES.fullmatch(name))
        )
        return f"the script sets {', '.join(names)}, which is read while modules are imported" if names else ""

    @property
    def read_of_devices(self) -> frozenset[str]:
        """Variables that may differ between ranks, and that must not any more."""
        return DEVICES & self._always.union(*self._learned.values())

    def _refuse_what_read_its_place(self, package: str, without: Collection[str]) -> None:
        for reader, names in self._learned.items():
            if reader in _HARMLESS_READERS:
                continue
            places = sorted(name for name in names if of_one_rank(name) and name not in DEVICES)
            if _ALL in names or places:
                what = "the whole environment" if _ALL in names else ", ".join(places)
                # One that is left out may still be imported by another, which then is left out too.
                raise Refused(package if reader in without else reader, f"{reader} reads {what} when it is imported")

    def _note(self, package: str, name: str) -> None:
        self._learned.setdefault(package, set()).add(name)


@dataclass(frozen=True)
class _Marks:
    """What an import may leave in a process, that a fork does not have or shares."""

    threads: int
    files: int
    children: str

    @classmethod
    def now(cls) -> _Marks:
        return cls(_threads(), len(os.listdir("/proc/self/fd")), _children())

    def beyond(self, before: _Marks) -> str:
        """Names what is there now and was not before."""
        if self.threads > before.threads:
            return f"its import started {self.threads - before.threads} threads"
        if self.files > before.files:
            return f"its import left {self.files - before.files} files open"
        return "its import left a process running" if self.children != before.children else ""


def _threads() -> int:
    """Threads beside this one, as a fork would lose them."""
    if len(os.listdir("/proc/self/task")) == 1:
        return 0
    # Libraries that know forks, as OpenBLAS does, put their threads away at the first one.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) - 1


def end_children() -> None:
    """Ends what imports have started, in a process that was only to try them."""
    for pid in _children().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _children() -> str:
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return ""


def _cuda_is_initialised() -> bool:
    import torch

    return torch.cuda.is_initialized()


def _freeze() -> None:
    """Has what is there now never collected: forks share its memory, and do not copy it at their first collection."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _as_in_the_rank(plan: Plan) -> Generator[None]:
    """Python's start goes on after us: only then does it add the script's folder to the path, and name the script."""
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


class _Watched(os._Environ[str]):  # pyright: ignore[reportPrivateUsage]
    """`os.environ`, telling what is read of it."""

    def __getitem__(self, key: str) -> str:
        if not _walks:
            _note_reading(key)
        return super().__getitem__(key)

    def __iter__(self) -> Generator[str]:
        _note_reading(_ALL)
        _walks.append(self)
        try:
            yield from super().__iter__()
        finally:
            _walks.pop()


_walks: list[_Watched] = []
"""Somebody goes through all variables, and what is read meanwhile is a part of that."""
_notes: list[Callable[[str, str], None]] = []


@contextlib.contextmanager
def _reading(note: Callable[[str, str], None]) -> Generator[None]:
    """Has `note` called with package and variable for what is read of `os.environ` within."""
    original = type(os.environ)
    _notes.append(note)
    os.environ.__class__ = _Watched
    try:
        yield
    finally:
        os.environ.__class__ = original
        _notes.pop()


def _note_reading(name: str) -> None:
    """Tells who reads: the nearest caller that is no part of Python, which reads on behalf of others."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and _is_pythons_own(frame.f_code.co_filename):
        frame = frame.f_back
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0] if frame is not None else ""
    for note in _notes:
        note(package, name)


def _is_pythons_own(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))
