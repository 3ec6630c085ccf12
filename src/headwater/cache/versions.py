"""Which releases of transformers the adapter was written for.

Knows version numbers only. Imported before anything of transformers, because another release may not even have the
names that the adapter imports.
"""

from __future__ import annotations

from importlib.metadata import version

from headwater.errors import UnsupportedVersion

FIRST, BEYOND = (5, 24), (6, 0)


def check(found: str) -> None:
    """Raises UnsupportedVersion for a release outside the range that is tested."""
    major, minor = (int(part) for part in found.split(".")[:2])
    if not FIRST <= (major, minor) < BEYOND:
        raise UnsupportedVersion(
            f"transformers {found} is installed, and the cache is made for 5.24 and later of version 5; run: "
            f"pip install 'transformers>=5.24,<6'"
        )


check(version("transformers"))
