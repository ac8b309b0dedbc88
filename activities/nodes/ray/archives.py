"""The code of jobs in Ray's key-value tables: a part of the bridge. Actors read it there, as `actor.py` does."""

from __future__ import annotations

import base64

from ray.experimental import internal_kv

_CODE = "perdure/code/"
"""The prefix of the keys of the parts of jobs' code, as `actor.py` reads them."""
_OWNER = "perdure/code-of/"
"""The prefix of the keys that say which job has taken the code."""


def keep_part(archive: str, index: int, content: str) -> None:
    """Keeps a part of a job's code, in base64."""
    internal_kv._internal_kv_put(f"{_CODE}{archive}/{index:04}", base64.b64decode(content))


def adopt(archive: str, owner: str) -> None:
    """Notes that a job has taken the code."""
    internal_kv._internal_kv_put(_OWNER + archive, owner)


def is_adopted(archive: str) -> bool:
    """Returns whether a job has taken the code."""
    return internal_kv._internal_kv_get(_OWNER + archive) is not None


def remove(archive: str) -> None:
    """Removes a job's code."""
    for key in internal_kv._internal_kv_list(f"{_CODE}{archive}/"):
        internal_kv._internal_kv_del(key)
    internal_kv._internal_kv_del(_OWNER + archive)


def remove_those_of(owner: str) -> None:
    """Removes all code that a job has taken."""
    for key in internal_kv._internal_kv_list(_OWNER):
        if internal_kv._internal_kv_get(key) == owner.encode():
            remove(key.decode().removeprefix(_OWNER))
