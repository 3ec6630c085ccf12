"""What a measurement ran on: hardware and versions.

Knows the operating system's files and the installed packages' metadata. Does not import any runtime: the version of one
is recorded when the process has it loaded.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

_RUNTIMES = ("torch", "transformers", "mlx", "mlx_lm", "numba", "zarr")
_LLAMA_CPP = "headwater.engines.llamacpp_library"


def hardware() -> dict[str, str | int | None]:
    """CPU model, cores this process may use, memory in bytes (None where the system does not say), platform."""
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_bytes": _memory_bytes(),
        "accelerator": _accelerator(),
        "platform": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of headwater, Python, numpy, and of the runtimes that are loaded in this process."""
    found = {"python": platform.python_version()}
    for name in ("headwater", "numpy", *(name for name in _RUNTIMES if name in sys.modules)):
        try:
            found[name] = metadata.version(name.replace("_", "-"))
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    if loaded := getattr(sys.modules.get(_LLAMA_CPP), "LOADED", ()):  # it has no module of its own
        found["llama.cpp"] = loaded[-1]
    return found


def now() -> str:
    """The time, ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _accelerator() -> str | None:
    """The name of the CUDA device when torch is loaded and has one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return str(cuda.get_device_name(0)) if cuda is not None and cuda.is_available() else None
