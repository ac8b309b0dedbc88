"""A stub of torch for tests of how ranks start: only the parts that warm starts use, imported at once.

`test_the_stub_is_a_part_of_torch` compares it with the real one.
"""

import os
import random
from importlib import metadata

from . import compiler, cuda

__all__ = ["Generator", "compiler", "cuda", "default_generator", "get_num_threads", "zeros"]


class Generator:
    def __init__(self) -> None:
        self._drawing = random.SystemRandom()

    def seed(self) -> int:
        return self._drawing.getrandbits(63)


default_generator = Generator()


def get_num_threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def zeros(*size: int) -> list[float]:
    return [0.0] * size[0]


def _import_device_backends() -> None:
    for entry_point in metadata.entry_points(group="torch.backends"):
        entry_point.load()()


if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    _import_device_backends()
