"""What the measurements share: a stopwatch, the memory of this process, and how figures are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def timed(action: Callable[[], Any]) -> float:
    """Seconds that the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most resident memory during the action, above what there was before it. Linux only."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    action()
    return _resident("VmHWM") - before


def take(figures: dict[str, Any], new: dict[str, Any]) -> None:
    """Add new figures and print them."""
    figures.update(new)
    for name, value in new.items():
        print(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}", flush=True)


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
