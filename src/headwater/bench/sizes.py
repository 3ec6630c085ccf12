"""Sizes of memory as people write them: `512MB`, `1.5GiB`.

Knows units. Does not know what the memory is for.
"""

from __future__ import annotations

import re
from fractions import Fraction

from headwater.errors import UsageError

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
"""Name of a unit to its bytes; a size may write it in any case."""

_BY_LOWER = {name.lower(): factor for name, factor in UNITS.items()}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.ASCII)


def parse_bytes(text: str) -> int:
    """The bytes of a size such as `512MB` (512,000,000) or `1.5 GiB` (1,610,612,736).

    Raises UsageError for a size without a unit, with an unknown one, or that is not a whole number of bytes above 0.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _BY_LOWER:
        raise UsageError(
            f"{text!r} is not a size of memory; write a number and one of {', '.join(UNITS)}, such as 512MB or 1.5GiB"
        )
    size = Fraction(found[1]) * _BY_LOWER[found[2]]
    if size < 1 or size.denominator != 1:
        raise UsageError(f"{text!r} is {float(size):g} bytes; a size of memory is a whole number of at least 1 byte")
    return int(size)
