"""Reports from ranks to the warm interpreter, at their first step: modules to import in advance for later ranks.

Only installed modules are reported. The user's own modules may change between two starts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import json
import os
import site
import socket
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perdure_training.node_api.local_rank import local_rank_of

from .names import SOCKET
from .traces import changes

_TIMEOUT_S = 1.0
_LOADERS = (importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader)


@dataclass(frozen=True)
class Learned:
    """The part of a rank's work before its first step that can be done in advance."""

    modules: tuple[str, ...]
    """Modules in the order in which their imports began."""
    changed: dict[str, str | None]
    """Variables that differ from the rank's initial environment: set by the script or by its imports."""

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Learned:
        """Reads a rank's message.

        Raises:
            KeyError, TypeError, ValueError: if it is not a valid report.
        """
        return cls(tuple(map(str, body["modules"])), dict(body["changed"]))

    def as_json(self) -> dict[str, Any]:
        return {"modules": self.modules, "changed": self.changed}


class _Rank:
    """The state of this process, if it is a warm rank that has not reported yet."""

    folder: str | None = None
    environment: dict[str, str]


def begin(folder: str) -> None:
    """Records the rank's initial environment; call it when the process is as the script will find it."""
    _Rank.folder, _Rank.environment = folder, dict(os.environ)


def tell(modules: Sequence[str] | None = None) -> None:
    """Sends the report to the warm interpreter, once, from the first rank of a node. Never raises, never waits long.

    Args:
        modules: The modules to report; by default all that are installed.
    """
    folder, _Rank.folder = _Rank.folder, None
    if folder is None or local_rank_of(os.environ) != 0:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        named = installed_modules() if modules is None else modules
        body = {"modules": named, "changed": changes(_Rank.environment, dict(os.environ))}
        connection.settimeout(_TIMEOUT_S)
        connection.connect(f"{folder}/{SOCKET}")
        connection.sendall(json.dumps({"learned": body}).encode() + b"\n")


def installed_modules() -> list[str]:
    """Returns the modules of this process that come from the folders of installed packages."""
    roots = installed_roots()
    found: list[str] = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if (
            spec is not None
            and spec.name == name
            and isinstance(spec.loader, _LOADERS)
            and isinstance(origin, str)
            and _stands_for_itself(name, origin, roots)
        ):
            found.append(name)
    return found


def _stands_for_itself(name: str, origin: str, roots: tuple[str, ...]) -> bool:
    """Returns whether importing the name finds this file. It does not for modules that packages bundle and put on the
    path themselves."""
    package = name.partition(".")[0]
    return any(origin.startswith((f"{root}{package}{os.sep}", f"{root}{package}.")) for root in roots)


def states_of_packages() -> dict[str, int]:
    """Returns the state of each folder of installed packages."""
    states: dict[str, int] = {}
    for root in installed_roots():
        with contextlib.suppress(OSError):
            states[root] = state_of_folder(root)
    return states


def state_of_folder(root: str) -> int:
    """Returns a number that changes when a package is installed there, upgraded or removed: its metadata is then new.

    Raises:
        OSError: if the folder is gone.
    """
    found: list[tuple[str, int]] = []
    with os.scandir(root) as entries:
        for entry in entries:
            # Packages have folders of their own, which imports change by writing compiled modules.
            if entry.name.endswith(("-info", ".py", ".so", ".pth")):
                found.append((entry.name, entry.stat().st_mtime_ns))
            elif entry.name != "__pycache__":
                found.append((entry.name, 0))
    return zlib.crc32(repr(sorted(found)).encode(errors="surrogateescape"))


@functools.cache
def installed_roots() -> tuple[str, ...]:
    """Returns the folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    if site.ENABLE_USER_SITE:
        roots.append(site.getusersitepackages())
    return tuple(sorted({f"{root}{os.sep}" for root in roots}))
