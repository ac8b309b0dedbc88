"""What a forked rank tells the warm interpreter at its first step: what else it has imported, for the ranks after it.

Only what was installed is told. The user's own modules may change between one start and the next, as nothing else may.
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
from dataclasses import dataclass
from typing import Any

from .names import SOCKET
from .traces import changes

_TIMEOUT_S = 1.0
_LOADERS = (importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader)


@dataclass(frozen=True)
class Learned:
    """What ranks do before their first step, as far as it can be done ahead."""

    modules: tuple[str, ...]
    """In the order in which their imports began."""
    changed: dict[str, str | None]
    """Variables that differ from those that the rank was started with: set by the script, or by what it imported."""

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Learned:
        """Reads a rank's message.

        Raises:
            KeyError, TypeError, ValueError: if it is none.
        """
        return cls(tuple(map(str, body["modules"])), dict(body["changed"]))

    def as_json(self) -> dict[str, Any]:
        return {"modules": self.modules, "changed": self.changed}


class _Rank:
    """This process, where it was forked and has not told yet."""

    folder: str | None = None
    environment: dict[str, str]


def begin(folder: str) -> None:
    """Notes how this rank starts; to be called when all is as the script will find it."""
    _Rank.folder, _Rank.environment = folder, dict(os.environ)


def tell() -> None:
    """Tells the warm interpreter, once, and only by the first rank of a node. Never raises, and never waits long."""
    folder, _Rank.folder = _Rank.folder, None
    if folder is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        body = {"modules": installed_modules(), "changed": changes(_Rank.environment, dict(os.environ))}
        connection.settimeout(_TIMEOUT_S)
        connection.connect(f"{folder}/{SOCKET}")
        connection.sendall(json.dumps({"learned": body}).encode() + b"\n")


def installed_modules() -> list[str]:
    """The modules of this process that came from where packages are installed."""
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
    """Whether importing the name finds this file. Not so what packages bring along and put on the path themselves."""
    package = name.partition(".")[0]
    return any(origin.startswith((f"{root}{package}{os.sep}", f"{root}{package}.")) for root in roots)


@functools.cache
def installed_roots() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    if site.ENABLE_USER_SITE:
        roots.append(site.getusersitepackages())
    return tuple(sorted({f"{root}{os.sep}" for root in roots}))
