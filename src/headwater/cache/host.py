"""Copies of tensors in host memory that is used again.

Knows that fresh memory costs several times the copy into it: the system clears every page when it is first touched. So
what one snapshot took is kept for the next, up to a bound, once the first is no longer needed. Does not know what is
copied.
"""

from __future__ import annotations

from collections import deque

import torch
from jaxtyping import Shaped
from torch import Tensor

KEPT_BYTES = 512 << 20
"""More than this is given back to the system: there memory is dearer than time."""

ROOM = 4
"""A copy's memory is larger by one part in so many, for the next may be of more tokens; an untouched page is free."""


class Copies:
    """The copies of one moment, in spare memory where some fits."""

    def __init__(self, spare: list[Tensor]) -> None:
        self._spare = spare
        self._used: list[Tensor] = []

    def copied(self, tensor: Shaped[Tensor, "*dims"]) -> Shaped[Tensor, "*dims"]:
        """A contiguous copy in host memory."""
        nbytes = tensor.numel() * tensor.element_size()
        fitting = (index for index, memory in enumerate(self._spare) if memory.numel() >= nbytes)
        index = next(fitting, None)
        memory = torch.empty(nbytes + nbytes // ROOM, dtype=torch.uint8) if index is None else self._spare.pop(index)
        self._used.append(memory)
        return memory[:nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def release(self) -> list[Tensor]:
        """The memory, for whoever copies next; the copies are worth nothing from now on."""
        return self._used


class HostMemory:
    """What the copies of one stream are made in, moment after moment."""

    def __init__(self) -> None:
        # A deque, because a snapshot may be dropped in another thread, or by the garbage collector in the middle of
        # anything: its append and pop need no lock.
        self._spare: deque[list[Tensor]] = deque(maxlen=1)

    def copies(self) -> Copies:
        """Copies to be made now."""
        try:
            return Copies(self._spare.pop())
        except IndexError:
            return Copies([])

    def take_back(self, copies: Copies) -> None:
        """Keep the memory of copies that nobody will look at again."""
        used = copies.release()
        if sum(memory.numel() for memory in used) <= KEPT_BYTES:
            self._spare.append(used)
