"""Generators of random numbers that a script has made itself: what is saved of one, and how it goes back to that.

Pickled as they are, another object would take their place after a restore, and the script's own would draw the numbers
again that it has drawn from its beginning.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from typing import Any, cast

import torch

_ARRAY = "array"


def is_generator(value: object) -> bool:
    """Whether a value is a generator whose state can be set."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(value, torch.Generator) or _is_numpys(value)


def state_of(generator: Any) -> torch.Tensor | bytes:
    """Returns the present state: a tensor, or JSON, which runs no code of a user who can write the storage."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate()).encode()
    bits = getattr(generator, "bit_generator", None)
    state = bits.state if bits is not None else generator.get_state(legacy=False)
    return json.dumps(state, default=_described).encode()


def set_state(name: str, generator: Any, state: Any) -> None:
    """Has a generator go back to a state.

    Raises:
        KeyError: if the state is of another kind of generators.
    """
    # An older release has saved the generator itself.
    state = cast("Any", state_of(state) if is_generator(state) else state)
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            version, numbers, gauss = json.loads(state)
            generator.setstate((version, tuple(numbers), gauss))
        elif (bits := getattr(generator, "bit_generator", None)) is not None:
            bits.state = json.loads(state, object_hook=_read)
        else:
            generator.set_state(json.loads(state, object_hook=_read))
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        kind = type(generator).__name__
        raise KeyError(f"{name}: what was saved is no state of a {kind}: {error}. Restore what was saved") from error


def _described(array: Any) -> Any:
    """What JSON has no form of: NumPy's arrays and numbers."""
    return {_ARRAY: array.tolist(), "dtype": str(array.dtype)} if array.ndim else array.item()


def _read(found: dict[str, Any]) -> Any:
    if _ARRAY not in found:
        return found
    return importlib.import_module("numpy").array(found[_ARRAY], dtype=found["dtype"])


def _is_numpys(value: object) -> bool:
    # Not a dependency: only a script that has imported it has such generators.
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)
