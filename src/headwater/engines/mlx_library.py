"""MLX and mlx-lm, found and imported.

Knows where they run, how a missing part is told, and what importing them changes. Does not know models.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

from headwater.errors import MissingExtra, UnsupportedVersion

PACKAGES = ("mlx", "mlx-lm", "jinja2")
EXTRA = "mlx"


def missing() -> str | None:
    """The package that is missing; imports nothing."""
    return next((name for name in PACKAGES if find_spec(name.replace("-", "_")) is None), None)


def core() -> ModuleType:
    """`mlx.core`, with mlx-lm beside it. Raises MissingExtra, or UnsupportedVersion where it cannot be imported."""
    if (name := missing()) is not None:
        raise MissingExtra(name, EXTRA)
    try:
        import mlx.core as mx

        _import_models()
    except ImportError as error:  # mlx alone is only half of it on Linux: the other half is its extra
        raise UnsupportedVersion(
            f"mlx is installed and cannot be imported: {error}; run: pip install 'headwater[{EXTRA}]'"
        ) from error
    return mx


def _import_models() -> None:
    """mlx-lm limits how many files the process may open when it is imported; the limit is put back as far as it can."""
    if sys.platform == "win32" or "mlx_lm" in sys.modules:
        import mlx_lm.utils

        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    import mlx_lm.utils  # noqa: F401

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    except ValueError:  # only the system's administrator may raise the upper one again
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        soft = most if before[0] == resource.RLIM_INFINITY else min(before[0], most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
