"""Tests of what makes two errors of a script the same one."""

from __future__ import annotations

import pytest

from perdure.workflows.policy.diagnosis.raised_errors import raised_at

OWN = '  File "/code/train.py", line 12, in train\n    step()\n'
PACKAGE = '  File "/venv/lib/python3.11/site-packages/torch/nn/linear.py", line 125, in forward\n'
STANDARD = '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n'
FROZEN = '  File "<frozen importlib._bootstrap>", line 1176, in _find_and_load\n'


@pytest.mark.parametrize(
    ("error", "traceback", "expected"),
    [
        ("ValueError: bad batch 7", OWN, "ValueError at train.py:12"),
        ("torch.AcceleratorError: CUDA error", OWN + PACKAGE, "torch.AcceleratorError at train.py:12"),
        ("KeyError: 'x'", OWN + STANDARD + FROZEN, "KeyError at train.py:12"),
        ("KeyError: 'x'", PACKAGE, "KeyError at linear.py:125"),
        ("AssertionError", OWN, "AssertionError at train.py:12"),
        ("ValueError: x", None, ""),
        ("ValueError: x", "no frames", ""),
        (None, OWN, ""),
        ("OSError: [Errno 22] Invalid argument", OWN, ""),
        ("RuntimeError: the service is temporarily unavailable", OWN, ""),
    ],
)
def test_an_error_is_known_by_its_type_and_its_line(error: str | None, traceback: str | None, expected: str):
    assert raised_at(error, traceback) == expected
