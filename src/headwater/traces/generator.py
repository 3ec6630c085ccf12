"""The random generator of the specification: xoshiro128** seeded by splitmix32.

D. Blackman, S. Vigna, "Scrambled Linear Pseudorandom Number Generators", ACM TOMS 2021. Knows 32-bit words only; the
same seed gives the same numbers on every machine and in every language. It is quick enough for hundreds of draws.
"""

from __future__ import annotations

from headwater.errors import UsageError

WORDS = 1 << 32
"""How many values a word has."""

_MASK = WORDS - 1
_INCREMENT = 0x9E3779B9


def mix(word: int) -> int:
    """One word scrambled into another, one to one; `mix(0)` is 0."""
    word ^= word >> 16
    word = word * 0x21F0AAAD & _MASK
    word ^= word >> 15
    word = word * 0x735A2D97 & _MASK
    return word ^ word >> 15


class Generator:
    """A stream of numbers that the seed decides, modulo 2^32. Raises UsageError for a seed that is no integer."""

    def __init__(self, seed: int) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise UsageError(f"a seed is an integer, got {seed!r}")
        words = [mix(seed + count * _INCREMENT & _MASK) for count in range(1, 5)]
        # A state of zeros would stay zero for ever.
        self._state = words if any(words) else [1, 0, 0, 0]

    def next_u32(self) -> int:
        """A word."""
        a, b, c, d = self._state
        c ^= a
        d ^= b
        self._state = [a ^ d, b ^ c, c ^ (b << 9 & _MASK), _rotate(d, 11)]
        return _rotate(b * 5 & _MASK, 7) * 9 & _MASK

    def next_float(self) -> float:
        """A multiple of 2^-32 in `[0, 1)`."""
        return self.next_u32() / WORDS

    def next_int(self, bound: int) -> int:
        """An integer in `[0, bound)`, each as likely as the others. Raises UsageError for a bound outside 1..2^32."""
        if not isinstance(bound, int) or isinstance(bound, bool) or not 1 <= bound <= WORDS:
            raise UsageError(f"a bound is an integer between 1 and 2^32, got {bound!r}")
        low = (WORDS - bound) % bound
        while (word := self.next_u32()) < low:
            pass
        return word % bound


def _rotate(word: int, left: int) -> int:
    return (word << left | word >> 32 - left) & _MASK
