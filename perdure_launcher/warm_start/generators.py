"""Finds random number generators that imports have created: without new seeds all forks would draw the same numbers.

Packages keep generators of their own beside the global ones. In a started rank each is seeded separately; a forked rank
would inherit the state from the warm interpreter.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterable

_KINDS = (
    ("random", "Random"),
    # Each Generator and RandomState of numpy holds one.
    ("numpy.random.bit_generator", "BitGenerator"),
    ("torch", "Generator"),
)


def python_generators() -> list[random.Random]:
    """Returns the instances of `random.Random` in this process, except the module's own, which Python seeds at each
    fork."""
    own = _identities(_generators_seeded_at_forks())
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), random.Random) and type(item) is not random.SystemRandom and id(item) not in own
    ]


def types_created_since_freeze(*, without: Iterable[object]) -> list[str]:
    """Returns the names of the types of generators that were created since the last `gc.freeze`.

    Args:
        without: Known generators, which are left out.
    """
    kinds = tuple(kind for module, name in _KINDS if (kind := getattr(sys.modules.get(module), name, None)) is not None)
    known = _identities([*_generators_seeded_at_forks(), *without])
    objects = gc.get_objects()
    # torch's generators are not tracked by the collector, but the objects that hold them are.
    everything: tuple[object, ...] = (*objects, *gc.get_referents(*objects))
    found: list[object] = [item for item in everything if issubclass(type(item), kinds) and id(item) not in known]
    return sorted({item.__class__.__name__ for item in found if not isinstance(item, random.SystemRandom)})


def _generators_seeded_at_forks() -> list[object]:
    """Returns generators that Python or Perdure seeds again in each fork, or that detect forks themselves."""
    names = getattr(sys.modules.get("tempfile"), "_name_sequence", None)
    numpys = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    torchs = getattr(sys.modules.get("torch"), "default_generator", None)
    return [
        getattr(random, "_inst", None),
        getattr(names, "_rng", None),
        getattr(numpys, "_bit_generator", None),
        torchs,
    ]


def _identities(items: Iterable[object]) -> set[int]:
    return {id(item) for item in items}
