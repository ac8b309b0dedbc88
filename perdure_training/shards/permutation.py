"""A shuffle of any number of indices that takes no memory: a keyed permutation.

A Feistel network permutes the numbers of a power of two for any round function. Results beyond the size are permuted
again until one is below it ("cycle walking"), which makes it a permutation of the size itself; the power of two is less
than twice the size, so two rounds of it are enough on average.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4
"""Four rounds of a Feistel network are a strong pseudorandom permutation, if the round function is a good one (Luby and
Rackoff, 1988). An even number gives both halves their own width back."""
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of the numbers from 0 to `size` - 1."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        """Creates the permutation; the same arguments give the same one on every machine and in every release."""
        bits = max(2, (size - 1).bit_length())
        self._size = size
        self._low = bits // 2
        self._high = bits - self._low
        digest = hashlib.sha256(f"perdure shuffle\0{size}\0{seed}\0{epoch}".encode()).digest()
        self._keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)]

    def __getitem__(self, number: int) -> int:
        """Returns the number that takes the place of this one."""
        if not 0 <= number < self._size:
            raise IndexError(f"{number} is not within 0 to {self._size - 1}")
        while True:
            number = self._once(number)
            if number < self._size:
                return number

    def _once(self, number: int) -> int:
        left_bits, right_bits = self._high, self._low
        left, right = number >> right_bits, number & ((1 << right_bits) - 1)
        for key in self._keys:
            mixed = (right + key) * 0x9E3779B97F4A7C15 & _MASK
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            mixed ^= mixed >> 32
            left, right = right, (left ^ mixed) & ((1 << left_bits) - 1)
            left_bits, right_bits = right_bits, left_bits
        return left << right_bits | right
