"""Whose attention the model shows now: what `policy_cache.attach` switches to, and what a call of it reaches.

Knows the one cache that a forward pass under way belongs to, in this thread. Does not know what it does with what it is
shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor


class Attends(Protocol):
    """Layers that attend by themselves; see `KeptGroup.attend`."""

    def attend(self, index: int, query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor: ...


class Attending(Protocol):
    """The cache of a forward pass: what attends in each of its layers, and the layers that were reached."""

    reached: set[int]

    @property
    def group_of(self) -> Mapping[int, Attends]: ...


UNDER_WAY: ContextVar[Attending | None] = ContextVar("headwater_attending", default=None)


@contextmanager
def attending(cache: Attending) -> Iterator[None]:
    """Let a cache attend by itself, as long as the block lasts."""
    before = UNDER_WAY.set(cache)
    try:
        yield
    finally:
        UNDER_WAY.reset(before)
