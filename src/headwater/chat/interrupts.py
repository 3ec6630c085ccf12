"""Ctrl-C between steps of the model, never inside one.

Knows signals. Does not know what a step does. A model that is interrupted half way through its layers leaves a cache
that fits nothing; so the key is remembered while a step runs and takes effect right after it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def whole_step() -> Iterator[None]:
    """Put a KeyboardInterrupt off until the block is done. Leaves a handler that the program set itself alone."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
